"""What one ``protofed`` command is asked to do: jobs, checked and complete before anything starts.

A job is a list of Hydra overrides with every path made absolute, because the code of a run works in another
folder than the one where the command was typed.
"""

import dataclasses
import datetime
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from task.composition import load_launch
from task.config import build, load
from task.launch_settings import LaunchConfig
from task.paths import declared_paths
from task.privacy import require_accountant
from task.result_files import FAILED, read_json
from task.schema import Config

# How a job stands, beside what a summary can say.
INTERRUPTED = "interrupted"
NOT_STARTED = "not started"
RUNNING = "running"

# What an earlier command said about its own folder, and nothing about the science.
_ONE_RUN_ONLY = re.compile(r"(resume|overwrite)=")
# Settings of a data source are paths by name, since a source is free to have any settings.
_SOURCE_PATH = re.compile(r"data\.source\.(.*_)?(path|file|folder|dir|root)")


@dataclass(frozen=True)
class Job:
    """One run to do: ``typed`` is what the user wrote, ``overrides`` what the run gets.

    ``default_clients`` are simulated where ``federation.num_clients`` is null.
    """

    typed: tuple[str, ...]
    overrides: tuple[str, ...]
    config: Config
    default_clients: int = LaunchConfig.clients

    @property
    def title(self) -> str:
        """The job in a few words."""
        return f"{self.config.label} seed {self.config.seed}"

    @property
    def num_clients(self) -> int:
        """The number of simulated clients."""
        return self.config.federation.num_clients or self.default_clients

    def ray_cores(self, cores: int) -> int:
        """Return how many of this many CPU ``cores`` Ray needs: Flower starts a worker for every share of them."""
        return min(cores, self.num_clients * self.config.federation.cpus_per_client)

    def federation_config(self, cores: int | None, jobs_per_gpu: int = 1) -> str:
        """Return the value of Flower's ``--federation-config``.

        With ``cores`` CPU cores for a Ray that Flower starts; None where it joins one. Of ``jobs_per_gpu`` jobs side by
        side each thinks that the GPU is its own, so its clients must say that they take more of it.
        """
        federation = self.config.federation
        values: dict[str, int | float] = {
            "num-supernodes": self.num_clients,
            "client-resources-num-cpus": federation.cpus_per_client,
            "client-resources-num-gpus": float(federation.gpus_per_client) * jobs_per_gpu,
        }
        if cores is not None:
            values["init-args-num-cpus"] = self.ray_cores(cores)
        return " ".join(f"{key}={value}" for key, value in values.items())


def plan(typed: Iterable[str], here: Path, cores: int | None, of_command: Sequence[str] = ()) -> Job:
    """Check the overrides ``typed`` in the folder ``here`` and make a job of them.

    With ``resume=FOLDER`` the overrides of the run in that folder come first. ``of_command`` are those of ``launch``.
    The number of CPU ``cores`` here is None where a run goes to other machines.

    Raises
    ------
    ValueError
        One line for a configuration that is not allowed, or that this machine cannot run.
    """
    typed = tuple(typed)
    words = typed
    resumed = [word for word in typed if word.startswith("resume=")]
    if resumed:
        folder = load(resumed).resume
        words = (*_earlier_overrides(absolute(folder, here)), *typed) if folder else typed
    config = load(words)
    changes = tuple(f"{key}={quoted(path)}" for key, path in absolute_paths(config, here))
    if changes:
        words = (*words, *changes)
        config = load(words)
    require_accountant(config.privacy)
    _check_machine(config, cores)
    for name, node in config.listeners.items():  # a missing extra is refused here and not after Ray has started
        build(node, f"listeners.{name}")
    if config.federation.num_clients is not None:
        return Job(typed, words, config)
    clients = load_launch([*words, *of_command]).clients
    # What must fit the number of clients is checked where that is a setting; here it is known, too.
    dataclasses.replace(config, federation=dataclasses.replace(config.federation, num_clients=clients))
    return Job(typed, words, config, clients)


def absolute_paths(config: Config, here: Path) -> Iterator[tuple[str, str]]:
    """Yield key and absolute path of every setting that the schema calls a path and that is not absolute."""
    for key, value in declared_paths(config):
        path = absolute(value, here)
        if str(path) != value:
            yield key, str(path)


def is_source_path(key: str) -> bool:
    """Tell whether the setting ``key`` is a path of a data source; sources refuse a relative one."""
    return _SOURCE_PATH.fullmatch(key) is not None


def absolute(path: str, here: Path) -> Path:
    """Return ``path`` with ``~`` resolved, and seen from the folder ``here`` unless it is absolute."""
    return Path(os.path.normpath(here / Path(path).expanduser()))


def quoted(text: str) -> str:
    """Return ``text`` as a quoted string of Hydra's override language."""
    # A backslash is itself there, except in a row of them before a quote.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"


def create_folder(job: Job, here: Path) -> Path:
    """Create the new results folder of ``job`` below ``here``; for a resumed run return its own folder.

    Raises
    ------
    OSError
        If the folder cannot be created, or written to.
    """
    resumed = job.config.resume
    folder = _new_folder(here / "outputs", job) if resumed is None else Path(resumed)
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"0")
    return folder


def cpu_cores() -> int:
    """Return how many CPU cores this process may use, by its affinity and its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such limit, or "max"
        pass
    return cores


def write_failure(folder: Path, job: Job, reason: str, rounds_done: int) -> None:
    """Say in ``summary.json`` that the run failed; for a run that could not say so itself."""
    config, file = job.config, folder / "summary.json"
    try:
        known = read_json(file) if file.exists() else {}
    except ValueError:  # a run that wrote nonsense failed as well
        known = {}
    facts = {
        "algorithm": config.algorithm.name,
        "data": config.data.name,
        "model": config.model.name,
        "seed": config.seed,
        "rounds": config.federation.rounds,
        "rounds_done": rounds_done,
    }
    summary = {"status": FAILED, "reason": reason} | facts | known | {"status": FAILED, "reason": reason}
    unfinished = folder / ".summary.json.launcher"
    unfinished.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(file)


def _new_folder(parent: Path, job: Job) -> Path:
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    stem = f"{now}-{job.config.label}-seed{job.config.seed}"
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:  # another command, in the same second
            number += 1
        else:
            return folder


def _earlier_overrides(folder: Path) -> tuple[str, ...]:
    overrides = read_json(folder / "run.json").get("overrides") if (folder / "run.json").exists() else None
    if not isinstance(overrides, str):
        raise ValueError(f"resume={str(folder)!r} is not allowed: a results folder with a run.json")
    return tuple(word for word in shlex.split(overrides) if not _ONE_RUN_ONLY.match(word))


def _check_machine(config: Config, cores: int | None) -> None:
    federation = config.federation
    if cores is not None and federation.cpus_per_client > cores:
        asked = f"federation.cpus_per_client={federation.cpus_per_client}"
        raise ValueError(f"{asked} is not allowed: at most {cores}, the CPU cores here")
    if config.train.device == "cuda" and federation.gpus_per_client == 0:
        raise ValueError(
            "federation.gpus_per_client=0.0 is not allowed with train.device=cuda: above 0, "
            "for instance 0.25 for four clients on a GPU"
        )
