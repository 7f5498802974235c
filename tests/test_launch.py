import json
import logging
import os
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args
from hypothesis import given, settings
from hypothesis import strategies as st

from task import command_line, launch, processes, running
from task.config import load
from task.jobs import Job, create_folder, plan, quoted
from task.progress import Progress, duration, last_error
from task.superlink import LocalSuperLink, last_run_id, private_environment, toml_string
from tests.fake_link import FakeLink, program

AWKWARD = ["plain", "with space", "it's", 'say "so"', "back\\slash", "tail\\", "a\\'b", "é ☃ 😀", "a=b,c", "[x]{y}"]


@pytest.fixture(autouse=True)
def _own_log_handlers() -> Iterator[None]:
    """Take back the handlers that Hydra installs when it shows something: they keep pytest's closed streams."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    root.handlers[:] = before


def job(*words: str, here: Path = Path("/somewhere"), cores: int = 2) -> Job:
    return plan(words, here, cores)


# The command line


def test_words_reach_the_job_as_typed() -> None:
    assert command_line.expand(["algorithm=fedproto", "seed=3", "debug=smoke"]) == [
        ["algorithm=fedproto", "seed=3", "debug=smoke"]
    ]


def test_a_sweep_has_a_job_for_every_combination_and_leaves_no_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = command_line.expand(["-m", "algorithm=fedtgp,fedproto", "seed=0,1,2"])
    assert len(jobs) == 6
    assert jobs[0] == ["algorithm=fedtgp", "seed=0"]
    assert jobs[5] == ["algorithm=fedproto", "seed=2"]
    assert not list(tmp_path.iterdir())


def test_a_sweep_file_makes_jobs_and_the_command_line_wins() -> None:
    jobs = command_line.expand(["+sweep=tau", "seed=4", "debug=smoke"])
    assert [words[0] for words in jobs] == [f"experiment=cifar100_tau_{tau}" for tau in (1, 10, 100, 1000)]
    assert {tuple(words[1:]) for words in jobs} == {("algorithm=fedtgp_paper", "seed=4", "debug=smoke")}
    assert command_line.expand(["-m", "sweep=tau", "seed=4", "+debug=smoke"]) == jobs
    assert job(*jobs[0]).config.data.name == "cifar100 (stand-in)"


def test_hydra_s_own_sweeps_go_on_working() -> None:
    jobs = command_line.expand(["-m", "model=glob(htfe8*)", "seed=range(2)", "name='a,b'"])
    assert jobs == [[f"model={m}", f"seed={s}", "name='a,b'"] for m in ("htfe8", "htfe8_htc4") for s in (0, 1)]


def test_a_job_of_an_experiment_is_called_after_it(tmp_path: Path) -> None:
    named = job("experiment=cifar100_tau_1", "debug=smoke")
    assert named.title == "cifar100_tau_1-fedtgp_paper seed 0"
    assert create_folder(named, tmp_path).name.endswith("-cifar100_tau_1-fedtgp_paper-seed0")


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["--hydra-help"]])
def test_what_only_shows_something_starts_nothing(arguments: list[str], monkeypatch, capsys) -> None:
    monkeypatch.setattr(launch, "run_all", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(launch.Sweep, "begun", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(sys, "argv", ["protofed", *arguments])
    with pytest.raises(SystemExit) as exit_:
        launch.main()
    assert not exit_.value.code
    assert "rounds" in capsys.readouterr().out or arguments == ["--hydra-help"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["federation.ronds=3"], "federation.rounds"),
        (["methd=x"], "methd"),
        (["federation.rounds=0"], "federation.rounds"),
        (["federation.rounds=many"], "federation.rounds"),
        (["seed=0,1"], "multirun"),
        (["algorithm=nothing"], "nothing"),
        (["federation.cpus_per_client=4096"], "federation.cpus_per_client"),
        (["train.device=cuda"], "federation.gpus_per_client"),
        (["resume=nowhere"], "run.json"),
        (["-m", "seed=0,-1"], "seed"),
        (["-m", "federation.ronds=1,2"], "ronds"),
        (["rounds"], "rounds"),
        (["sweep=table"], "table1"),
        (["algorithm=fedtpg"], "fedtgp"),
        (["algoritm=fedtgp"], "algorithm"),
        (["-m", "algorithm=local,fedporto"], "fedproto"),
        (["--hlep"], "--help"),
        (["--cfg", "jobs"], "job, hydra, all"),
        (["launch.folders=x"], "launch.folder"),
        (["launch.cores=0"], "launch.cores"),
        (["hydra/launcher=joblib"], "sweep"),
        (["-m", "seed=0,1", "hydra/launcher=jobli"], "joblib"),
        (["-m", "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.njobs=2"], "hydra.launcher.n_jobs"),
        (["-m", "seed=0,1", "hydra.sweep.dir=x"], "launch.folder"),
        (["-m", "seed=0,1", "resume=x"], "same command"),
        (["--status=/nowhere"], "sweep.json"),
        (["sweep=tau", "seed=-1"], "seed"),
        (["sweep=tau", "federation.ronds=1"], "ronds"),
    ],
)
def test_a_bad_command_is_refused_in_one_line(arguments: list[str], named: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(launch, "run_all", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(launch.Sweep, "begun", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(sys, "argv", ["protofed", *arguments])
    with pytest.raises(SystemExit) as exit_:
        launch.main()
    assert exit_.value.code == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert error.startswith("protofed: ")
    assert named in error


# Paths and quoting


@pytest.mark.parametrize("text", AWKWARD)
def test_a_quoted_value_comes_back_from_hydra(text: str) -> None:
    assert load([f"data.cache_dir={quoted(text)}"]).data.cache_dir == text


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_a_value_comes_back_from_toml(text: str) -> None:
    assert tomllib.loads(f"x = {toml_string(text)}")["x"] == text


@pytest.mark.parametrize("folder", AWKWARD)
def test_overrides_reach_the_app_through_flowers_file(folder: str, tmp_path: Path) -> None:
    asked = job(f"data.cache_dir={quoted('./' + folder)}", here=tmp_path)
    file = tmp_path / "run-config.toml"
    file.write_text(f"overrides = {toml_string(shlex.join(asked.overrides))}\n", encoding="utf-8")
    received = parse_config_args([str(file)])["overrides"]
    assert load(received).data.cache_dir == str(tmp_path / folder)


def test_relative_paths_are_seen_from_where_the_command_was_typed(tmp_path: Path) -> None:  # C37
    assert command_line.absolute_word("data.source.path='./my data.npz'", tmp_path) == (
        f"data.source.path='{tmp_path}/my data.npz'"
    )
    [[word]] = command_line.expand(["data.cache_dir=~/x y"])
    assert job(word).config.data.cache_dir == f"{Path.home()}/x y"
    assert command_line.absolute_word("data.source.resize=32", tmp_path) == "data.source.resize=32"
    config = job("federation.state_dir=state", "data.cache_dir=/absolute", here=tmp_path).config
    assert config.federation.state_dir == str(tmp_path / "state")
    assert config.data.cache_dir == "/absolute"


def test_a_resumed_run_gets_its_own_overrides_and_folder(tmp_path: Path) -> None:
    earlier = {"overrides": "algorithm=fedproto seed=5 resume=/elsewhere overwrite=true"}
    (tmp_path / "run.json").write_text(json.dumps(earlier), encoding="utf-8")
    resumed = job(f"resume={tmp_path.name}", "federation.rounds=40", here=tmp_path.parent)
    assert resumed.config.algorithm.name == "fedproto"
    assert (resumed.config.seed, resumed.config.federation.rounds) == (5, 40)
    assert resumed.config.resume == str(tmp_path)
    assert not resumed.config.overwrite
    assert create_folder(resumed, Path("/not/used")) == tmp_path


def test_folders_of_the_same_second_differ(tmp_path: Path) -> None:  # C25
    folders = {create_folder(job("name=try.1"), tmp_path) for _ in range(5)}
    assert len(folders) == 5
    assert all("try.1-seed0" in folder.name and ":" not in folder.name for folder in folders)
    assert all(folder.parent == tmp_path / "outputs" and not list(folder.iterdir()) for folder in folders)


def test_workers_are_no_more_than_clients() -> None:
    few = job("federation.num_clients=3", "federation.gpus_per_client=0.25").federation_config(cores=64)
    assert few == ("num-supernodes=3 client-resources-num-cpus=1 client-resources-num-gpus=0.25 init-args-num-cpus=3")
    assert "num-supernodes=8" in job().federation_config(cores=2)
    assert "init-args-num-cpus=2" in job("federation.cpus_per_client=2").federation_config(cores=2)


def test_the_private_environment_keeps_others_out(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    monkeypatch.setenv("NO_PROXY", "example.org")
    environment = private_environment(tmp_path)
    assert "RAY_ADDRESS" not in environment
    assert environment["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert environment["FLWR_HOME"] == environment["RAY_TMPDIR"] == str(tmp_path)
    assert environment["FLWR_TELEMETRY_ENABLED"] == environment["RAY_USAGE_STATS_ENABLED"] == "0"


# How a run ends


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (program("completed"), "completed", None),
        (program("completed with losses"), "completed with losses", None),
        (program("failed"), "failed", "why"),
        (program(None, "raise RuntimeError('no memory')"), "failed", "RuntimeError: no memory"),
        (program(None, "print('last words')"), "failed", "last words"),
        (
            program(None, "raise ValueError('ActorPool is empty.')"),
            "failed",
            "no client fits on this machine with federation.cpus_per_client=1 and gpus_per_client=0.0: lower them",
        ),
        (program(None, "os._exit(0)"), "failed", "no output"),
        (program("completed", "(folder / 'summary.json').mkdir()"), "failed", None),
        (program(None, "(folder / 'summary.json').write_text('nonsense')"), "failed", None),
    ],
)
def test_the_summary_decides_not_flowers_exit_status(
    text: str, status: str, reason: str | None, tmp_path: Path, capsys
) -> None:
    outcome = running.run_one(job("federation.rounds=1"), FakeLink(text), tmp_path)  # type: ignore[arg-type]
    assert outcome.status == status
    assert outcome.reason == reason or reason is None
    if status == "failed" and (outcome.folder / "summary.json").is_file():
        assert json.loads((outcome.folder / "summary.json").read_text("utf-8"))["status"] == "failed"


def test_progress_tells_accuracy_and_time_left(tmp_path: Path, capsys) -> None:
    running.run_one(job("federation.rounds=4"), FakeLink(program()), tmp_path)  # type: ignore[arg-type]
    assert "round 1/4  accuracy  50.00 %    2.0 s, about 6 s left" in capsys.readouterr().out


def test_the_summary_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"overrides": ""}', encoding="utf-8")
    earlier = '{"status": "completed", "best_accuracy": 0.9}'
    (tmp_path / "summary.json").write_text(earlier, encoding="utf-8")
    link = FakeLink(program(None, "raise ValueError('another seed')"))
    outcome = running.run_one(job(f"resume={tmp_path}"), link, tmp_path)  # type: ignore[arg-type]
    assert (outcome.status, outcome.reason) == ("failed", "ValueError: another seed")
    assert (tmp_path / "summary.json").read_text("utf-8") == earlier


def test_ctrl_c_stops_the_run_and_says_so_in_the_summary(tmp_path: Path, monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    link = FakeLink(program("failed"))
    monkeypatch.setattr(running, "_watch", interrupt)
    outcome = running.run_one(job("federation.rounds=1"), link, tmp_path)  # type: ignore[arg-type]
    assert (outcome.status, link.stopped, link.closed) == ("interrupted", 1, True)
    summary = json.loads((outcome.folder / "summary.json").read_text("utf-8"))
    assert (summary["status"], summary["reason"], summary["algorithm"]) == ("failed", "interrupted", "fedtgp")


def test_a_folder_that_cannot_be_made_fails_before_flower(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file", encoding="utf-8")
    outcome = running.run_one(job(), FakeLink("raise SystemExit"), tmp_path)  # type: ignore[arg-type]
    assert outcome.status == "failed"
    assert outcome.reason.startswith("no results folder: ")


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["completed"], 0),
        (["completed", "completed with losses"], 3),
        (["completed with losses", "failed", "completed"], 1),
        (["completed", "not started"], 1),
        (["failed", "interrupted", "not started"], 130),
    ],
)
def test_the_worst_job_gives_the_exit_status(statuses: list[str], code: int) -> None:
    assert running.exit_status(statuses) == code


# Logs and progress

TRACEBACK = """\x1b[91mERROR \x1b[0m:     Simulation raised an exception
Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'first'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 1, in g
flwr.app.exception.AppExitException: wrapped
ERROR :     Exit Code: 700
"""
BOX = """Using SuperLink: protofed (127.0.0.1:1)
╭─ Error ──────────────╮
│ Pattern in "x" did   │
│ not match.           │
╰──────────────────────╯
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRACEBACK, "KeyError: 'first'"),
        (TRACEBACK + "(ClientAppActor pid=7) Traceback (most recent call last):\nValueError: own\n", "ValueError: own"),
        (BOX, 'Pattern in "x" did not match.'),
        ("fine\nERROR :   no worker\nbye\n", "no worker"),
        ("only words\n\n", "only words"),
        ("", "no output"),
    ],
)
def test_the_log_tells_the_first_reason(text: str, line: str, tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    log.write_text(text, encoding="utf-8")
    assert last_error(log) == line


def test_the_last_run_of_a_log_is_the_one_to_stop(tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    assert last_run_id(log) is None
    log.write_text("Successfully started run 11\nSuccessfully started run 12\n", encoding="utf-8")
    assert last_run_id(log) == 12


def test_progress_follows_a_resumed_run(tmp_path: Path) -> None:
    def line(number: int, **more: object) -> str:
        return json.dumps({"round": number, "accuracy": None, "seconds": {"round": 1.0}, **more}) + "\n"

    file = tmp_path / "rounds.jsonl"
    file.write_text(line(1) + line(2) + line(3), encoding="utf-8")
    progress = Progress(tmp_path, 5, "starting")
    assert progress.lines() == []
    file.write_text(line(1) + line(2), encoding="utf-8")  # back to the checkpoint
    progress.lines()
    with file.open("a", encoding="utf-8") as stream:
        stream.write(line(3, failures=[{"partition": 4, "phase": "train", "reason": "out of\nmemory"}]) + '{"rou')
        stream.flush()
        news = progress.lines()
    assert news[0].startswith("round 3/5  accuracy not evaluated")
    assert news[1] == "  1 failed, first client 4: out of memory"


def test_a_long_silence_is_broken(tmp_path: Path, monkeypatch) -> None:
    progress = Progress(tmp_path, 5, "starting Ray")
    assert progress.lines() == []
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    assert progress.lines() == ["starting Ray (11 s)"]
    assert progress.lines() == []


def test_durations_read_well() -> None:
    assert [duration(s) for s in (4.4, 65, 3700)] == ["4 s", "1 min 05 s", "1 h 01 min"]


# Processes


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_everything_below_a_process_is_ended_and_nothing_else(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {stubborn!r}]); time.sleep(60)"
    root = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    lost = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, "FLWR_HOME": str(tmp_path)}
    )
    try:
        deadline = time.monotonic() + 10
        while not processes.descendants(root.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        below = processes.descendants(root.pid)
        assert below
        time.sleep(0.3)
        processes.PATIENCE = 1.0
        processes.end_all(root.pid, str(tmp_path))
        time.sleep(0.2)
        assert not below & processes.process_table().keys()
        assert root.wait(5) != 0
        assert lost.wait(5) != 0
        assert other.poll() is None
    finally:
        processes.PATIENCE = 10.0
        for process in (root, other, lost):
            process.kill()
            process.wait()


def test_the_guard_cleans_up_after_its_master(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    root = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    guard = processes.start_guard(root.pid, str(home))
    guard.stdin.close()  # type: ignore[union-attr]
    assert root.wait(15) != 0
    assert guard.wait(15) == 0
    assert not home.exists()


def test_a_superlink_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    link = LocalSuperLink()
    monkeypatch.setattr(link, "_start", lambda port: False)
    with pytest.raises(RuntimeError, match="did not start"), link:
        pass
    assert not link.home.exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_what_a_killed_command_left_is_ended_and_nothing_of_others(tmp_path: Path) -> None:
    homes = {name: tmp_path / f"protofed-{name}" for name in ("dead", "alive", "unsigned")}
    left = {}
    for name, home in homes.items():
        home.mkdir()
        environment = {**os.environ, "FLWR_HOME": str(home)}
        left[name] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    (homes["dead"] / processes.OWNER).write_text(f"{ended.pid} 1\n", encoding="utf-8")
    processes.sign(homes["alive"])
    try:
        assert processes.remove_leftovers(tmp_path, "protofed-") == [homes["dead"]]
        assert left["dead"].wait(5) != 0
        assert not homes["dead"].exists()
        for name in ("alive", "unsigned"):
            assert left[name].poll() is None
            assert homes[name].exists()
    finally:
        for process in left.values():
            process.kill()
            process.wait()
