"""A deployment on one machine: a SuperLink and SuperNodes as real processes, on free ports, all ended at the end.

Every process has an ``FLWR_HOME`` of its own below one temporary folder, as on machines of their own; by that setting
they are also found and ended, by the guard of ``task/processes.py`` when this process is killed.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import flwr

from server_app.recorder import ROUNDS, RUN, SUMMARY
from task import processes
from task.progress import last_error
from task.result_files import read_json
from task.superlink import free_port, last_run_id, private_environment, toml_string
from tests.e2e.certificates import ServerFiles, make_node_key, make_server_files
from tests.e2e.commands import REPOSITORY

CONNECTION = "deployment"
PATIENCE = 180.0  # seconds that a process gets for what usually takes a few; the machine may be busy
# From 1.40 on SuperNodes reach the SuperLink at the one address of its HTTP server.
SPEAKS_GRPC = tuple(int(part) for part in flwr.__version__.split(".")[:2]) < (1, 40)


@dataclass
class Started:
    """A process of the deployment, whose output is added to the file ``log``."""

    process: "subprocess.Popen[bytes]"
    log: Path
    before: int = 0  # characters in the log when the process started

    @property
    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")[self.before :]

    def wait_for(self, *words: str, seconds: float = PATIENCE) -> str:
        """Wait until the output has one of the ``words``, and return it; also when that ends the process."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None
            text = self.text
            for word in words:
                if word in text:
                    return word
            assert not ended, text
            assert time.monotonic() < deadline, text
            time.sleep(0.1)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End the process as a power cut does."""
        self.process.kill()
        self.process.wait()


class Deployment:
    """A SuperLink with a database, and the commands to it; a context manager that leaves no process and no file.

    ``security`` is ``plain``, ``tls``, or ``keys`` for TLS with registered SuperNodes. Other ``files`` than good ones
    show what is refused.
    """

    def __init__(self, security: str = "plain", files: ServerFiles | None = None) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="protofed-"))
        self.security = security
        self.environment = private_environment(self.home)
        # A Flower that was installed beside the usual one brings its own programs.
        beside = Path(flwr.__file__).parents[1] / "bin"
        if (beside / "flower-superlink").exists():
            self.environment["PATH"] = f"{beside}{os.pathsep}{self.environment['PATH']}"
        self.files = files or make_server_files(self.home / "certificates")
        self.port, self.fleet_port = free_port(), free_port()
        if not SPEAKS_GRPC:
            self.fleet_port = self.port
        self.address = f"127.0.0.1:{self.fleet_port}"  # where SuperNodes look for the SuperLink
        self.link: Started | None = None
        self._started: list[Started] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._write_connection()
            self.start_link()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start_link(self) -> None:
        """Start the SuperLink, or start it again on the same ports with the same database."""
        words = ["--database", str(self.home / "link.db"), "--host", "127.0.0.1", "--port", str(self.port)]
        if SPEAKS_GRPC:
            words += ["--fleet-api-address", f"127.0.0.1:{self.fleet_port}"]
        if self.security == "plain":
            words += ["--insecure"]
        else:
            words += ["--ssl-ca-certfile", str(self.files.authority), "--ssl-certfile", str(self.files.certificate)]
            words += ["--ssl-keyfile", str(self.files.key)]
        if self.security == "keys":
            words += ["--enable-supernode-auth"]
        self.link = self._start("link", "flower-superlink", *words)
        if self._guard is None:
            self._guard = processes.start_guard(self.link.process.pid, str(self.home))
        for port in (self.fleet_port, self.port):
            self._wait_for_port(port)

    def node(
        self,
        name: str,
        facts: Mapping[str, int | str],
        *more: str,
        key: Path | None = None,
        authority: Path | None = None,
        insecure: bool | None = None,
        superlink: str | None = None,
    ) -> Started:
        """Start a SuperNode with ``facts`` as its ``--node-config`` and ``more`` words; what follows may be wrong.

        With ``security="keys"`` it needs a ``key`` that ``register`` knows.
        """
        values = {fact: toml_string(value) if isinstance(value, str) else value for fact, value in facts.items()}
        words = ["--superlink", superlink or self.address, "--port", str(free_port())]
        words += ["--node-config", " ".join(f"{fact}={value}" for fact, value in values.items())]
        if self.security == "plain" if insecure is None else insecure:
            words += ["--insecure"]
        else:
            words += ["--root-certificates", str(authority or self.files.authority)]
        if key is not None:
            words += ["--auth-supernode-private-key", str(key)]
        return self._start(name, "flower-supernode", *words, *more)

    def nodes(self, number: int, **facts: str) -> list[Started]:
        """Start so many SuperNodes as the security wants them, each with a state folder of its own."""
        return [self.member(f"node-{partition}", partition, number, **facts) for partition in range(number)]

    def hospital(self, name: str, data: Path, **facts: str) -> Started:
        """Start a good SuperNode that is known by its name and has images of its own."""
        return self._member(name, {"name": name, "data": str(data), **facts})

    def member(self, name: str, partition: int, number: int, **facts: str) -> Started:
        """Start one good SuperNode; under a ``name`` used before it has the same key and the same state folder."""
        return self._member(name, {"partition-id": partition, "num-partitions": number, **facts})

    def _member(self, name: str, facts: Mapping[str, int | str]) -> Started:
        state = {"state-dir": str(self.home / "state" / name)}
        key = self.home / "keys" / name if self.security == "keys" else None
        if key is not None and not key.exists():
            self.register(make_node_key(key))
        return self.node(name, {**state, **facts}, key=key)

    def register(self, key: Path) -> str:
        """Allow the SuperNode with this key to take part, and return what Flower says."""
        return self.flwr("supernode", "register", str(key.with_suffix(".pub")), CONNECTION)

    def flwr(self, *words: str) -> str:
        """Run a short ``flwr`` command to its end and return what it prints."""
        command = self._start("flwr", "flwr", *words)
        assert command.process.wait(PATIENCE) == 0, command.text
        return command.text

    def run(self, overrides: str, folder: Path, *words: str) -> Started:
        """Start ``flwr run . CONNECTION --stream`` with the results in ``folder``."""
        settings = self.home / "run-config.toml"
        values = {"overrides": overrides, "output-dir": str(folder)}
        settings.write_text("".join(f"{key} = {toml_string(value)}\n" for key, value in values.items()), "utf-8")
        run_config = ("--run-config", str(settings))
        return self._start("run", "flwr", "run", str(REPOSITORY), CONNECTION, "--stream", *run_config, *words)

    def wait_for_round(self, number: int, folder: Path, seconds: float = 600.0) -> None:
        """Wait until the line of a round is in the results."""
        deadline = time.monotonic() + seconds
        while not (folder / ROUNDS).exists() or (folder / ROUNDS).read_text("utf-8").count("\n") < number:
            assert not (folder / SUMMARY).exists(), self.all_text()
            assert time.monotonic() < deadline, self.all_text()
            time.sleep(0.1)

    def finish(self, run: Started, folder: Path, seconds: float = 600.0) -> dict[str, Any]:
        """Wait for the run's ``summary.json`` and return it."""
        deadline = time.monotonic() + seconds
        while not (folder / SUMMARY).exists():
            assert time.monotonic() < deadline, self.all_text()
            ended = run.process.poll()
            assert ended is None or (folder / RUN).exists(), self.all_text()
            time.sleep(0.2)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(30)  # the last words of the log
        return read_json(folder / SUMMARY)

    def stop(self, run: Started) -> None:
        """Stop the run as a user does."""
        run_id = last_run_id(run.log)
        assert run_id is not None, run.text
        self.flwr("stop", str(run_id), CONNECTION)

    def all_text(self) -> str:
        """Return every log of the deployment."""
        logs = sorted(self.home.glob("*.log"))
        return "".join(f"== {log.name}\n{log.read_text('utf-8', 'replace')}\n" for log in logs)

    def close(self) -> None:
        """End every process that was started here, and remove the folder."""
        for started in self._started:
            with contextlib.suppress(ProcessLookupError):
                started.send(signal.SIGCONT)
        if self.link is not None:
            processes.end_all(self.link.process.pid, str(self.home))
        for started in self._started:
            started.process.kill()
            started.process.wait()
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def _start(self, name: str, program: str, *words: str) -> Started:
        path = shutil.which(program, path=self.environment["PATH"])
        assert path is not None, f"{program} is not installed"
        home = self.home if program == "flwr" else self.home / name
        home.mkdir(exist_ok=True)
        log = self.home / f"{name}.log"
        before = len(log.read_text("utf-8", "replace")) if log.exists() else 0
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [path, *words],
                cwd=home,
                env={**self.environment, "FLWR_HOME": str(home)},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(Started(process, log, before))
        return self._started[-1]

    def _write_connection(self) -> None:
        lines = ["[superlink]", f'default = "{CONNECTION}"', "", f"[superlink.{CONNECTION}]"]
        lines += [f'address = "127.0.0.1:{self.port}"']
        plain = self.security == "plain"
        lines += ["insecure = true" if plain else f"root-certificates = {toml_string(str(self.files.authority))}"]
        (self.home / "config.toml").write_text("\n".join(lines) + "\n", "utf-8")

    def _wait_for_port(self, port: int) -> None:
        assert self.link is not None
        deadline = time.monotonic() + PATIENCE
        while True:
            assert self.link.process.poll() is None, last_error(self.link.log)
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return
            assert time.monotonic() < deadline, self.link.text
            time.sleep(0.1)
