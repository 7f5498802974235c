"""Cases C27 to C34: deployments. ``e2e/test_deployment.py`` has the real processes; here is what needs few or none.

C29 stops at a model of 600 MB with two SuperNodes: what is larger, or more of them, needs more memory than a small
machine has.
"""

import re
import socket
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from server_app import main as server_main
from task import versions
from task.messages import Expected, Upload
from task.payload import HEADER, WEIGHTS, decode_upload, encode_upload, nbytes
from tests.algorithms import fitting
from tests.cases.small import KINDS, States, rows, run, summary
from tests.contents import header
from tests.e2e.commands import REPOSITORY
from tests.e2e.deployment import Deployment
from tests.fake_grid import FakeGrid, run_federation
from tests.stripes import write

TWENTY = 20
LOST = 3
MEMORY, ROOM = Path("/proc/meminfo"), 14  # GB
Replies = list[Message]


class OneDies(FakeGrid):
    """In round 2 Flower says that one node is unavailable; from then on it is not connected. Keeps what it was told."""

    limits: list[float | None]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        asked = list(messages)
        self.limits = [*getattr(self, "limits", []), timeout]
        replies = list(super().send_and_receive(asked, timeout=timeout))
        if not asked or asked[0].metadata.message_type != "train" or asked[0].metadata.group_id != "2":
            return replies
        lost = next(node for node, each in self.contexts.items() if each.node_config["partition-id"] == LOST)
        for index, reply in enumerate(replies):
            if reply.metadata.src_node_id == lost:
                message = next(each for each in asked if each.metadata.dst_node_id == lost)
                replies[index] = Message(Error(code=3, reason="Error: Node Unavailable"), reply_to=message)
                replies[index].metadata.__dict__["_src_node_id"] = 1
        del self.contexts[lost]
        return replies


def twenty(algorithm: str, folder: Path, more: str = "", **grid: Any) -> FakeGrid:
    if not (folder.parent / "stripes.npz").exists():
        write(folder.parent / "stripes.npz", samples=200)
    scheme = "" if "partition=iid_train" in fitting(algorithm) else "partition=iid"
    return run(algorithm, folder, f"{scheme} federation.num_clients=20 federation.rounds=3 {more}", TWENTY, **grid)


# C27: 1 of 20 SuperNodes dies mid-round


@pytest.mark.parametrize("algorithm", [name for name in KINDS if name != "rscfed"])
def test_c27_a_dead_node_costs_its_own_reply_and_is_on_record(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only a method that takes a part of its clients in each round (RSCFed) may not have asked the one that dies.
    monkeypatch.setattr("tests.fake_grid.FakeGrid", OneDies)
    twenty(algorithm, tmp_path / "run")
    first, second, third = rows(tmp_path / "run")
    assert (first["failures"], first["absent"]) == ([], [])
    assert {(each["partition"], each["phase"]) for each in second["failures"]} >= {(LOST, "train")}
    assert {each["partition"] for each in second["failures"]} == {LOST}
    assert third["absent"] == [LOST]
    if algorithm != "local":
        sent = [sum(each["bytes_up"] > 0 for each in row["client_traffic"].values()) for row in (first, second)]
        assert sent[1] >= TWENTY - 1
    assert summary(tmp_path / "run")["status"] == "completed with losses"


def test_c27_the_weights_of_the_others_add_up_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: States
) -> None:
    monkeypatch.setattr("tests.fake_grid.FakeGrid", OneDies)
    grid = twenty("fedavg", tmp_path / "run")
    place = {node: each.node_config["partition-id"] for node, each in grid.contexts.items()}
    replies = [
        reply.content
        for reply in grid.replies
        if reply.metadata.message_type == "train" and reply.has_content() and reply.metadata.src_node_id in place
    ]
    second = [content for content in replies if content[HEADER]["round"] == 2]
    assert len(second) == TWENTY - 1
    sizes = [int(content[HEADER]["num-examples"]) for content in second]  # type: ignore[call-overload, arg-type]
    expected: dict[str, torch.Tensor] = {}
    for content, size in zip(second, sizes, strict=True):
        for name, array in content[WEIGHTS].items():
            share = torch.from_numpy(array.numpy().copy()).double() * size / sum(sizes)
            expected[name] = expected.get(name, torch.zeros_like(share)) + share
    after = {key: value for key, value in states[1][1].items() if value.is_floating_point()}
    compared = [(after[key], value) for key in after for name, value in expected.items() if key.endswith(name)]
    assert len(compared) >= len(after) > 4
    for found, mean in compared:
        torch.testing.assert_close(found.double(), mean, rtol=1e-4, atol=1e-5)


# C28: slow client. ``test_federation.py`` has the replies that come late, twice, or belong to another round.


def test_c28_no_exchange_waits_longer_than_the_round_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fake_grid.FakeGrid", OneDies)
    grid = twenty("fedproto", tmp_path / "run", "federation.round_timeout=30 federation.node_timeout=40")
    assert isinstance(grid, OneDies)
    assert set(grid.limits[-6:]) == {30.0}
    assert all(limit is not None and limit <= 40 for limit in grid.limits)


def test_c28_who_sleeps_is_missed_and_the_rest_goes_on(tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message | None:
        return None if partition == 4 and number == 2 else reply

    twenty("fedtgp", tmp_path / "run", spoil=spoil)
    failures = [row["failures"] for row in rows(tmp_path / "run")]
    assert {(each["partition"], each["reason"]) for each in failures[1]} == {
        (4, "no reply within federation.round_timeout")
    }
    assert not failures[0] + failures[2]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_c28_clients_stay_connected_while_the_server_trains_for_long(tmp_path: Path) -> None:
    """Longer than the minute after which Flower calls a node without a sign of life gone."""
    words = "debug=smoke partition.max_samples=120 federation.num_clients=2 federation.rounds=1"
    run_federation(f"{words} algorithm.server.epochs=1000", str(tmp_path / "short"), num_nodes=2)
    [row] = rows(tmp_path / "short")
    epochs = int(180 / row["seconds"]["server"] * 1000)  # three minutes, where the machine stays as busy as it is
    words += f" federation.node_timeout=300 algorithm.server.epochs={epochs}"
    with Deployment("plain") as deployment:
        deployment.nodes(2)
        run_ = deployment.run(words, tmp_path / "run")
        found = deployment.finish(run_, tmp_path / "run", 1000)
    assert found["status"] == "completed"
    [row] = rows(tmp_path / "run")
    assert row["failures"] == []  # they were there for the evaluation afterwards
    if row["seconds"]["server"] < 90:
        pytest.skip("the server was too fast to show anything")


# C29: large messages


def large(megabytes: int) -> Upload:
    """Weights as an auxiliary model would have them, most of it in one layer."""
    big = torch.arange(megabytes * 250_000, dtype=torch.float32)
    return Upload(0, 1, weights={"features.big": big, "head.weight": torch.ones(10, 512)}, examples=3, metrics={})


def check_large(megabytes: int) -> None:
    sent = encode_upload(large(megabytes))
    total = nbytes(sent)
    assert total > megabytes * 1_000_000
    assert nbytes(RecordDict({HEADER: sent[HEADER]})) < 200  # not a byte of weights in a record of settings
    # What is pushed by calls of their own: nothing is near the 2 GB of gRPC or the 512 MB of earlier releases.
    pieces = [len(piece.deflate()) for piece in get_all_nested_objects(sent).values()]
    assert max(pieces) < 6_000_000
    assert sum(pieces) < 1.01 * total + 10_000
    back = decode_upload(sent, Expected(0, 1, 10, 512))
    assert back.weights is not None
    assert torch.equal(back.weights["features.big"], torch.arange(megabytes * 250_000, dtype=torch.float32))


def test_c29_a_large_model_travels_in_pieces() -> None:
    check_large(40)


@pytest.mark.slow
def test_c29_a_model_of_600_megabytes_travels_in_pieces() -> None:
    check_large(600)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_c29_a_model_of_600_megabytes_in_a_deployment(tmp_path: Path) -> None:
    if not MEMORY.exists():
        pytest.skip("needs Linux, to see whether there is enough memory")
    free = int(re.findall(r"MemAvailable: +(\d+) kB", MEMORY.read_text("utf-8"))[0]) / 1e6
    if free < ROOM:
        pytest.skip(f"needs {ROOM} GB of free memory, {free:.0f} are there")
    write(tmp_path / "stripes.npz", samples=60)
    shared = "{name: wide, _target_: task.models.small.vgg, width: 8, features: 520000}"
    words = f"algorithm=fml data=npz data.source.path={tmp_path / 'stripes.npz'} 'model.auxiliary={shared}'"
    words += " partition=iid train.batch_size=20 train.local_epochs=1 federation.rounds=1 federation.num_clients=2"
    with Deployment("plain") as deployment:
        deployment.nodes(2)
        run_ = deployment.run(f"{words} federation.node_timeout=300", tmp_path / "run")
        found = deployment.finish(run_, tmp_path / "run", 2000)
    assert found["status"] == "completed"
    [row] = rows(tmp_path / "run")
    assert row["failures"] == []
    assert row["bytes"]["train_up"] > 2 * 600_000_000


@pytest.mark.parametrize("algorithm", KINDS)
def test_c29_no_method_puts_weights_into_a_record_of_settings(algorithm: str, tmp_path: Path) -> None:
    grid = run(algorithm, tmp_path / "run")
    for message in [*grid.sent, *grid.replies]:
        if not message.has_content() or HEADER not in message.content:
            continue
        for key, value in header(message).items():
            # Prototypes and mean outputs of a few classes; the smallest model here has more.
            assert not isinstance(value, bytes | str) or len(value) <= 4 * 16 * 4, key
        assert all(isinstance(name, str) and name in (HEADER, WEIGHTS) for name in message.content)


# C31: ports and flags changed inside 1.39-1.42


@pytest.mark.parametrize("installed", ["1.38.0", "1.40.1", "1.43.0", "2.0"])
def test_c31_another_release_of_flower_is_named_at_the_start(
    installed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "version", lambda _: installed)
    with caplog.at_level("WARNING", "flwr"):
        run("fedproto", tmp_path / "run")
    [line] = [record.message for record in caplog.records if "is installed" in record.message]
    assert line.startswith(f"Flower {installed} is installed; ProtoFed is tested with 1.39 and 1.42: pip install ")
    assert server_main.flower_remark("1.39.4") is None
    assert server_main.flower_remark("1.42.0") is None


def test_c31_the_releases_that_are_named_are_those_that_are_tested() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    assert "flwr[simulation]>=1.39,<1.40" in project["dependencies"]
    [following] = re.findall(r"FLOWER_NEXT := (\d+\.\d+)", (REPOSITORY / "Makefile").read_text("utf-8"))
    assert ("1.39", following) == versions.TESTED_FLOWER
    guide = (REPOSITORY / "server_app" / "README.md").read_text("utf-8")
    assert "## Flower 1.39 and 1.42" in guide
    assert "Both ends must be the same release" in guide


# C32: partition-id missing or given twice. ``test_config.py``, ``test_nodes.py``, ``server_app/test_roster.py`` too.


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ([{}, {}], r"partition-id.*--node-config"),
        ([{"partition-id": 1, "num-partitions": 2}] * 2, r"two nodes .*partition-id=1"),
        ([{"partition-id": 7, "num-partitions": 5}] * 2, r"partition-id=7 .*0\.\.4"),
        ([{"partition-id": "1", "num-partitions": 2}] * 2, r"partition-id='1'"),
        ([{"partition-id": 0}, {"partition-id": 1}], r"num-partitions"),
    ],
    ids=["none", "twice", "out of range", "text", "half"],
)
def test_c32_facts_of_nodes_are_checked_before_round_one(
    facts: list[dict[str, Any]], says: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=says) as caught:
        run("fedproto", tmp_path / "run", "federation.num_clients=2", num_nodes=2, facts=[dict(each) for each in facts])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "rounds.jsonl").exists() or not rows(tmp_path / "run")


# C34: installing dependencies inside a run


def test_c34_everything_that_we_start_or_advise_keeps_flower_from_installing(tmp_path: Path) -> None:
    from task.superlink import private_environment

    name = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"
    assert private_environment(tmp_path)[name] == "1"
    deployment = Deployment("plain")
    deployment.close()  # nothing was started
    assert deployment.environment[name] == "1"
    for document in ("README.md", "server_app/README.md"):
        text = (REPOSITORY / document).read_text("utf-8")
        assert text.index(f"export {name}=1") < text.index("flwr run . ")


@pytest.mark.parametrize("algorithm", KINDS)
def test_c34_a_run_uses_no_network(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"the network was used: {address}")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(socket.socket, "connect_ex", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **_: forbidden(None, words))  # type: ignore[arg-type]
    run(algorithm, tmp_path / "run")
    assert summary(tmp_path / "run")["status"] == "completed"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_c34_a_failed_import_on_a_node_ends_the_run_with_its_words(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "safetensors"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(
        "raise ImportError('libmissing.so.3: cannot open shared object file')\n", "utf-8"
    )
    words = "debug=smoke partition.max_samples=120 federation.num_clients=2 federation.node_timeout=600"
    with Deployment("plain") as deployment:
        deployment.member("good", 0, 2)
        usual = dict(deployment.environment)
        deployment.environment["PYTHONPATH"] = str(broken.parent)
        bad = deployment.member("bad", 1, 2)
        deployment.environment = usual
        bad.wait_for("SuperNode ID")
        began = time.monotonic()
        run_ = deployment.run(words, tmp_path / "run")
        found = deployment.finish(run_, tmp_path / "run", 500)
        seconds, text = time.monotonic() - began, bad.text
    assert found["status"] == "failed"
    assert "1 of 2 nodes failed before round 1" in found["reason"]
    assert "libmissing.so.3" in found["reason"] + text
    assert seconds < 600  # it did not wait for federation.node_timeout
