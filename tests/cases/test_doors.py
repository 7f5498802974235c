"""Cases C25, C26 and C35 to C39: the commands, their settings, folders and exit statuses.

C26 has no Windows and no macOS here: what they lack or forbid is looked for in the code and in what a run writes, and a
real run has a folder, a home, a terminal and a network as bad as they can be on Linux.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from server_app.experiment import results_folder
from task import launch, running, sweep
from task.composition import CONF_DIR
from task.config import load
from task.data.prepare import _prepare
from task.report import main as report
from task.results import find_runs, read_run
from task.superlink import CONNECTION, PARTS, LocalSuperLink
from tests.cases.small import rows, run, summary
from tests.e2e.commands import PROTOFED, REPOSITORY, results
from tests.fake_grid import run_federation
from tests.fake_link import FakeLink, program
from tests.test_architecture import FILES, imports, name_of

AWKWARD = "a péculiar ☃ folder"
DOCUMENTS = [REPOSITORY / name for name in ("README.md", "server_app/README.md")]


def command(*words: str, here: Path, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    """Run ``protofed`` with ``words`` in the folder ``here``."""
    values = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    return subprocess.run([*PROTOFED, *words], cwd=here, env=values, capture_output=True, timeout=120, check=False)


def refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """Return exit status and what ``protofed`` with ``words`` says, in this process."""
    monkeypatch.setattr(sys, "argv", ["protofed", *words])
    with pytest.raises(SystemExit) as exit_:
        launch.main()
    return exit_.value.code, capsys.readouterr().err.strip()


def calls(path: Path) -> Iterator[ast.Call]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


# C25: two runs at the same time. ``test_launch.py``, ``test_sweep.py``, ``data/test_prepare.py`` and, with real
# processes, ``e2e/test_protofed.py`` have one second, one folder, an empty data cache, and two commands.


def test_c25_runs_of_the_same_second_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "2026-01-01_00-00-00")
    config = load("algorithm=fedproto")
    assert len({results_folder(config, "", run_id) for run_id in (7, 8)}) == 2


@pytest.mark.e2e
@pytest.mark.slow
def test_c25_two_runs_on_one_superlink_do_not_mix(tmp_path: Path) -> None:
    with LocalSuperLink() as link:
        flwr = shutil.which("flwr", path=link.environment["PATH"])
        assert flwr is not None
        begun = []
        for seed in (1, 2):
            words = f"debug=smoke partition.max_samples=120 seed={seed} data.cache_dir={tmp_path}/cache"
            settings = f"overrides='{words}' output-dir='{tmp_path}/{seed}'"
            line = [flwr, "run", str(REPOSITORY), CONNECTION, "--stream", "--run-config", settings]
            begun.append(subprocess.Popen(line, env=link.environment, cwd=tmp_path, stdout=subprocess.DEVNULL))
        assert [process.wait(400) for process in begun] == [0, 0]
    for seed in (1, 2):
        found = read_run(tmp_path / str(seed))
        assert (found.seed, found.status, len(found.rounds)) == (seed, "completed", 2)
    assert len(list((tmp_path / "cache").glob("*/meta.json"))) == 1


# C26: Windows and macOS

POSIX_ONLY = {"fcntl", "resource", "pwd", "grp", "termios", "syslog", "multiprocessing"}
POSIX_NAMES = {"fork", "killpg", "getuid", "geteuid", "sched_getaffinity", "SIGKILL", "SIGSTOP"}
GUARDED = {
    ("task/jobs.py", "sched_getaffinity"),  # where there is one
    ("task/processes.py", "SIGKILL"),  # where os.name is posix
    ("task/processes.py", "getuid"),  # where there is one
}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_c26_nothing_that_one_platform_lacks_and_no_text_of_unknown_encoding(path: Path) -> None:
    # No worker is forked either: ``multiprocessing`` is not used at all, and Ray starts programs of its own.
    assert not {name.split(".")[0] for name in imports(path)} & POSIX_ONLY
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in POSIX_NAMES:
            assert (name_of(path), node.attr) in GUARDED, node.lineno
    for call in calls(path):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name not in ("open", "read_text", "write_text"):
            continue
        owner = getattr(getattr(call.func, "value", None), "id", "")
        binary = any(isinstance(value, ast.Constant) and "b" in str(value.value) for value in call.args)
        encodings = [word for word in call.keywords if word.arg == "encoding"]
        by_position = name != "open" and any(
            isinstance(value, ast.Constant) and value.value in ("utf-8", "ascii") for value in call.args
        )
        assert encodings or binary or by_position or owner in ("Image", "os", "opener"), f"line {call.lineno}"


@pytest.mark.parametrize("algorithm", ["fedproto", "fedkd"])
def test_c26_every_file_of_a_run_may_stand_on_any_platform(algorithm: str, tmp_path: Path) -> None:
    run(algorithm, tmp_path / AWKWARD, "federation.checkpoint_every=1")
    names = {part for path in (tmp_path / AWKWARD).rglob("*") for part in path.relative_to(tmp_path / AWKWARD).parts}
    assert {"rounds.jsonl", "checkpoint", "client-state"} <= names
    assert not [name for name in names if re.search(r'[<>:"|?*\\\x00-\x1f]|[ .]$', name)]
    for text in ("rounds.jsonl", "clients.csv", "summary.json", "config.yaml", "run.json"):
        (tmp_path / AWKWARD / text).read_bytes().decode("utf-8")


def test_c26_a_terminal_that_knows_few_characters(tmp_path: Path) -> None:
    here = tmp_path / AWKWARD
    here.mkdir()
    narrow = {"PYTHONIOENCODING": "cp1252"}
    for words in (["--help"], ["--cfg", "job"]):
        done = command(*words, here=here, **narrow)
        assert (done.returncode, done.stderr) == (0, b""), done.stderr
    done = command("--status", here=here, **narrow)
    assert done.returncode == 2
    assert b"no sweep in" in done.stderr
    assert b"\\u2603" in done.stderr
    run("fedproto", tmp_path / "☃", "name=é")
    (tmp_path / "☃").rename(here / "☃")
    line = [
        sys.executable,
        "-c",
        "import sys; from task.report import main; sys.exit(main())",
        "☃",
        "--output",
        "☃/seen",
    ]
    values = {**os.environ, "PYTHONPATH": str(REPOSITORY), **narrow}
    done = subprocess.run(line, cwd=here, env=values, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert b"\\u2603" in done.stdout
    assert "☃" in (here / "☃" / "seen" / "report.html").read_text("utf-8")


def test_c26_a_folder_that_is_gone_or_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, error = refused(["debug=smoke"], monkeypatch, capsys)
    assert (code, error) == (2, "protofed: the folder in which this was typed is gone: type it in another one")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "outputs").write_text("a file", "utf-8")
    monkeypatch.chdir(tmp_path / "here")
    code, error = refused(["-m", "seed=0,1", "debug=smoke"], monkeypatch, capsys)
    assert code == 1
    assert error.startswith("protofed: ")
    assert "outputs" in error
    assert "\n" not in error


def test_c26_no_place_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setattr("task.superlink._short_temporary_folder", lambda: None)
    for words in (["debug=smoke"], ["-m", "seed=0,1", "debug=smoke", "launch.report=false"]):
        code, error = refused(words, monkeypatch, capsys)
        assert code == 1
        assert ": no place for a local SuperLink: " in error
        assert "flower.log" not in error  # there is none
        assert "Traceback" not in error


def test_c26_a_home_that_cannot_be_written_is_named_with_the_setting_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", os.devnull)  # not even the superuser can write there
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    _prepare.cache_clear()
    with pytest.raises(RuntimeError, match=r"data\.cache_dir: prepared data cannot be written to /dev/null"):
        run("fedproto", tmp_path / "run", "data.cache_dir=null")
    _prepare.cache_clear()
    run("fedproto", tmp_path / "own", f"data.cache_dir={tmp_path}/elsewhere")
    assert summary(tmp_path / "own")["status"] == "completed"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="takes the network away as root on Linux")
def test_c26_c34_a_copy_in_an_odd_folder_without_home_network_and_flower_s_port(tmp_path: Path) -> None:
    copy = tmp_path / AWKWARD
    copy.mkdir()
    for part in (*PARTS, "pyproject.toml", "README.md", "LICENSE"):
        place = REPOSITORY / part
        shutil.copytree(place, copy / part) if place.is_dir() else shutil.copy(place, copy / part)
    # A network of its own, in which there is this machine only, and Flower's usual ports are taken.
    alone = (
        "import fcntl, os, socket, struct, sys\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "fcntl.ioctl(s, 0x8914, struct.pack('16sh', b'lo', 0x41))\n"
        "taken = [socket.create_server(('127.0.0.1', p)) for p in (8000, 9091, 9092, 9093, 39093)]\n"
        "for each in taken: os.set_inheritable(each.fileno(), True)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    words = ("debug=smoke", "partition.max_samples=120", "federation.num_clients=2", f"data.cache_dir={tmp_path}/c")
    line = ["unshare", "--net", sys.executable, "-c", alone, *PROTOFED[1:], *words]
    values = {**os.environ, "PYTHONPATH": str(copy), "HOME": os.devnull, "PYTHONIOENCODING": "cp1252"}
    done = subprocess.run(line, cwd=copy, env=values, capture_output=True, timeout=600, check=False)
    if b"unshare" in done.stderr:
        pytest.skip("this container may not take the network away")
    assert done.returncode == 0, done.stdout + done.stderr
    [folder] = results(copy)
    assert read_run(folder).is_complete


# C35: failed run, exit code 0. ``test_launch.py`` has every way in which a run can end; here is every door.


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLink:
    """A link below which each job fails whose seed is 1."""
    fake = FakeLink(program(before="if 'seed=1' in sys.argv[2].split(): raise OSError('full')"))
    monkeypatch.setattr(running, "LocalSuperLink", lambda *_: fake)
    monkeypatch.setattr(sweep, "stage", lambda target: target.mkdir(parents=True))
    monkeypatch.setattr(sweep, "digest", lambda _: "code")
    monkeypatch.setattr(launch, "report", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.mark.parametrize(
    "words", [["seed=1"], ["-m", "seed=0,1"], ["-m", "seed=1"], ["-m", "+sweep=quick", "seed=1"]], ids=" ".join
)
@pytest.mark.parametrize(
    "ends",
    [
        program(before="if 'seed=1' in sys.argv[2].split(): raise OSError('full')"),
        program(None),  # Flower's exit status is 0, and there is no result
        program("failed"),
        program("completed", "(folder / 'summary.json').mkdir()"),
    ],
    ids=["raises", "no summary", "says failed", "summary cannot be written"],
)
def test_c35_a_failed_run_has_an_exit_status_of_its_own(words: list[str], ends: str, link: FakeLink) -> None:
    link.program = ends
    assert launch._do([*words, "debug=smoke", "launch.report=false"], Path.cwd()) == 1


def test_c35_the_apps_never_exit_in_the_place_of_an_error() -> None:
    for path in FILES:
        if name_of(path).split("/")[0] == "task":
            continue
        for call in calls(path):
            assert ast.unparse(call.func) not in ("sys.exit", "exit", "quit", "os._exit"), (
                f"{name_of(path)}: {call.lineno}"
            )
        raised = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Raise)]
        assert not [node for node in raised if node.exc is not None and "SystemExit" in ast.unparse(node.exc)]


# C36: run-config value syntax


def examples(option: str) -> list[str]:
    """Return the values of an ``option`` of Flower's in the guides, as bash hands them over."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text("utf-8")
        for match in re.finditer(rf"{option} (\"(?:[^\"])*\"|'[^']*')", text):
            found.append(shlex.split(match[1].replace("\\\n", ""))[0])
    return found


def test_c36_the_examples_of_the_guides_are_understood() -> None:
    run_configs, nodes = examples("--run-config"), examples("--node-config")
    assert len(run_configs) >= 3
    assert len(nodes) >= 2
    for text in run_configs:
        values = parse_config_args([text])
        assert set(values) <= {"overrides", "output-dir"}
        load([word for word in shlex.split(values["overrides"]) if word != "…"])
    for text in nodes:
        assert all(isinstance(value, int | str) for value in parse_config_args([text]).values())
    assert {"num-supernodes": 20, "client-resources-num-cpus": 1} in [
        parse_config_args([text]) for text in examples("--federation-config")
    ]


def test_c36_the_examples_mean_the_same_in_every_shell() -> None:
    """Double quotes around, single ones within, and nothing that bash, zsh or PowerShell would replace."""
    text = (REPOSITORY / "README.md").read_text("utf-8")
    found = re.findall(r"--(?:run|federation)-config (\"[^\"]*\")", text)
    assert len(found) >= 2
    assert not [line for line in found if set(line) & set("$`!\\\n")]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("name=fedtgp", "fedtgp"),
        ("overwrite=True", True),
        ("federation.num_clients=null", None),
        ("data.classes=[cat,dog]", ["cat", "dog"]),
        ('name="two.words"', "two.words"),
    ],
)
def test_c36_what_toml_refuses_has_a_form_in_overrides(words: str, value: object) -> None:
    overrides = parse_config_args([f"overrides='{words}'"])["overrides"]
    found: object = load(overrides)
    for part in words.partition("=")[0].split("."):
        found = getattr(found, part)
    assert (list(found) if isinstance(value, list) else found) == value  # type: ignore[call-overload]


def test_c36_settings_in_a_file_need_no_quotes_of_a_shell(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('overrides = """data.classes=[\'a cat\',\'it is\']"""\n', "utf-8")
    assert list(load(parse_config_args([str(file)])["overrides"]).data.classes or ()) == ["a cat", "it is"]


# C37: relative paths. ``test_launch.py`` has those of ``protofed``, seen from where it was typed.


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("data.cache_dir=./data", "data.cache_dir"),
        ("federation.state_dir=state", "federation.state_dir"),
        ("resume=outputs/first", "resume"),
        ("data=npz data.source.path=./mine.npz", "data.source.path"),
        ("data=image_folder data.source.root=mine partition.max_samples=null", "data.source.root"),
        ("data=pfllib partition=given data.source.root=../mine", "data.source.root"),
    ],
)
def test_c37_flwr_run_refuses_a_relative_path(setting: str, key: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, RuntimeError), match=rf"{key}.*absolute"):
        run_federation(f"algorithm=fedproto federation.num_clients=4 {setting}", str(tmp_path / "run"))


def test_c37_where_the_results_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = load()
    with pytest.raises(ValueError, match=r"output-dir='here' is not allowed: an absolute path"):
        results_folder(config, "here", 7)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert results_folder(config, "~/a folder", 7) == tmp_path / "a folder"
    with caplog.at_level("INFO", "flwr"):
        run("fedproto", tmp_path / "é")
    assert f"results: {tmp_path / 'é'}" in caplog.text


def test_c37_where_a_run_was_started_may_be_gone_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    run("fedproto", tmp_path / "run")
    assert summary(tmp_path / "run")["status"] == "completed"
    monkeypatch.chdir(tmp_path)


# C38: unknown or ambiguous override


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("methd=x", "methd"),
        ("+method.lamda=1", "unknown setting 'method.lamda'"),
        ("algorithm.client.lamda=1", "algorithm.client.lamda"),
        ("+algorithm.client.lamda=1", "algorithm.client.lamda"),
        ("++algorithm.client.lamda=1", "algorithm.client.lamda"),
        ("~algorithm.client.weight", "~algorithm.client.weight is not allowed: give the setting a value"),
        ("algorithm=local algorithm.server.margin_cap=10", "algorithm.server.margin_cap"),
        ("seed=1,2", "seed"),
    ],
)
def test_c38_a_wrong_setting_is_refused_by_every_door(
    word: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, error = refused(word.split(), monkeypatch, capsys)
    assert (code, "\n" in error) == (2, False)
    assert says in error
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        load(word)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_c38_methods_with_settings_of_their_own_in_a_sweep(
    link: FakeLink, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", "algorithm=fedproto,fedtgp", "algorithm.server.margin_cap=10", "debug=smoke"]
    code, error = refused(words, monkeypatch, capsys)
    assert (code, link.seen) == (2, [])
    assert "algorithm.server.margin_cap" in error
    documented = "launch.jobs=['algorithm=fedtgp algorithm.server.margin_cap=10,20','algorithm=fedproto']"
    assert launch._do(["-m", documented, "debug=smoke", "launch.report=false"], Path.cwd()) == 0
    assert len(link.seen) == 3


def test_c38_an_experiment_wins_over_groups_and_what_is_typed_over_both() -> None:
    defaults, experiment = load(), load("experiment=cifar100_tau_1")
    assert experiment.data.name != defaults.data.name
    typed = load("experiment=cifar100_tau_1 data=digits federation.rounds=3")
    assert (typed.data.name, typed.federation.rounds) == ("digits", 3)
    # A launcher in an experiment would be ignored; none has one.
    said = [path.read_text("utf-8") for path in (CONF_DIR / "experiment").rglob("*.yaml")]
    assert len(said) > 30
    assert not [text for text in said if "hydra/launcher" in text]


def test_c38_the_final_configuration_is_saved_with_every_run(tmp_path: Path) -> None:
    run("fedproto", tmp_path / "run", "train.lr=0.125")
    assert "lr: 0.125" in (tmp_path / "run" / "config.yaml").read_text("utf-8")
    assert "train.lr=0.125" in json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))["overrides"]


# C39: sweep with a failing job. ``test_sweep.py`` has files that are edited, kills and GPUs.


def test_c39_only_the_job_that_failed_is_done_again(link: FakeLink, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "algorithm=local,fedproto,fedtgp", "seed=0,1,2", "debug=smoke", "launch.report=false"]
    fifth = "'algorithm=fedproto' in sys.argv[2].split() and 'seed=1' in sys.argv[2].split()"
    link.program = program(before=f"if {fifth}: raise OSError('full')")
    assert launch._do(words, Path.cwd()) == 1
    text = capsys.readouterr().out
    assert "9 jobs: 8 completed, 1 failed" in text
    assert re.search(r"5 +failed .*full", text) or "OSError: full" in text
    assert len(link.seen) == 9
    link.program = program()
    assert launch._do(words, Path.cwd()) == 0
    assert len(link.seen) == 10
    assert "9 jobs (8 completed, 1 failed), 1 to do" in capsys.readouterr().out


def test_c39_the_table_says_how_many_runs_are_behind_each_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for algorithm, seeds in (("fedproto", (0, 1)), ("local", (0,))):
        for seed in seeds:
            run(algorithm, tmp_path / f"{algorithm}-{seed}", f"seed={seed}")
    with pytest.raises(RuntimeError):
        run("local", tmp_path / "local-1", "seed=1 federation.on_failure=stop", spoil=fails)
    assert report([str(tmp_path), "--output", str(tmp_path / "seen")]) == 0
    text = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    column = cells[0].index("n")
    counts = {line[1]: line[column] for line in cells[2:]}
    assert {name.split()[0]: count for name, count in counts.items()} == {"fedproto": "2", "local": "1"}
    assert len(find_runs([tmp_path])) == 4
    assert len(rows(tmp_path / "fedproto-0")) == 2


def fails(*_: object) -> None:
    raise OSError("disk on fire")
