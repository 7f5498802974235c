"""A private certificate authority, server certificates and node keys, as the deployment guide makes them by hand."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class ServerFiles:
    """Paths of what a SuperLink with TLS needs."""

    authority: Path
    certificate: Path
    key: Path


def make_server_files(folder: Path, hosts: tuple[str, ...] = HOSTS, valid_days: int = 1) -> ServerFiles:
    """Make an authority and the certificate of a server that answers to ``hosts``.

    ``valid_days`` below 0 makes a certificate that expired so many days ago.
    """
    folder.mkdir(parents=True)
    root_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ProtoFed test authority")])
    public = root_key.public_key()
    authority = (
        _builder(root, root, public, abs(valid_days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_signs_certificates(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    server = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    certificate = (
        _builder(server, root, server_key.public_key(), valid_days)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
    )
    files = ServerFiles(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    files.authority.write_bytes(authority.sign(root_key, hashes.SHA256()).public_bytes(Encoding.PEM))
    files.certificate.write_bytes(certificate.sign(root_key, hashes.SHA256()).public_bytes(Encoding.PEM))
    _write_private(files.key, server_key, PrivateFormat.PKCS8)
    return files


def make_node_key(path: Path) -> Path:
    """Write a SuperNode's private key to ``path`` and the public one beside it, ``.pub``; return ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(path, key, PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")
    return path


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid_days: int
) -> x509.CertificateBuilder:
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    end = now + valid_days * day
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - 2 * day)
        .not_valid_after(end)
    )


def _signs_certificates() -> x509.KeyUsage:
    uses = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    others = dict.fromkeys((*uses, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(key_cert_sign=True, crl_sign=True, **others)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
