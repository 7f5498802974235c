"""Whole sweeps with real processes: the report at the end, kill -9 in the middle, side by side, on two Ray nodes."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from task import report
from task.results import find_runs, read_run
from tests.e2e.commands import PROTOFED, REPOSITORY, protofed, results, started

pytestmark = pytest.mark.e2e
TINY = ("partition.max_samples=120", "federation.num_clients=3", "federation.checkpoint_every=1", "seed=0")


def jobs_in(folder: Path) -> list[Path]:
    """Return the results folders of the only sweep below ``folder``."""
    [sweep] = results(folder)
    return find_runs([sweep])


def table(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    """Return the rows of a folder's table, without what depends on the machine."""
    capsys.readouterr()
    assert report.main([str(folder), "--format", "csv", "--output", str(folder / "table")]) == 0
    rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


def rounds(folder: Path) -> dict[str, list[dict[str, object]]]:
    """Return the rounds of every job of a sweep, by its name, without how long they took."""
    found = {}
    for job in jobs_in(folder):
        found[job.name] = [{k: v for k, v in row.items() if k != "seconds"} for row in read_run(job).rounds]
    return found


@pytest.mark.timeout(900)
def test_the_quick_sweep_ends_in_a_report(tmp_path: Path) -> None:
    code, text = protofed(tmp_path, "-m", "+sweep=quick", "debug=smoke", "seed=0", "partition.alpha=0.1", seconds=600)
    assert code == 0, text
    [sweep] = results(tmp_path)
    assert sweep.name.startswith("sweep-quick-")
    assert {read_run(job).status for job in jobs_in(tmp_path)} == {"completed"}
    assert "2 jobs: 2 completed" in text
    assert list((sweep / "report").iterdir())
    assert "accuracy" in text[text.rindex("2 jobs: 2 completed") :]
    code, text = protofed(tmp_path, "-m", "+sweep=quick", "debug=smoke", "seed=0", "partition.alpha=0.1")
    assert code == 0, text
    assert "0 to do" in text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_sweep_killed_in_the_middle_ends_as_one_that_was_not(tmp_path: Path, capsys) -> None:
    words = ("-m", "+sweep=quick", *TINY, "partition.alpha=0.1", "federation.rounds=4", "launch.report=false")
    whole, part = tmp_path / "whole", tmp_path / "part"
    whole.mkdir()
    part.mkdir()
    code, text = protofed(whole, *words, seconds=800)
    assert code == 0, text
    with started(part, *words) as command:
        command.wait_for("job 2/2", 400)
        deadline = time.monotonic() + 400
        while "round 2/4" not in command.text.partition("job 2/2")[2]:
            assert time.monotonic() < deadline, command.text
            time.sleep(0.1)
        command.process.kill()
        command.process.wait()
    # At once: what is left of the killed command must not disturb the next.
    code, text = protofed(part, *words, seconds=800)
    assert code == 0, text
    assert "1 completed, 1 interrupted), 1 to do" in text
    assert "round 1/4" not in text
    assert rounds(whole) == rounds(part)
    [one], [other] = results(whole), results(part)
    assert table(one, capsys) == table(other, capsys)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_second_command_keeps_out_of_a_running_sweep(tmp_path: Path) -> None:
    words = ("-m", "+sweep=quick", *TINY, "federation.rounds=50", "launch.report=false")
    with started(tmp_path, *words) as command:
        command.wait_for("round  1/50", 400)
        code, text = protofed(tmp_path, *words)
        assert code == 2, text
        assert "is at work in" in text
        assert "--status=" in text
        code, text = protofed(tmp_path, "--status")
        assert code == 1
        assert "1 running" in text
        command.process.terminate()
        assert command.process.wait(90) == 130
        assert not command.left_behind(10)
    code, text = protofed(tmp_path, "--status")
    assert code == 130
    assert "1 interrupted" in text


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_run_side_by_side_and_one_that_fails_stops_no_other(launcher: str, tmp_path: Path) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.split('_')[0]}_launcher")
    more = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else ["hydra.launcher.cpus_per_task=1"]
    words = ("-m", "algorithm=fedproto", *TINY, "federation.rounds=2", "partition.min_size=100000,1,2")
    code, text = protofed(tmp_path, *words, f"hydra/launcher={launcher}", *more, seconds=900)
    assert code == 1, text
    assert "3 jobs: 2 completed, 1 failed" in text
    [sweep] = results(tmp_path)
    assert not (sweep / ".frozen").exists()
    assert all(len(read_run(job).rounds) == 2 for job in jobs_in(tmp_path) if read_run(job).is_complete)
    progress = [(job / "protofed.log").read_text("utf-8") for job in jobs_in(tmp_path)]
    assert sum("round 2/2  accuracy" in text for text in progress) == 2


@pytest.fixture
def ray_nodes() -> Iterator[tuple[str, dict[str, str]]]:
    """Two Ray nodes of one core each, on this machine, as processes of their own; their address and environment."""
    home = tempfile.mkdtemp(prefix="rays-", dir="/tmp" if os.path.isdir("/tmp") else None)
    program = (
        "import sys, time\nfrom ray.cluster_utils import Cluster\n"
        "cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 1, 'include_dashboard': False})\n"
        "cluster.add_node(num_cpus=1)\nprint('ADDRESS', cluster.address, flush=True)\n"
        "sys.stdin.read()\ncluster.shutdown()\n"
    )
    environment = {**os.environ, "RAY_TMPDIR": home, "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        cwd=home,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = next(line.split()[1] for line in process.stdout if line.startswith("ADDRESS"))
        yield address, environment
    finally:
        process.communicate(timeout=60)
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("state", ["disk", "context"])
def test_a_run_uses_all_nodes_of_a_ray_cluster(
    state: str, ray_nodes: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, environment = ray_nodes
    words = ("algorithm=fedproto", *TINY, "federation.rounds=2", f"federation.state={state}")
    code, text = protofed(tmp_path, *words, f"launch.ray_address={address}", seconds=600)
    assert code == 0, text
    [folder] = [place for place in results(tmp_path) if place.name[0].isdigit()]
    assert len(read_run(folder).rounds) == 2
    ask = (
        "import ray, json\nfrom ray._private.state import actors\n"
        f"ray.init(address={address!r}, log_to_driver=False)\n"
        "print(json.dumps([each['Address']['NodeID'] for each in actors().values()]))\n"
    )
    done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    nodes = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(nodes) == 2
    assert len(set(nodes)) == 2


# The command line itself


def run(*words: str, **more: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **more}
    return subprocess.run([*PROTOFED, *words], env=environment, capture_output=True, text=True, check=False)


def test_help_into_a_pipe_that_closes_is_no_error() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [*PROTOFED, "--cfg", "all"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(60) in (0, 141)
    assert process.stderr.read() == ""


def test_the_shell_completes_groups_options_and_settings() -> None:
    script = run("-sc", "install=bash").stdout
    assert "complete -o nospace" in script or "complete" in script
    for line, word in (
        ("protofed algorithm=fedt", "algorithm=fedtgp_paper"),
        ("protofed sweep=qu", "sweep=quick"),
        ("protofed federation.ro", "federation.rounds="),
        ("protofed launch.st", "launch.stop_at_first_failure="),
    ):
        done = run("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
        assert word in done.stdout.split(), (line, done.stdout, done.stderr)
