import json
from pathlib import Path
from typing import Any

import pytest

from task.config import load
from task.results import read_run
from task.stopping import StopConfig, evaluations_without_gain, may_stop_next, reason_to_stop
from task.tables import summary_lines
from tests.fake_grid import run_federation
from tests.stripes import run

SMALL = "algorithm=local data=digits partition.max_samples=240 federation.num_clients=3"


def rows(*values: float | None, metric: str = "accuracy") -> list[dict[str, Any]]:
    return [{"round": number, metric: value} for number, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("values", "min_delta", "since"),
    [
        ((0.5, 0.6, 0.7), 0.0, 0),
        ((0.5, 0.5, 0.5), 0.0, 2),
        ((0.5, 0.6, 0.55, 0.6), 0.0, 2),
        # Small steps that add up to more than min_delta are a gain when they do.
        ((0.50, 0.54, 0.58, 0.62), 0.1, 0),
        ((0.50, 0.54, 0.58), 0.1, 2),
        ((None, 0.5, None, 0.4, None), 0.0, 1),
        ((), 0.0, 0),
    ],
)
def test_evaluations_without_gain_are_counted(values: tuple[float | None, ...], min_delta: float, since: int) -> None:
    assert evaluations_without_gain(rows(*values), StopConfig(min_delta=min_delta)) == since


def test_a_loss_gets_better_downwards() -> None:
    stop = StopConfig("loss", patience=1)
    assert reason_to_stop(rows(2.0, 1.0, metric="loss"), stop) is None
    reason = reason_to_stop(rows(1.0, 2.0, metric="loss"), stop)
    assert reason == "stopped early after round 2: no better loss in 1 evaluations"


def test_a_run_that_never_stops() -> None:
    assert reason_to_stop(rows(*[0.5] * 100), StopConfig()) is None
    assert not may_stop_next(rows(*[0.5] * 100), StopConfig())
    assert may_stop_next(rows(0.5, 0.5), StopConfig(patience=2))
    assert not may_stop_next(rows(0.5, 0.6), StopConfig(patience=2))


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("patience=0", "federation.stop_after.patience=0 is not allowed: at least 1, or null"),
        ("metric=f1", "federation.stop_after.metric='f1' is not allowed: one of accuracy,"),
        ("min_delta=-1", "federation.stop_after.min_delta=-1.0 is not allowed"),
    ],
)
def test_bad_settings_are_refused(word: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"federation\.stop_after") as error:
        load(f"federation.stop_after.{word}")
    assert text in str(error.value)


def test_a_federation_stops_and_says_so(tmp_path: Path) -> None:
    words = f"{SMALL} federation.rounds=9 federation.stop_after.patience=2 federation.stop_after.min_delta=1"
    run_federation(words, str(tmp_path / "run"), 3)
    found = read_run(tmp_path / "run")
    # Nothing can be better than the first accuracy by more than 1.
    assert len(found.rounds) == 3
    assert (found.status, found.is_complete, found.reason) == ("completed", True, "")
    assert found.summary["stopped_early"] == (
        "stopped early after round 3: no better accuracy by more than 1 in 2 evaluations"
    )
    (line,) = [line for line in summary_lines(found) if "early" in line]
    assert line.endswith("; 9 rounds were planned")
    # The last evaluation was asked for a confusion matrix although it was not that of round 9.
    assert (tmp_path / "run" / "confusion.csv").exists()


def test_evaluations_of_the_warm_up_do_not_count(tmp_path: Path) -> None:
    words = "labels.count=2 labels.warmup_rounds=3 federation.rounds=9"
    stop = "federation.stop_after.patience=2 federation.stop_after.min_delta=1"
    run(tmp_path / "run", "fedavg_fixmatch", f"{words} {stop}")
    assert len(read_run(tmp_path / "run").rounds) == 3 + 3


def test_going_on_after_an_early_end(tmp_path: Path) -> None:
    words = f"{SMALL} federation.rounds=3 federation.stop_after.patience=1 federation.stop_after.min_delta=1"
    folder = tmp_path / "run"
    run_federation(words, str(folder), 3)
    before = (folder / "rounds.jsonl").read_text()
    run_federation(f"{words} resume={folder}", "", 3)
    assert (folder / "rounds.jsonl").read_text() == before
    assert json.loads((folder / "summary.json").read_text())["stopped_early"]
    run_federation(f"{words} resume={folder} federation.stop_after.patience=null", "", 3)
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 3
    assert json.loads((folder / "summary.json").read_text())["stopped_early"] is None


def test_each_round_is_on_disk_before_the_next_begins(tmp_path: Path) -> None:
    seen: dict[int, int] = {}

    def look(reply: Any, partition: int, number: int) -> Any:
        path = tmp_path / "run" / "rounds.jsonl"
        seen[number] = len(path.read_text().splitlines()) if path.exists() else 0
        return reply

    run_federation(f"{SMALL} federation.rounds=3", str(tmp_path / "run"), 3, spoil=look)
    assert (seen[1], seen[2], seen[3]) == (0, 1, 2)
