import json
import os
import signal
from pathlib import Path

import pytest

from task import processes
from task.jobs import cpu_cores
from task.result_files import COMPLETED_WITH_LOSSES, FAILED
from task.results import read_run
from tests.e2e.commands import protofed, results, started

pytestmark = pytest.mark.e2e
SMALL = ("debug=smoke", "federation.num_clients=3")


def test_a_run_completes_and_tells_the_truth(tmp_path: Path) -> None:
    code, text = protofed(tmp_path, *SMALL)
    assert code == 0, text
    [folder] = results(tmp_path)
    run = read_run(folder)
    assert run.is_complete
    assert len(run.rounds) == 2
    assert len(run.clients) == 3
    assert run.prototypes is not None
    assert "round 2/2  accuracy" in text
    assert text.rstrip().endswith(str(folder))
    assert (folder / "flower.log").stat().st_size > 0


@pytest.mark.parametrize("word", ["federation.ronds=3", "federation.rounds=0", "federation.rounds=many"])
def test_a_bad_setting_is_refused_at_once(word: str, tmp_path: Path) -> None:
    code, text = protofed(tmp_path, word)
    assert code == 2
    assert text.count("\n") == 1
    assert "federation.rounds" in text
    assert not results(tmp_path)


@pytest.mark.slow
def test_the_number_of_workers_changes_no_number(tmp_path: Path) -> None:
    words = ("partition.max_samples=300", "federation.rounds=3", "federation.participation=0.6")
    for workers in ("two", "one"):
        cores = min(2, cpu_cores()) if workers == "one" else 1  # a client that takes all cores leaves one worker
        code, text = protofed(
            tmp_path, *words, "federation.num_clients=5", f"name={workers}", f"federation.cpus_per_client={cores}"
        )
        assert code == 0, text
    one, two = (
        [{key: value for key, value in row.items() if key != "seconds"} for row in read_run(folder).rounds]
        for folder in results(tmp_path)
    )
    assert one == two


def test_a_dead_worker_never_looks_like_a_run_that_worked(tmp_path: Path) -> None:
    with started(tmp_path, *SMALL, "federation.rounds=8") as command:
        command.wait_for("round 2/8", 200)
        workers = [process for process in processes.carriers(command.mark) if "ClientAppActor" in command_line(process)]
        assert workers
        os.kill(workers[0][0], signal.SIGKILL)
        assert command.process.wait(200) in (1, 3), command.text
        assert not command.left_behind(10)
    [folder] = results(tmp_path)
    run = read_run(folder)
    assert run.status in (COMPLETED_WITH_LOSSES, FAILED)
    lost = [failure for row in run.rounds for failure in row["failures"]]
    assert lost or run.reason
    assert all(failure["reason"] for failure in lost)


def command_line(process: processes.Process) -> str:
    try:
        return Path(f"/proc/{process[0]}/cmdline").read_text("utf-8", "replace")
    except OSError:
        return ""


def test_a_failing_job_does_not_hide_in_a_sweep(tmp_path: Path) -> None:  # C35, C39
    code, text = protofed(tmp_path, "-m", *SMALL, "partition.min_size=100000,1", seconds=500)
    assert code == 1, text
    [sweep] = results(tmp_path)
    found = [json.loads(file.read_text("utf-8")) for file in sweep.glob("*/summary.json")]
    completed, failed = sorted(found, key=lambda summary: str(summary["status"]))
    assert (failed["status"], completed["status"]) == ("failed", "completed")
    assert failed["reason"] in text
    table = text[text.rindex("\n  1  ") :]
    assert "1  failed" in table
    assert "2  completed" in table


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_run_stops_everything(number: signal.Signals, tmp_path: Path) -> None:
    with started(tmp_path, *SMALL, "federation.rounds=1000") as command:
        command.wait_for("round    1/1000", 200)
        command.process.send_signal(number)
        assert command.process.wait(90) == 130, command.text
        assert not command.left_behind(5)
    [folder] = results(tmp_path)
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert (summary["status"], summary["reason"]) == ("failed", "interrupted")
    assert summary["rounds_done"] >= 1


@pytest.mark.slow
def test_two_runs_at_the_same_time_keep_apart(tmp_path: Path) -> None:  # C25
    with started(tmp_path, *SMALL, "seed=1") as first, started(tmp_path, *SMALL, "seed=2") as second:
        codes = [command.process.wait(400) for command in (first, second)]
    assert codes == [0, 0], first.text + second.text
    runs = [read_run(folder) for folder in results(tmp_path)]
    assert sorted(run.seed or 0 for run in runs) == [1, 2]
    assert [len(run.rounds) for run in runs] == [2, 2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    words = (*SMALL, "federation.rounds=5", "federation.checkpoint_every=1", "federation.participation=0.7")
    whole, part = tmp_path / "whole", tmp_path / "part"
    whole.mkdir()
    part.mkdir()
    code, text = protofed(whole, *words)
    assert code == 0, text
    with started(part, *words) as command:
        command.wait_for("round 2/5", 200)
        command.process.kill()
        command.process.wait()
        assert not command.left_behind(30)
    [folder] = results(part)
    code, text = protofed(part, f"resume={folder.relative_to(part)}")
    assert code == 0, text
    assert "round 1/5" not in text
    rounds = [read_run(place).rounds for place in (*results(whole), folder)]
    for row in (*rounds[0], *rounds[1]):
        row.pop("seconds")
    assert rounds[0] == rounds[1]
