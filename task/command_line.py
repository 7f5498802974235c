"""What a command line of ``protofed`` asks for. Hydra takes it apart: it makes no folder, no log and no file.

A sweep is expanded here and not by Hydra's sweeper, which composes every job twice, a minute for a hundred. Hydra's
launchers still serve for jobs side by side (``task/launchers.py``).
"""

import difflib
import itertools
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hydra
import yaml  # type: ignore[import-untyped, unused-ignore]
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from task.composition import CONF_DIR, LAUNCH, SWEEP, compose_words, load_launch, one_line, without_plus
from task.jobs import absolute, is_source_path, quoted
from task.launch_settings import LaunchConfig

STATUS = "--status"
_QUIET_HYDRA = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra.job.chdir=false",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
_MULTIRUN = ("-m", "--multirun")
_SHOWS_ONLY = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
_OPTIONS = (*_MULTIRUN, *_SHOWS_ONLY, STATUS, "--resolve", "--package", "-p", "--run", "-r")
_LAUNCHER = ("hydra/launcher", "hydra.launcher.")


@dataclass(frozen=True)
class Command:
    """A command line: the overrides of each ``job``, and what says how the command does them.

    ``launch_words`` are those of the node ``launch``, with the sweep file; ``launcher_words`` are those of Hydra's
    launcher. ``sweep`` names the sweep; None for a single run. ``words`` are all that make the jobs.
    """

    jobs: tuple[tuple[str, ...], ...]
    words: tuple[str, ...] = ()
    launch_words: tuple[str, ...] = ()
    launcher_words: tuple[str, ...] = ()
    sweep: str | None = None

    def settings(self) -> LaunchConfig:
        """Return the settings of the command."""
        return load_launch(self.launch_words)


def read_command(arguments: Sequence[str], here: Path) -> Command:
    """Take a command line apart, as typed in the folder ``here``; a command that only shows things has no jobs.

    Raises
    ------
    ValueError
        One line for what Hydra does not accept, with the nearest known names.
    """
    arguments = [_home_in_quotes(word) for word in without_plus(arguments)]
    words = [word for word in arguments if word not in _MULTIRUN]
    _check_options(words)
    if any(word.split("=")[0] in _SHOWS_ONLY for word in words):
        _show(arguments)
        return Command(())
    of_launch = tuple(word for word in words if _key(word).startswith(f"{LAUNCH}."))
    of_launcher = tuple(word for word in words if _key(word).startswith(_LAUNCHER))
    words = [word for word in words if word not in (*of_launch, *of_launcher)]
    files = [word for word in words if word.startswith(SWEEP)]
    if not files and len(arguments) == len(words) + len(of_launch) + len(of_launcher):
        if of_launcher:
            raise ValueError(f"{of_launcher[0]} is not allowed here: it is for a sweep (-m, or sweep=NAME)")
        compose_words(of_launch)  # a misspelt one is found before anything else
        jobs = _single(words)
    else:
        _check_sweep(words)
        jobs = _combinations(words, of_launch)
    seen = tuple(tuple(absolute_word(word, here) for word in job) for job in jobs)
    name = "+".join(word.partition("=")[2] for word in files) or "multirun"
    is_sweep = bool(files) or any(word in _MULTIRUN for word in arguments)
    return Command(seen, tuple(words), (*files, *of_launch), of_launcher, name if is_sweep else None)


def expand(arguments: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a command line."""
    return [list(job) for job in read_command(arguments, Path.cwd()).jobs]


def absolute_word(word: str, here: Path) -> str:
    """Return the override ``word``, a path of a data source made absolute as seen from ``here``."""
    parsed = OverridesParser.create().parse_override(word)
    value = parsed.value()
    if not is_source_path(parsed.key_or_group) or not isinstance(value, str) or not value:
        return word
    return f"{word.partition('=')[0]}={quoted(str(absolute(value, here)))}"


def _single(words: Sequence[str]) -> list[list[str]]:
    """Return the overrides of one run as Hydra reads them."""
    jobs: list[list[str]] = []

    def collect(_: DictConfig) -> None:
        jobs.append(list(HydraConfig.get().overrides.task))

    try:
        with _as_command_line([*words, *_QUIET_HYDRA]):
            hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")(collect)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_better_message(error, words)) from error
    return jobs


def _show(arguments: Sequence[str]) -> None:
    """Let Hydra show what it was asked for."""
    try:
        with _as_command_line(arguments):
            hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")(lambda _: None)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(one_line(error, [word for word in arguments if not word.startswith("-")])) from error


def _combinations(words: Sequence[str], of_launch: Sequence[str]) -> list[list[str]]:
    """Return every combination of the values in ``words``, which win over those of a file of ``conf/sweep/``.

    Where there are command lines in ``launch.jobs``, each of them makes its own combinations with all other values.
    """
    files = [word for word in words if word.startswith(SWEEP)]
    rest = [word for word in words if word not in files]
    jobs: list[list[str]] = []
    _check_files(files)
    try:
        with initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
            tree = compose("config", [*files, *of_launch], return_hydra_config=True)
            params = [f"{key}={value}" for key, value in (tree.hydra.sweeper.params or {}).items()]
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            for line in tree[LAUNCH].jobs or [""]:
                choices: dict[str, list[str]] = {}
                for each in parser.parse_overrides([*params, *shlex.split(line), *rest]):
                    key = each.get_key_element()
                    many = each.is_sweep_override()
                    values = each.sweep_string_iterator() if many else [each.get_value_element_as_str()]
                    choices[key] = [f"{key}={value}" for value in values]
                jobs += [list(job) for job in itertools.product(*choices.values())]
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_better_message(error, [*files, *of_launch])) from error
    return jobs


def _check_options(words: Sequence[str]) -> None:
    """Refuse an option or a way to show the configuration that does not exist, with the nearest that do."""
    for number, word in enumerate(words):
        name = word.split("=")[0]
        if name.startswith("-") and name not in _OPTIONS:
            close = difflib.get_close_matches(name, _OPTIONS, n=3, cutoff=0.4)
            raise ValueError(
                f"unknown option {name!r}; {'nearest known' if close else 'known'}: {', '.join(close or _OPTIONS)}"
            )
        value = word.partition("=")[2] or next(iter(words[number + 1 :]), "")
        if name in ("--cfg", "-c") and value not in ("job", "hydra", "all"):
            raise ValueError(f"--cfg {value} is not allowed: one of job, hydra, all")


def _check_sweep(words: Sequence[str]) -> None:
    for word in words:
        key = _key(word)
        if key in ("resume", "overwrite"):
            raise ValueError(f"{word} is not allowed in a sweep: the same command again does what is left")
        if key.startswith("hydra"):
            instead = "launch.folder=FOLDER" if key.startswith("hydra.sweep") else "hydra/launcher, hydra.launcher.*"
            raise ValueError(f"{word} is not allowed in a sweep; of Hydra's settings only its launcher's: {instead}")


def _check_files(files: Sequence[str]) -> None:
    """Refuse what a sweep file says beside its values and ``launch``: it would reach no job."""
    for word in files:
        file = CONF_DIR / "sweep" / f"{word.removeprefix(SWEEP)}.yaml"
        said = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if file.exists() else {}
        if beside := sorted(set(said) - {"hydra", LAUNCH}):
            place = "put it into hydra.sweeper.params or an experiment"
            raise ValueError(f"{file.name}: {beside[0]} reaches no job; {place}")


def _better_message(error: Exception, words: Sequence[str]) -> str:
    """Return the message of Hydra's ``error`` in one line, with the nearest known names where we can."""
    text = " ".join(str(error).split()).split(" Config search path")[0]
    return text if "Ambiguous value" in text else one_line(error, [word for word in words if word[:1] != "-"])


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _home_in_quotes(word: str) -> str:
    """Return ``word``; a value such as ``~/data``, which Hydra's grammar does not know, in quotes."""
    key, _, value = word.partition("=")
    return f"{key}={quoted(value)}" if value.startswith("~") and "," not in value else word


@contextmanager
def _as_command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Let Hydra see ``arguments`` as those of the program, and raise its errors instead of printing them."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [sys.argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
