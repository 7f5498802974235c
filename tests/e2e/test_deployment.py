"""Deployments of real processes: the same numbers as a simulation, and what happens when something fails."""

import base64
import json
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from task import processes
from tests.e2e.certificates import make_node_key, make_server_files
from tests.e2e.commands import REPOSITORY
from tests.e2e.deployment import CONNECTION, SPEAKS_GRPC, Deployment
from tests.e2e.meter import metered
from tests.fake_grid import run_federation

pytestmark = pytest.mark.e2e
LOG = getLogger(__name__)
SMALL = "debug=smoke partition.max_samples=240 federation.num_clients=null federation.node_timeout=300"
ROUNDS = 4


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of rounds.jsonl without the times."""
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text("utf-8").splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def simulated(overrides: str, folder: Path, num_nodes: int, **grid: Any) -> list[dict[str, Any]]:
    """The same run in this process."""
    torch.set_num_threads(1)
    run_federation(overrides, str(folder), num_nodes=num_nodes, **grid)
    return rows_of(folder)


def deployed(overrides: str, folder: Path, security: str, num_nodes: int, arrays: float) -> list[dict[str, Any]]:
    """Run a deployment; return its lines after checking how many bytes the nodes exchanged with the SuperLink.

    ``arrays`` are sent with a message, on average; Flower moves each by two calls with signed headers.
    Nodes ask every three seconds whether there is a message, and now and then say that they live. What that costs is
    measured after the run: it is Flower's price of waiting, not of a message. Nodes also ask again for what is not
    there yet, on a busy machine often, so the round with the fewest bytes counts.
    """
    passed: list[tuple[float, int]] = []
    with Deployment(security) as deployment, metered(deployment.fleet_port) as meter:
        deployment.address = meter.address
        for node in deployment.nodes(num_nodes):
            node.wait_for("SuperNode ID")
        run = deployment.run(overrides, folder)
        for number in range(1, ROUNDS + 1):
            deployment.wait_for_round(number, folder)
            passed.append((time.monotonic(), meter.bytes))
        assert deployment.finish(run, folder)["status"] == "completed"
        began, before = time.monotonic(), meter.bytes
        time.sleep(10)
        waiting = (meter.bytes - before) / (time.monotonic() - began)
    assert not deployment.home.exists()
    assert not processes.carriers(f"FLWR_HOME={deployment.home}")
    rows = rows_of(folder)
    messages = num_nodes * 4  # train and evaluate, there and back
    used = []
    for row, (began, before), (ended, after) in zip(rows[1:], passed, passed[1:], strict=False):
        claimed = sum(row["bytes"].values())
        used.append(((after - before - waiting * (ended - began) - 0.1 * claimed - claimed) / messages, claimed))
    LOG.info("bytes a message beyond 1.1 times what is claimed, and that: %s; %.0f/s of waiting", used, waiting)
    least, claimed = min(used)
    assert least < 5000 + 1400 * arrays, (used, waiting)
    assert least * messages > -0.2 * claimed, (used, waiting)
    return rows


def test_a_plain_deployment_has_the_numbers_of_a_simulation(tmp_path: Path) -> None:
    overrides = f"{SMALL} federation.rounds={ROUNDS}"
    rows = deployed(overrides, tmp_path / "deployed", "plain", 2, arrays=0)
    assert rows == simulated(overrides, tmp_path / "simulated", 2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tls_has_the_numbers_of_a_simulation(tmp_path: Path) -> None:
    overrides = f"{SMALL} federation.rounds={ROUNDS} algorithm=lg_fedavg"
    # Weight and bias of a head, but none with the fourth message, which has the result of the evaluation.
    rows = deployed(overrides, tmp_path / "deployed", "tls", 2, arrays=1.5)
    assert rows == simulated(overrides, tmp_path / "simulated", 2)


@pytest.mark.timeout(1200)
def test_hospitals_with_node_keys_work_and_no_secret_is_anywhere(tmp_path: Path) -> None:
    images, labels = make_images()
    names = np.array(["left", "middle", "right"])
    facts = []
    for name, mine in (("north", labels < 2), ("south", labels > 0)):
        np.savez(tmp_path / f"{name}.npz", x=images[mine], y=names[labels[mine]])
        facts.append({"name": name, "data": str(tmp_path / f"{name}.npz")})
    overrides = f"{SMALL} data=own federation.num_clients=2"
    expected = simulated(overrides, tmp_path / "simulated", 2, facts=facts)
    folder = tmp_path / "deployed"
    with Deployment("keys") as deployment:
        for fact in facts:
            deployment.hospital(fact["name"], Path(fact["data"]))
        summary = deployment.finish(deployment.run(overrides, folder), folder)
        keys = [deployment.files.key, *(deployment.home / "keys" / fact["name"] for fact in facts)]
        bundled = bundle(deployment, keys, tmp_path)
        secrets = {line for key in keys for line in key.read_bytes().splitlines() if not line.startswith(b"-----")}
        for image in images:
            row = image[image.shape[0] // 2].tobytes()
            secrets |= {row, base64.b64encode(row), row.hex().encode()}
        public = list(deployment.home.glob("*.log"))
        public += [path for path in folder.rglob("*") if path.is_file()]
        found = {str(path): path.read_bytes() for path in public} | bundled
    assert summary["status"] == "completed"
    assert summary["class_names"] == ["left", "middle", "right"]
    assert rows_of(folder) == expected
    assert len(secrets) > 100
    assert {Path(name).name for name in found} >= {"run.log", "link.log", "north.log", "summary.json", "fedtgp.py"}
    leaks = [(name, secret) for name, content in found.items() for secret in secrets if secret in content]
    assert not leaks


def bundle(deployment: Deployment, keys: list[Path], folder: Path) -> dict[str, bytes]:
    """Return the files of the bundle of a project in which somebody left the ``keys`` and the images lying."""
    project, kept = folder / "project", (".git", ".venv", "outputs", "__pycache__")
    shutil.copytree(REPOSITORY, project, ignore=shutil.ignore_patterns(*kept))
    for key in (*keys, folder / "north.npz"):
        shutil.copy(key, project)
        shutil.copy(key, project / "task")
    deployment.flwr("build", "--app", str(project))
    [file] = deployment.home.glob("*.fab")
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def make_images() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images ``(240, 28, 28)`` of noise with a bright bar for each of three classes, and their labels."""
    rng = np.random.default_rng(0)
    labels = np.arange(240) % 3
    images = rng.integers(0, 200, (240, 28, 28), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, 8 * label : 8 * label + 4] += 50
    return images, labels


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not SPEAKS_GRPC, reason="other words over HTTP")
def test_what_does_not_belong_is_refused_with_a_reason(tmp_path: Path) -> None:
    """C30. ``--max-retries`` ends what Flower would else repeat for ever without a reason; the guide says so."""
    good = make_server_files(tmp_path / "good", hosts=("127.0.0.1",))
    foreign, expired = make_server_files(tmp_path / "foreign"), make_server_files(tmp_path / "expired", valid_days=-1)
    known, revoked, unknown = (make_node_key(tmp_path / name) for name in ("known", "revoked", "unknown"))
    facts, once = {"partition-id": 0, "num-partitions": 1}, ("--max-retries", "1")
    with Deployment("keys", good) as deployment, Deployment("tls", expired) as late:
        for key in (known, revoked):
            deployment.register(key)
        member = deployment.node("member", facts, key=revoked)
        member.wait_for("SuperNode ID")
        by_name = f"localhost:{deployment.fleet_port}"
        refused = {
            "Tls handshake failed": deployment.node("wrong-ca", facts, key=known, authority=foreign.authority),
            "certificate has expired": late.node("expired", facts),
            "Hostname": deployment.node("wrong-name", facts, *once, key=known, superlink=by_name),
            "Socket closed": deployment.node("plain", facts, *once, insecure=True),
            "Failed to activate SuperNode": deployment.node("unknown", facts, key=unknown),
            "All SuperNodes must be registered": deployment.node("no-key", facts),
        }
        for reason, node in refused.items():
            assert node.process.wait(300) == 1, node.text
            assert sum(reason in line for line in node.text.splitlines()) == 1, node.text
            assert "SuperNode ID" not in node.text
        listing = deployment.flwr("supernode", "list", CONNECTION, "--format", "json")
        nodes = json.loads(listing[listing.index("{") :])["nodes"]
        [online] = [one["node-id"] for one in nodes if one["status"] == "online"]
        deployment.flwr("supernode", "unregister", online, CONNECTION)
        member.process.wait(300)  # at its next question to the SuperLink
        again = deployment.node("revoked", facts, key=revoked)
        assert again.process.wait(300) == 1
        assert "Failed to activate SuperNode" in again.text
        with pytest.raises(AssertionError, match="already"):
            deployment.register(revoked)  # a revoked key stays so


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_killed_and_a_frozen_node_stop_nobody(tmp_path: Path) -> None:  # C27, C28
    limit = 240.0
    overrides = f"{SMALL} federation.rounds=3 federation.round_timeout={limit:.0f}"
    with Deployment("plain") as deployment:
        nodes = deployment.nodes(5)
        run = deployment.run(overrides, tmp_path / "run")
        deployment.wait_for_round(1, tmp_path / "run")
        nodes[3].kill()
        nodes[4].send(signal.SIGSTOP)
        time.sleep(30)
        nodes[4].send(signal.SIGCONT)
        summary = deployment.finish(run, tmp_path / "run", 1800)
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text("utf-8").splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert all(row["seconds"][phase] < limit + 30 for row in rows for phase in ("train", "evaluate"))
    assert not rows[0]["failures"]
    for row in rows[1:]:
        assert {failure["phase"] for failure in row["failures"] if failure["partition"] == 3} == {"train", "evaluate"}
    assert 3 in rows[2]["absent"]
    assert set(rows[2]["client_accuracy"]) == {"0", "1", "2", "4"}
    assert summary["status"] == "completed with losses"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_what_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:  # C33
    overrides = f"{SMALL} federation.checkpoint_every=1 federation.round_timeout=300"
    folder = tmp_path / "run"
    with Deployment("keys") as deployment:
        nodes = deployment.nodes(2)
        run = deployment.run(f"{overrides} federation.rounds=50", folder)
        deployment.wait_for_round(1, folder)
        nodes[1].kill()
        # The same key and the same state folder. Flower refuses it until it has noticed that the old one is gone.
        while deployment.member("node-1", 1, 2).wait_for("SuperNode ID", "Exit Code: 305") != "SuperNode ID":
            time.sleep(5)
        whole = len(rows_of(folder)) + 2  # the first round that the node is there for from its beginning
        deployment.wait_for_round(whole, folder)
        deployment.stop(run)
        assert deployment.finish(run, folder)["reason"] == "interrupted"
        assert deployment.link is not None
        deployment.link.kill()
        deployment.start_link()
        done = len(rows_of(folder))
        again = deployment.run(f"{overrides} federation.rounds={done + 1} resume={folder}", tmp_path / "not-used")
        again.wait_for("[ROUND 1/1]", seconds=600)  # from here on the summary of the stopped run is gone
        summary = deployment.finish(again, folder)
        assert f"going on after round {done} of {done + 1}" in again.text
    rows = rows_of(folder)
    assert [row["round"] for row in rows] == list(range(1, done + 2))
    assert rows[1]["failures"][0]["partition"] == 1
    # A client that does not find the very state that the server expects says so, which is a failure.
    assert not [failure for row in rows[whole - 1 :] for failure in row["failures"]]
    assert set(rows[-1]["client_accuracy"]) == {"0", "1"}
    assert summary["status"] == "completed with losses"


@pytest.mark.slow
def test_a_killed_test_leaves_no_process(tmp_path: Path) -> None:
    program = (
        "import os, signal; from tests.e2e.deployment import Deployment; d = Deployment(); print(d.home, flush=True); "
        "d.start_link(); d.nodes(1)[0].wait_for('SuperNode ID'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    home = Path(done.stdout.decode().strip())
    deadline = time.monotonic() + 120
    while home.exists() or processes.carriers(f"FLWR_HOME={home}"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
