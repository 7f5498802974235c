import json
from pathlib import Path
from typing import Any

import pytest

from task.comparison import group_runs
from task.reporting.content import gaps, grid_rows, sort_value
from task.reporting.study import Study
from task.results import find_runs, read_run
from tests.result_folders import write_run


def study_of(folder: Path) -> Study:
    runs = [read_run(run) for run in find_runs([folder])]
    return Study(group_runs(run for run in runs if run.is_complete)[0], [run for run in runs if not run.is_complete])


def settings(**parts: Any) -> dict[str, Any]:
    return {"train": {"lr": 0.01}} | parts


def test_methods_and_settings_have_short_names(tmp_path: Path) -> None:
    for algorithm in ("local", "fedtgp"):
        for alpha in (0.1, 10, 2):
            write_run(tmp_path / f"{algorithm}{alpha}", algorithm=algorithm, alpha=alpha)
    study = study_of(tmp_path)
    assert study.methods == ["fedtgp", "local"]
    assert study.settings == ["alpha=0.1", "alpha=2", "alpha=10"]
    assert study.label(study.groups[0]) == "fedtgp, alpha=0.1"
    assert study.is_full
    assert list(gaps(study)) == []


def test_a_methods_own_settings_are_in_its_name(tmp_path: Path) -> None:
    for weight in (1, 3):
        node = {"name": "fedtgp", "inference": "prototype", "client": {"weight": weight}}
        write_run(tmp_path / f"tgp{weight}", config={"algorithm": node})
    write_run(tmp_path / "local", algorithm="local")
    study = study_of(tmp_path)
    # local has a weight of its own in these files, but only one.
    assert study.methods == ["fedtgp weight=1", "fedtgp weight=3", "local weight=5"]
    assert study.settings == [""]


def test_a_learning_rate_of_one_method_alone_is_no_setting_but_alpha_is(tmp_path: Path) -> None:
    write_run(tmp_path / "a", algorithm="fedtgp", alpha=0.1, config=settings(train={"lr": 0.1}))
    write_run(tmp_path / "b", algorithm="local", alpha=1, config=settings(train={"lr": 0.5}))
    study = study_of(tmp_path)
    assert study.settings == ["alpha=0.1", "alpha=1"]
    assert list(gaps(study)) == ["fedtgp, alpha=1: no run", "local, alpha=0.1: no run"]
    assert [row["alpha=1"] for row in grid_rows(study)] == ["no run", "80.00 (n=1)"]


def test_a_learning_rate_that_both_methods_vary_is_a_setting(tmp_path: Path) -> None:
    for algorithm in ("fedtgp", "local"):
        for lr in (0.1, 0.5):
            write_run(tmp_path / f"{algorithm}{lr}", algorithm=algorithm, config=settings(train={"lr": lr}))
    assert study_of(tmp_path).settings == ["lr=0.1", "lr=0.5"]


def test_what_only_repeats_another_setting_is_left_out_of_the_name(tmp_path: Path) -> None:
    for number, (data, rounds) in enumerate((("digits", 3), ("mnist", 5))):
        config = {"data": {"name": data}, "federation": {"rounds": rounds, "num_clients": None}}
        write_run(tmp_path / str(number), rounds=rounds, summary={"data": data}, config=config)
    assert study_of(tmp_path).settings == ["digits", "mnist"]


def test_failed_unfinished_and_missing_seeds_are_seen(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        write_run(tmp_path / f"a{seed}", seed=seed)
    write_run(tmp_path / "b0", algorithm="local", seed=0)
    failed = {"status": "failed", "reason": "boom", "rounds_done": 2, "num_clients": None}
    broken = write_run(tmp_path / "b1", algorithm="local", seed=1, summary=failed)
    (broken / "clients.csv").unlink()
    (write_run(tmp_path / "c2", algorithm="fml", seed=2) / "summary.json").unlink()
    study = study_of(tmp_path)
    assert study.methods == ["fedtgp", "fml", "local"]
    assert study.settings == [""]
    assert study.cell("local", "").notes == ["seed 1 failed", "seed 2 missing"]
    assert list(gaps(study)) == [
        "fml: seed 2 unfinished; seed 0, 1 missing",
        "local: seed 1 failed; seed 2 missing",
    ]
    assert not study.is_full
    words = {row["method"]: row["last accuracy (%)"] for row in grid_rows(study)}
    assert words["fml"] == "- (seed 2 unfinished; seed 0, 1 missing)"
    assert words["local"] == "80.00 (n=1; seed 1 failed; seed 2 missing)"


def test_a_failure_that_was_run_again_is_none(tmp_path: Path) -> None:
    write_run(tmp_path / "first", summary={"status": "failed", "reason": "boom"})
    write_run(tmp_path / "again")
    assert study_of(tmp_path).is_full


def test_a_failure_without_a_configuration_is_not_forgotten(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    bad = write_run(tmp_path / "bad", seed=1, summary={"status": "failed", "reason": "boom"})
    (bad / "config.yaml").unlink()
    study = study_of(tmp_path)
    assert [run.folder.name for run in study.unplaced] == ["bad"]
    assert not study.is_full


def test_runs_that_stopped_early_count(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=6, summary={"rounds": 50, "stopped_early": "stopped early after round 6"})
    assert read_run(run).is_complete
    summary = json.loads((run / "summary.json").read_text()) | {"stopped_early": None}
    (run / "summary.json").write_text(json.dumps(summary))
    assert read_run(run).reason == "6 of 50 rounds done"


def test_listeners_and_a_rule_that_never_stops_do_not_tell_runs_apart(tmp_path: Path) -> None:
    never = {"metric": "loss", "patience": None, "min_delta": 0.5}
    federation = {"rounds": 6, "num_clients": None}
    write_run(tmp_path / "a", config={"federation": federation | {"stop_after": never, "snapshots": 3}})
    write_run(tmp_path / "b", seed=1, config={"federation": federation, "listeners": {"x": {"_target_": "y"}}})
    assert len(study_of(tmp_path).groups) == 1
    write_run(tmp_path / "c", seed=2, config={"federation": federation | {"stop_after": never | {"patience": 2}}})
    assert len(study_of(tmp_path).groups) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("92.50 ± 0.31", 92.5),
        ("+0.19 [+0.07, +0.30]", 0.19),
        ("-1.64", -1.64),
        ("1,234", 1234.0),
        ("3.5 kB", 3500.0),
        ("2 MB", 2e6),
        ("42 %", 42.0),
        ("", None),
        ("-", None),
        ("no run", "no run"),
        ("2 of 3 runs", "2 of 3 runs"),
    ],
)
def test_cells_are_sorted_by_what_they_say(text: str, value: object) -> None:
    assert sort_value(text) == value
