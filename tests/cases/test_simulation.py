"""Cases C19 to C24: simulation. Those whose fault lies in Ray's processes run there, too, through the real doors.

C21 has no GPU here: what a client without one answers, and the words for an exhausted one, stand in for it;
``tests/client_app`` and ``tests/data`` have the tests marked ``gpu``. C22 is ``tests/benchmarks/bench_memory.py``.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor

from client_app.session import Session
from client_app.trainers.global_model import GlobalModelTrainer
from task.config import _find_target
from task.models.split import SplitModel
from task.processes import descendants
from task.superlink import LocalSuperLink
from tests.cases.small import KINDS, federate, rows, run, settings, summary, timeless
from tests.e2e.commands import protofed, results, started

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that is to be missing")


def keeps_state(algorithm: str) -> bool:
    trainer: Any = _find_target(settings(algorithm).client._target_, "algorithm.client")
    return bool(trainer.keeps_state)


def digest(tensors: dict[str, Tensor]) -> str:
    text = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        text.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return text.hexdigest()


@pytest.mark.parametrize("state", ["disk", "context"])
@pytest.mark.parametrize("algorithm", [name for name in KINDS if keeps_state(name)])
def test_c19_client_memory_between_rounds(
    algorithm: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: dict[int, str] = {}
    idle: list[int] = []
    keep, restore = Session.state, Session.restore

    def watched_keep(self: Session, with_model: bool = True) -> dict[str, Tensor]:
        tensors = keep(self, with_model)
        saved[self.node.partition] = digest(tensors)
        return tensors

    def watched_restore(self: Session, tensors: dict[str, Tensor], with_model: bool = True) -> None:
        restore(self, tensors, with_model)
        assert digest(keep(self, with_model)) == saved[self.node.partition]
        idle.append(self.download.round - self.download.state_round)

    monkeypatch.setattr(Session, "state", watched_keep)
    monkeypatch.setattr(Session, "restore", watched_restore)
    more = f"federation.rounds=20 federation.participation=0.2 federation.evaluate_every=7 federation.state={state}"
    scheme = "" if issubclass_of_global(algorithm) else "partition=iid"
    run(algorithm, tmp_path / "run", f"{more} {scheme}", num_nodes=10)
    assert not any(row["failures"] for row in rows(tmp_path / "run"))
    assert len(rows(tmp_path / "run")) == 20
    assert max(idle) >= (
        5 if issubclass_of_global(algorithm) else 10
    )  # only tests reach clients that never train again


def issubclass_of_global(algorithm: str) -> bool:
    trainer: Any = _find_target(settings(algorithm).client._target_, "algorithm.client")
    return issubclass(trainer, GlobalModelTrainer)


SIMULATED = (
    "partition.max_samples=120 federation.num_clients=10 federation.participation=0.2 federation.rounds=20 "
    "federation.evaluate_every=5"
)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_c19_clients_on_ray_remember_what_clients_in_one_process_remember(tmp_path: Path) -> None:
    code, text = protofed(tmp_path, *SIMULATED.split(), seconds=800)
    assert code == 0, text
    federate(SIMULATED, tmp_path / "one", 10)
    [folder] = results(tmp_path)
    assert timeless(folder) == timeless(tmp_path / "one")
    late = [row["sampled"] for row in rows(folder)]
    assert any(set(late[0]) & set(sampled) for sampled in late[10:])  # some came back after many rounds


@pytest.mark.parametrize("algorithm", KINDS)
def test_c20_a_client_that_raises_in_every_round_is_counted_with_its_reason(algorithm: str, tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if partition == 1 and reply.metadata.message_type == "train":
            raise OSError("disk on fire")
        return reply

    more = "labels=all federation.rounds=3" if algorithm in ("rscfed", "dccfssl") else "federation.rounds=3"
    run(algorithm, tmp_path / "run", more, spoil=spoil)
    failures = [[(each["partition"], each["reason"]) for each in row["failures"]] for row in rows(tmp_path / "run")]
    sampled = [1 in row["sampled"] for row in rows(tmp_path / "run")]
    assert failures == [[(1, "OSError: disk on fire")] if asked else [] for asked in sampled]
    assert any(sampled)
    assert summary(tmp_path / "run")["status"] == "completed with losses"
    assert summary(tmp_path / "run")["failures"] == sum(sampled)


@pytest.mark.parametrize(("policy", "status"), [("tolerate", "completed with losses"), ("stop", "failed")])
def test_c20_a_client_that_raises_only_in_round_three(policy: str, status: str, tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if partition == 0 and number == 3 and reply.metadata.message_type == "train":
            raise OSError("disk on fire")
        return reply

    more = f"federation.rounds=4 federation.on_failure={policy}"
    if policy == "stop":
        with pytest.raises(RuntimeError, match=r"round 3: 1 clients failed .* client 0: OSError: disk on fire"):
            run("fedproto", tmp_path / "run", more, spoil=spoil)
    else:
        run("fedproto", tmp_path / "run", more, spoil=spoil)
        assert [len(row["failures"]) for row in rows(tmp_path / "run")] == [0, 0, 1, 0]
    assert summary(tmp_path / "run")["status"] == status


@pytest.mark.parametrize(("lost", "fine"), [(1, True), (2, False)])
def test_c20_up_to_so_many_failures_are_tolerated(lost: int, fine: bool, tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message | None:
        return None if partition < lost and reply.metadata.message_type == "train" else reply

    more = "federation.num_clients=4 federation.min_replies=3"
    if fine:
        run("fedproto", tmp_path / "run", more, spoil=spoil)
        return
    with pytest.raises(RuntimeError, match=r"round 1: 2 good replies, federation.min_replies=3 are needed"):
        run("fedproto", tmp_path / "run", more, spoil=spoil)
    assert summary(tmp_path / "run")["status"] == "failed"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("lost", "code"), [("client-00000", 3), ("client-*", 1)])
def test_c20_client_exceptions_on_ray_never_end_in_a_completed_run(lost: str, code: int, tmp_path: Path) -> None:
    # A client without its state raises in the worker; its folder goes until the first failure is on record.
    words = "debug=smoke federation.num_clients=2 partition.max_samples=40 federation.rounds=25"
    with started(tmp_path, *words.split()) as command:
        command.wait_for("round  1/25", 400)
        [folder] = results(tmp_path)
        deadline = time.monotonic() + 400
        while command.process.poll() is None and not (folder / "rounds.jsonl").read_text("utf-8").count('"reason"'):
            for place in folder.glob(f"client-state/*/{lost}"):
                shutil.rmtree(place, ignore_errors=True)
            assert time.monotonic() < deadline, command.text
            time.sleep(0.02)
        assert command.process.wait(400) == code, command.text
    assert summary(folder)["status"] == ("completed with losses" if code == 3 else "failed")
    reasons = [each["reason"] for row in rows(folder) for each in row["failures"]]
    assert reasons
    assert all("client 0: its state of round" in reason for reason in reasons) or code == 1
    if code == 1:
        assert "0 good replies" in summary(folder)["reason"]
        assert "its state of round" in summary(folder)["reason"]


@no_cuda
def test_c21_a_gpu_that_is_missing_is_an_error_that_names_the_client(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"client 0: train\.device=cuda but this process sees no CUDA device"):
        run("fedproto", tmp_path / "run", "train.device=cuda")
    with pytest.raises(ValueError, match=r"server_device=cuda is not possible: the server has no CUDA device"):
        run("fedproto", tmp_path / "server", "federation.server_device=cuda")


def test_c21_the_device_of_every_client_is_on_record(tmp_path: Path) -> None:
    run("fedproto", tmp_path / "run", "train.device=cpu")
    lines = (tmp_path / "run" / "clients.csv").read_text("utf-8").splitlines()
    column = lines[0].split(",").index("device")
    assert [line.split(",")[column] for line in lines[1:]] == ["cpu"] * 4


@pytest.mark.parametrize("algorithm", KINDS)
def test_c21_out_of_memory_names_the_client_and_the_settings_to_lower(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(self: SplitModel, images: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(SplitModel, "features", exhausted)
    monkeypatch.setattr(SplitModel, "forward", exhausted)
    with pytest.raises(RuntimeError) as caught:
        run(algorithm, tmp_path / "run")
    assert re.search(r"client \d \(\w+\): out of GPU memory; lower train\.batch_size", str(caught.value))
    assert "raise federation.gpus_per_client" in str(caught.value)


@pytest.mark.e2e
@pytest.mark.slow
@no_cuda
def test_c21_more_gpus_a_client_than_there_are(tmp_path: Path) -> None:
    code, text = protofed(tmp_path, "debug=smoke", "federation.gpus_per_client=2")
    assert code == 1
    assert "no client fits on this machine with federation.cpus_per_client=1 and gpus_per_client=2.0: lower" in text


@pytest.mark.parametrize("num_nodes", [2, 20])
def test_c23_fewer_or_more_nodes_than_the_app_expects(num_nodes: int, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r'the run needs 10 .*--federation-config "num-supernodes=10"'):
        run("fedproto", tmp_path / "run", "federation.num_clients=10 federation.node_timeout=2", num_nodes=num_nodes)
    assert time.monotonic() - began < 60
    assert summary(tmp_path / "run")["status"] == "failed"


def test_c23_partitions_and_nodes_cannot_differ_in_number(tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if reply.metadata.message_type == "query":
            reply.content["header"]["num-partitions"] = 20  # type: ignore[index]
        return reply

    with pytest.raises(RuntimeError, match="10 nodes are connected, the run needs 20"):
        run("fedproto", tmp_path / "run", "federation.node_timeout=1", num_nodes=10, spoil=spoil)


@pytest.fixture(scope="module")
def link() -> Iterator[LocalSuperLink]:
    with LocalSuperLink() as link:
        yield link


def simulate(link: LocalSuperLink, folder: Path, overrides: str, simulation: str) -> Path:
    """Run ``flwr run`` on ``link`` to its end, with Flower's settings of the ``simulation``."""
    folder.mkdir()
    process = link.submit({"output-dir": str(folder), "overrides": overrides}, simulation, folder / "flower.log")
    process.wait(500)
    assert (folder / "summary.json").exists(), (folder / "flower.log").read_text("utf-8", "replace")
    return folder


@pytest.mark.e2e
def test_c23_flwr_run_with_flowers_two_default_nodes_ends_with_the_flag_to_use(
    link: LocalSuperLink, tmp_path: Path
) -> None:
    overrides = "debug=smoke federation.num_clients=20 partition.max_samples=100 federation.node_timeout=2"
    folder = simulate(link, tmp_path / "run", overrides, "num-supernodes=2 init-args-num-cpus=1")
    assert summary(folder)["status"] == "failed"
    assert '--federation-config "num-supernodes=20"' in summary(folder)["reason"]


@pytest.mark.parametrize("algorithm", KINDS)  # all of them: test_resume.py, whose replies come in another order, too
def test_c24_same_seed_same_lines_whatever_the_nodes_and_the_order_of_replies(algorithm: str, tmp_path: Path) -> None:
    more = "federation.participation=0.5"
    for name, order in (("one", 0), ("two", 5)):
        torch.rand(3)  # torch's own generator is somewhere else every time, as are the nodes' random numbers
        run(algorithm, tmp_path / name, more, shuffle=order)
    assert timeless(tmp_path / "one") == timeless(tmp_path / "two")
    assert all(isinstance(row["sampled"], list) and row["sampled"] for row in rows(tmp_path / "one"))
    one, two = (tmp_path / name / "checkpoint" / "state.safetensors" for name in ("one", "two"))
    assert _tensors(one) == _tensors(two)


def _tensors(path: Path) -> bytes:
    """Return the tensors of a safetensors file; its header has the name of the run."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_c24_same_seed_with_one_and_four_workers_and_after_another_run(link: LocalSuperLink, tmp_path: Path) -> None:
    overrides = "partition.max_samples=120 federation.rounds=4 federation.participation=0.2 federation.num_clients=10"
    nodes = "num-supernodes=10 client-resources-num-cpus=1 init-args-num-cpus="
    one = simulate(link, tmp_path / "one", overrides, f"{nodes}1")
    four = simulate(link, tmp_path / "four", overrides, f"{nodes}4")
    other = simulate(link, tmp_path / "other", f"{overrides} seed=1", f"{nodes}1")
    again = simulate(link, tmp_path / "again", overrides, f"{nodes}1")
    assert timeless(one) == timeless(four) == timeless(again) != timeless(other)
    assert [len(json.loads(line)["sampled"]) for line in timeless(one)] == [2] * 4
    assert link._process is not None
    assert not [name for _, name in descendants(link._process.pid) if "ray::" in str(name)]
