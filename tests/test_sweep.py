"""Sweeps without Flower: which jobs they have, what they do again, and how they end."""

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from task import command_line, launch, running, sweep
from task.command_line import read_command
from task.folder_lock import LAUNCHER, FolderInUseError, alone_in, is_in_use
from task.jobs import INTERRUPTED, NOT_STARTED, RUNNING, Job, plan
from task.launchers import gpu_share, side_by_side
from task.superlink import SuperLinkError
from task.sweep import Sweep, identity, state_of
from tests.fake_link import FakeLink, program

SMALL = ("debug=smoke", "launch.report=false")
OUR_SWEEPS = ("quick", "alpha", "classes", "models", "labels", "participation", "lambda", "methods")
FAIL_SEED_1 = "if 'seed=1' in sys.argv[2].split(): raise OSError('full')"


def job(*words: str, here: Path = Path("/somewhere")) -> Job:
    return plan(words, here, 4)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLink:
    """The link below which every job runs, and a project that takes no time to copy."""
    fake = FakeLink(program(before=FAIL_SEED_1))
    monkeypatch.setattr(running, "LocalSuperLink", lambda *_: fake)
    monkeypatch.setattr(sweep, "stage", lambda target: target.mkdir(parents=True))
    monkeypatch.setattr(sweep, "digest", lambda _: "code")
    monkeypatch.setattr(launch, "report", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    return fake


def protofed(*words: str) -> int:
    return launch._do(words, Path.cwd())


# Which jobs


def test_a_job_is_known_by_what_it_computes() -> None:
    plain = job("algorithm=fedproto", "seed=1")
    assert identity(plain) == identity(job("seed=1", "algorithm=fedproto", "train.lr=0.01"))
    assert identity(plain) == identity(job("algorithm=fedproto", "seed=1", "federation.num_clients=8"))
    others = [
        job("algorithm=fedproto", "seed=2"),
        job("algorithm=fedproto", "seed=1", "train.lr=0.02"),
        job("algorithm=fedproto", "seed=1", "federation.num_clients=9"),
        job("algorithm=fedproto", "seed=1", "model=htfe2"),
    ]
    assert len({identity(each) for each in (plain, *others)}) == 5


def test_what_a_paper_reports_is_no_part_of_a_job() -> None:
    before = job("experiment=cifar100_tau_1", "data.stand_in=false")
    assert before.config.experiment is not None
    other = dataclasses.replace(before.config.experiment, accuracy={}, note="another")
    assert identity(before) == identity(
        dataclasses.replace(before, config=dataclasses.replace(before.config, experiment=other))
    )


def test_methods_with_settings_of_their_own_stand_in_one_sweep() -> None:
    lines = "['algorithm=fedtgp algorithm.client.weight=0.1,3','algorithm=fedproto']"
    command = read_command(["-m", f"launch.jobs={lines}", "seed=0,1"], Path("/"))
    assert command.jobs == (
        ("algorithm=fedtgp", "algorithm.client.weight=0.1", "seed=0"),
        ("algorithm=fedtgp", "algorithm.client.weight=0.1", "seed=1"),
        ("algorithm=fedtgp", "algorithm.client.weight=3", "seed=0"),
        ("algorithm=fedtgp", "algorithm.client.weight=3", "seed=1"),
        ("algorithm=fedproto", "seed=0"),
        ("algorithm=fedproto", "seed=1"),
    )
    assert command.launch_words == (f"launch.jobs={lines}",)


def test_the_same_command_has_the_same_folder_and_another_has_another(tmp_path: Path) -> None:
    def folder(*words: str) -> Path:
        return sweep.sweep_folder(read_command(words, tmp_path), tmp_path)

    assert folder("sweep=tau", "seed=0") == folder("sweep=tau", "seed=0", "launch.report=false")
    assert folder("sweep=tau", "seed=0").parent == tmp_path / "outputs"
    assert folder("sweep=tau", "seed=0").name.startswith("sweep-tau-")
    assert folder("sweep=tau", "seed=0") != folder("sweep=tau", "seed=1")
    assert folder("-m", "seed=0", "launch.folder=mine") == tmp_path / "mine"
    assert folder("-m", "seed=0,1", "hydra/launcher=joblib") == folder("-m", "seed=0,1")


@pytest.mark.parametrize("name", OUR_SWEEPS)
def test_the_jobs_of_a_sweep_file_are_accepted(name: str) -> None:
    command = read_command([f"sweep={name}", "seed=0"], Path("/"))
    assert len(command.jobs) == len(set(command.jobs)) > 3
    known = {
        identity(plan(words, Path("/"), 4, command.launch_words)) for words in command.jobs[:: len(command.jobs) - 1]
    }
    assert len(known) == 2


def test_the_quick_sweep_is_two_methods_two_divisions_and_two_seeds() -> None:
    command = read_command(["-m", "+sweep=quick"], Path("/"))
    jobs = [plan(words, Path("/"), 4, command.launch_words) for words in command.jobs]
    assert len({identity(job) for job in jobs}) == 8
    assert {job.config.algorithm.name for job in jobs} == {"fedtgp", "fedproto"}
    assert {job.config.partition["alpha"] for job in jobs} == {0.1, 1.0}
    assert {job.config.seed for job in jobs} == {0, 1}
    assert {(job.config.federation.rounds, job.num_clients) for job in jobs} == {(10, 8)}


def test_what_a_sweep_file_says_and_no_job_would_hear_is_refused(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "lost.yaml").write_text("federation:\n  rounds: 8\n", encoding="utf-8")
    monkeypatch.setattr(command_line, "CONF_DIR", tmp_path)
    with pytest.raises(ValueError, match=r"lost\.yaml: federation reaches no job"):
        read_command(["sweep=lost"], tmp_path)


# What is done, and what is done again


def test_the_same_command_runs_only_what_is_missing_or_failed(link: FakeLink, capsys) -> None:  # C39
    words = ("-m", "algorithm=fedproto", "seed=0,1,2", *SMALL)
    assert protofed(*words) == 1
    text = capsys.readouterr().out
    assert "3 to do" in text
    assert "3 jobs: 2 completed, 1 failed" in text
    assert len(link.seen) == 3
    [folder] = Path("outputs").iterdir()
    assert (folder / sweep.MANIFEST).exists()
    assert not (folder / sweep.FROZEN).exists()
    link.program = program()
    assert protofed(*words) == 0
    assert len(link.seen) == 4
    assert "seed=1" in link.seen[3]
    assert "overwrite=true" in link.seen[3]
    assert "3 jobs (2 completed, 1 failed), 1 to do" in capsys.readouterr().out
    assert protofed(*words) == 0
    assert len(link.seen) == 4
    assert protofed("--status") == 0
    assert "3 jobs: 3 completed" in capsys.readouterr().out


def test_a_wider_command_in_the_same_folder_does_the_rest(link: FakeLink) -> None:
    assert protofed("-m", "algorithm=fedproto", "seed=0,2", "launch.folder=mine", *SMALL) == 0
    assert protofed("-m", "algorithm=fedproto", "seed=2,3", "launch.folder=mine", *SMALL) == 0
    assert len(link.seen) == 3
    manifest = json.loads(Path("mine", sweep.MANIFEST).read_text("utf-8"))
    assert (len(manifest["jobs"]), len(manifest["earlier"])) == (2, 1)


def test_one_configuration_is_run_once(link: FakeLink, capsys) -> None:
    assert protofed("-m", "algorithm=fedproto", "train.lr=0.01,0.010", *SMALL) == 0
    assert len(link.seen) == 1
    assert "not run twice" in capsys.readouterr().out


def test_a_switch_stops_at_the_first_failure(link: FakeLink, capsys) -> None:
    assert protofed("-m", "algorithm=fedproto", "seed=1,0", "launch.stop_at_first_failure=true", *SMALL) == 1
    assert len(link.seen) == 1
    assert "2 jobs: 1 failed, 1 not started" in capsys.readouterr().out


def test_a_killed_job_goes_on_from_its_checkpoint_and_a_failed_one_starts_anew(link: FakeLink) -> None:
    words = ("-m", "algorithm=fedproto", "seed=0", *SMALL)
    link.program = program(None, "(folder / 'checkpoint').mkdir(); os.kill(os.getppid(), 9)")
    from multiprocessing import get_context

    process = get_context("fork").Process(target=protofed, args=words)
    process.start()
    process.join(60)
    assert process.exitcode == -9
    [place] = Path("outputs").iterdir()
    [folder] = place.glob("fedproto-seed0-*")
    assert state_of(folder) == (INTERRUPTED, "killed")
    link.program = program("failed")
    assert protofed(*words) == 1
    assert f"resume='{folder.resolve()}'" in link.seen[-1].replace("'\"'\"'", "'")
    link.program = program()
    assert protofed(*words) == 0
    assert link.seen[-1].endswith("overwrite=true")


def test_an_edited_setting_makes_a_new_job_beside_the_old_one(link: FakeLink, monkeypatch) -> None:
    words = ("-m", "algorithm=fedproto", "seed=0,2", *SMALL)
    assert protofed(*words) == 0
    plain = launch.plan

    def edited(words: tuple[str, ...], *rest: object) -> Job:
        return plain([*words, "train.lr=0.5"] if "seed=2" in words else words, *rest)

    monkeypatch.setattr(launch, "plan", edited)
    assert protofed(*words) == 0
    assert len(link.seen) == 3
    assert "train.lr=0.5" in link.seen[2]


def test_jobs_are_frozen_while_the_sweep_goes_on(link: FakeLink, tmp_path: Path) -> None:
    jobs = [job("algorithm=fedproto", "seed=3", "debug=smoke", "model=htfe2")]
    ours = Sweep(tmp_path / "sweep", jobs)
    with ours.begun(read_command(["-m", "seed=3"], tmp_path), "code"):
        frozen = sweep.frozen_entry(ours.folder, ours.entries[0].key)
    assert frozen.job.config == jobs[0].config
    assert frozen.job.overrides == jobs[0].overrides
    assert (frozen.job.num_clients, frozen.folder) == (4, ours.entries[0].folder)


def test_a_project_edited_while_the_jobs_are_resolved_is_refused(link: FakeLink, monkeypatch) -> None:
    monkeypatch.setattr(sweep, "digest", lambda _: "edited")
    monkeypatch.setattr(launch, "code_digest", lambda: "before")
    with pytest.raises(ValueError, match="edited while"):
        protofed("-m", "algorithm=fedproto", "seed=0,1", *SMALL)
    assert not link.seen


def test_other_code_is_told(link: FakeLink, monkeypatch, capsys) -> None:
    words = ("-m", "algorithm=fedproto", "seed=0,2", *SMALL)
    assert protofed(*words) == 0
    monkeypatch.setattr(sweep, "digest", lambda _: "newer")
    assert protofed(*words) == 0
    assert "2 finished jobs were run by other code" in capsys.readouterr().out


def test_a_sweep_goes_on_when_flower_cannot_be_started_for_one_job(link: FakeLink, monkeypatch, capsys) -> None:
    answers = [SuperLinkError("no port"), None, None]

    def start(self: FakeLink) -> FakeLink:
        error = answers.pop(0) if answers else None
        if error:
            raise error
        return self

    monkeypatch.setattr(FakeLink, "__enter__", start)
    assert protofed("-m", "algorithm=fedproto", "seed=0,2", *SMALL) == 1
    assert len(link.seen) == 1
    assert "2 jobs: 1 completed, 1 failed" in capsys.readouterr().out


# Locks


def test_two_sweeps_in_one_folder_do_not_meet(link: FakeLink, tmp_path: Path) -> None:
    with alone_in(tmp_path / "mine", LAUNCHER), pytest.raises(ValueError, match="another run or sweep is at work"):
        protofed("-m", "algorithm=fedproto", "seed=0", "launch.folder=mine", *SMALL)
    assert not link.seen


def test_two_runs_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"overrides": ""}', encoding="utf-8")
    fake = FakeLink(program())
    with alone_in(tmp_path, LAUNCHER):
        assert state_of(tmp_path)[0] == RUNNING
        outcome = running.run_one(job(f"resume={tmp_path}"), fake, tmp_path)  # type: ignore[arg-type]
    assert (outcome.status, outcome.folder) == (RUNNING, tmp_path)
    assert "at work" in str(outcome.reason)
    assert running.exit_status([outcome.status]) == 1
    assert not fake.seen
    assert state_of(tmp_path)[0] == INTERRUPTED


def test_a_lock_waits_as_long_as_it_is_told(tmp_path: Path) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with alone_in(tmp_path, LAUNCHER):
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    assert is_in_use(tmp_path, LAUNCHER)
    with pytest.raises(FolderInUseError), alone_in(tmp_path, LAUNCHER):
        pass
    done.set()
    with alone_in(tmp_path, LAUNCHER, patience=20):
        pass
    thread.join()
    assert not is_in_use(tmp_path, LAUNCHER)


# Side by side


@pytest.mark.parametrize(
    ("slot", "slots", "gpus", "share"),
    [
        (0, 4, [], (None, 1)),
        (0, 1, ["0", "1"], (None, 1)),
        (0, 2, ["0", "1", "2"], ("0,2", 1)),
        (1, 2, ["0", "1", "2"], ("1", 1)),
        (0, 3, ["4", "7"], ("4", 2)),
        (1, 3, ["4", "7"], ("7", 1)),
        (2, 3, ["4", "7"], ("4", 2)),
    ],
)
def test_jobs_side_by_side_share_the_gpus(
    slot: int, slots: int, gpus: list[str], share: tuple[str | None, int]
) -> None:
    assert gpu_share(slot, slots, gpus) == share


def test_clients_of_jobs_that_share_a_gpu_take_more_of_it() -> None:
    ours = job("federation.gpus_per_client=0.25")
    assert "client-resources-num-gpus=0.5 init" in ours.federation_config(2, jobs_per_gpu=2)
    assert "init-args" not in ours.federation_config(None)


@pytest.mark.parametrize(
    ("words", "jobs", "slots"),
    [
        (("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), 8, 2),
        (("hydra/launcher=joblib", "hydra.launcher.n_jobs=20"), 8, 8),
        (("hydra/launcher=joblib",), 8, 4),
        (("hydra/launcher=submitit_local",), 8, None),
        (("hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu"), 8, None),
    ],
)
def test_the_launcher_says_how_many_jobs_share_the_machine(
    words: tuple[str, ...], jobs: int, slots: int | None
) -> None:
    assert side_by_side(words, jobs, cores=4) == slots


def test_a_share_that_is_too_small_is_refused(link: FakeLink) -> None:
    words = ("-m", "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "launch.cores=2", *SMALL)
    with pytest.raises(ValueError, match="at most 1, as 2 jobs share 2"):
        protofed(*words, "federation.cpus_per_client=2")
    with pytest.raises(ValueError, match="takes all of a Ray cluster"):
        protofed(*words, "launch.ray_address=host:1")


def test_nothing_was_started_where_there_is_no_folder(tmp_path: Path) -> None:
    assert state_of(tmp_path / "none") == (NOT_STARTED, None)
    with pytest.raises(ValueError, match=r"no sweep\.json"):
        sweep.status_table(tmp_path)
