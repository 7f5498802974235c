import importlib.util
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from server_app.listeners import Audience, Listener, TensorBoard, WeightsAndBiases, scalars_of
from task.config import load
from task.jobs import plan
from tests.fake_grid import run_federation

SMALL = "algorithm=local data=digits partition.max_samples=240 federation.num_clients=3 federation.rounds=2"


def test_a_missing_extra_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    text = r"listeners=wandb is not possible: wandb is not installed; pip install 'protofed\[wandb\]'"
    with pytest.raises(ValueError, match=text):
        plan(["listeners=wandb"], tmp_path, 2)
    with pytest.raises(ValueError, match=text):
        run_federation(f"{SMALL} listeners=wandb", str(tmp_path / "run"), 3)
    assert not (tmp_path / "run").exists()
    load("listeners=wandb")  # clients need not have it


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown setting 'listeners\.wandb\.projects'; nearest known: project"):
        load("listeners=wandb +listeners.wandb.projects=x")


def test_a_line_becomes_scalars() -> None:
    row = {
        "round": 3,
        "accuracy": 0.5,
        "loss": None,
        "metrics": {"margin": 2.0},
        "bytes": {"train_up": 7},
        "failures": [1],
    }
    assert scalars_of(row) == {"accuracy": 0.5, "metrics/margin": 2.0, "bytes/train_up": 7.0, "failures": 1.0}


class Broken(Listener):
    package = "json"

    def __init__(self) -> None:
        self.heard = 0

    def begin(self, folder: Path, settings: Mapping[str, Any], session: str, rounds_done: int) -> None:
        pass

    def hear(self, number: int, scalars: Mapping[str, float]) -> None:
        self.heard += 1
        raise OSError("disk full")

    def end(self, summary: Mapping[str, Any]) -> None:
        raise AssertionError("left out by then")


def test_a_listener_that_fails_does_not_cost_the_run(caplog: pytest.LogCaptureFixture) -> None:
    audience, broken = Audience(load("")), Broken()
    audience._listeners["mine"] = broken
    for number in (1, 2):
        audience.hear({"round": number})
    audience.end({})
    assert broken.heard == 1


def test_tensorboard_has_every_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra protofed[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    run_federation(f"{SMALL} listeners=tensorboard", str(folder), 3)
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("accuracy")]
    assert found == [(row["round"], pytest.approx(row["accuracy"])) for row in rows]
    assert "metrics/train_loss" in events.Tags()["scalars"]
    run_federation(f"{SMALL} overwrite=true", str(folder), 3)
    assert not (folder / "tensorboard").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_offline_writes_below_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra protofed[wandb] is not installed")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    listener = WeightsAndBiases()
    listener.begin(tmp_path, {"seed": 1}, "s", 0)
    listener.hear(1, {"accuracy": 0.5})
    listener.end({"status": "completed", "last_accuracy": 0.5})
    (run,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    # Its own process writes the file, and may be a little behind on a busy machine.
    deadline = time.monotonic() + 60
    while b"accuracy" not in (content := run.read_bytes()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert b"x" * 40 not in content


def test_the_settings_are_those_of_the_files() -> None:
    config = load("listeners=[tensorboard,wandb] listeners.wandb.project=mine")
    assert set(config.listeners) == {"tensorboard", "wandb"}
    assert load("").listeners == {}
    for settings in ({"mode": "loud"},):
        with pytest.raises(ValueError, match="mode='loud' is not allowed: one of offline, online"):
            WeightsAndBiases(**settings)
    assert TensorBoard.package == "tensorboard"
