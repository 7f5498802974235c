"""Case C40: resume after a crash."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import Message

from server_app import checkpoint
from tests.cases.small import EVERY, federate, rows, run, summary, timeless, words
from tests.e2e.commands import REPOSITORY

FIVE = "federation.rounds=5 federation.checkpoint_every=2 federation.participation=0.5"


@pytest.mark.parametrize("algorithm", EVERY)
def test_c40_a_run_that_crashed_ends_with_the_numbers_of_one_that_did_not(algorithm: str, tmp_path: Path) -> None:
    base = f"{words(algorithm, tmp_path)} {FIVE}"
    federate(base, tmp_path / "whole", 6)
    crashed = []

    def die(reply: Message, partition: int, number: int) -> Message:
        if number == 4:
            crashed.append(partition)
            raise KeyboardInterrupt  # in the middle of a round: some clients have trained and saved, others have not
        return reply

    with pytest.raises(KeyboardInterrupt):
        federate(base, tmp_path / "cut", 6, spoil=die)
    assert crashed
    assert [row["round"] for row in rows(tmp_path / "cut")] == [1, 2, 3]
    federate(f"{base} resume={tmp_path / 'cut'}", None, 6, shuffle=3)
    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")
    assert summary(tmp_path / "cut")["status"] == "completed"
    assert summary(tmp_path / "cut")["best_accuracy"] == summary(tmp_path / "whole")["best_accuracy"]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from server_app import checkpoint
from tests.fake_grid import run_federation

torch.set_num_threads(1)
written, save, replace = [], checkpoint.save_file, os.replace

def save_file(tensors, path, metadata=None):
    written.append(path)
    save(tensors, path, metadata=metadata)
    if len(written) == 2:
        if sys.argv[3] == "half":
            data = Path(path).read_bytes()
            Path(path).write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

checkpoint.save_file = save_file
run_federation(sys.argv[1], sys.argv[2], 6)
"""


@pytest.mark.parametrize("written", ["half", "whole"])
def test_c40_kill_9_during_the_write_of_a_checkpoint_leaves_the_last_good_one(written: str, tmp_path: Path) -> None:
    base = f"{words('fedtgp', tmp_path)} {FIVE}"
    federate(base, tmp_path / "whole", 6)
    cut = tmp_path / "cut"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, base, str(cut), written], env=environment, capture_output=True, timeout=500
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode("utf-8", "replace")
    assert checkpoint.load_checkpoint(cut / "checkpoint")[1].round == 2
    federate(f"{base} resume={cut}", None, 6)
    assert timeless(cut) == timeless(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("train.lr=0.5", r"train\.lr was 0\.01, is 0\.5"),
        ("seed=1", "seed was 0, is 1"),
        ("algorithm.client.weight=9.0", r"algorithm\.client\.weight was"),
        ("partition.alpha=3.0", r"partition\.alpha was 0\.1, is 3\.0"),
    ],
)
def test_c40_a_changed_configuration_is_refused_and_listed(change: str, named: str, tmp_path: Path) -> None:
    run("fedtgp", tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=named):
        federate(f"{words('fedtgp', tmp_path)} {change} resume={tmp_path / 'run'}", None)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", [b"", b"\x00" * 40, b"not a checkpoint"])
def test_c40_a_damaged_checkpoint_is_named_in_one_line(damage: bytes, tmp_path: Path) -> None:
    run("fedtgp", tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "state.safetensors").write_bytes(damage)
    with pytest.raises(ValueError, match=r"state\.safetensors is damaged") as caught:
        federate(f"{words('fedtgp', tmp_path)} federation.rounds=3 resume={tmp_path / 'run'}", None)
    assert "\n" not in str(caught.value)
