"""A sweep's folder: which jobs it has, how each stands, and what was frozen when it began.

A job is known by its resolved configuration, not by its place in a list or by the words that were typed. So the same
command finds what is done already, and a file of ``conf/`` that was edited makes a new job beside the old one.
How a job stands is read from its own results folder; no list of it could be wrong after a crash.
"""

import dataclasses
import datetime
import hashlib
import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]
from omegaconf import OmegaConf

from task.command_line import Command
from task.config import to_config, to_yaml
from task.folder_lock import LAUNCHER, alone_in, is_in_use
from task.jobs import INTERRUPTED, NOT_STARTED, RUNNING, Job, quoted
from task.result_files import COMPLETED, COMPLETED_WITH_LOSSES, FAILED, INCOMPLETE, read_json, read_summary
from task.superlink import PARTS, PROJECT_DIR, stage

MANIFEST = "sweep.json"
FROZEN = ".frozen"
STOP = "stop"
"""In the frozen part: no more jobs are to be started."""
CHECKPOINT = "checkpoint"
DONE = (COMPLETED, COMPLETED_WITH_LOSSES)


@dataclass(frozen=True)
class Entry:
    """A job of a sweep: ``key`` stands for its configuration, ``folder`` holds its results."""

    job: Job
    key: str
    folder: Path

    def state(self) -> tuple[str, str | None]:
        """Return how the job stands, and why if it did not complete."""
        return state_of(self.folder)

    def next_job(self) -> Job:
        """Return the job as it is to be run now: a killed one goes on from its checkpoint, a failed one anew."""
        goes_on = self.state()[0] == INTERRUPTED and self.job.config.federation.state == "disk"
        if goes_on and (self.folder / CHECKPOINT).is_dir():
            return dataclasses.replace(self.job, overrides=(*self.job.overrides, f"resume={quoted(str(self.folder))}"))
        if self.folder.is_dir():
            return dataclasses.replace(self.job, overrides=(*self.job.overrides, "overwrite=true"))
        return self.job


class Sweep:
    """The jobs of one command in the sweep's ``folder``, each configuration once."""

    def __init__(self, folder: Path, jobs: Sequence[Job]) -> None:
        self.folder = folder
        by_key: dict[str, Entry] = {}
        for job in jobs:
            key = identity(job)
            name = f"{job.config.label}-seed{job.config.seed}-{key}"
            by_key.setdefault(key, Entry(job, key, folder / name))
        self.entries = tuple(by_key.values())
        self.repeated = len(jobs) - len(self.entries)

    @property
    def project(self) -> Path:
        """The frozen copy of the project that all jobs run."""
        return self.folder / FROZEN / "project"

    @contextmanager
    def begun(self, command: Command, code: str) -> Iterator[None]:
        """Hold the sweep, with its manifest written and all that its jobs need frozen.

        Raises
        ------
        FolderInUseError
            Another command works on the sweep.
        ValueError
            The project is not as it was (``code``, from ``digest``) when the jobs were resolved.
        """
        with alone_in(self.folder, LAUNCHER):
            shutil.rmtree(self.folder / FROZEN, ignore_errors=True)
            stage(self.project)
            if digest(self.project) != code:
                raise ValueError("a file of the project was edited while the jobs were resolved: try again")
            for entry in self.entries:
                _write(self._frozen(entry.key), to_yaml(entry.job.config))
            self._write_manifest(command, code)
            try:
                yield
            finally:
                shutil.rmtree(self.folder / FROZEN, ignore_errors=True)

    def other_code(self, code: str) -> int:
        """Return how many finished jobs were begun by other code than the one with this digest."""
        before = _jobs_of(self.folder)
        done = [entry for entry in self.entries if entry.state()[0] in DONE]
        return sum(before.get(entry.key, {}).get("code", code) != code for entry in done)

    def _frozen(self, key: str) -> Path:
        return self.folder / FROZEN / "jobs" / f"{key}.yaml"

    def _write_manifest(self, command: Command, code: str) -> None:
        before = _jobs_of(self.folder)
        jobs = {}
        for entry in self.entries:
            facts = {"folder": entry.folder.name, "typed": entry.job.typed, "overrides": entry.job.overrides}
            finished = entry.state()[0] in DONE
            known = before.get(entry.key, {}).get("code", code) if finished else code
            jobs[entry.key] = facts | {"clients": entry.job.num_clients, "code": known}
        words = [*command.words, *command.launch_words, *command.launcher_words]
        text = {
            "command": shlex.join(dict.fromkeys(words)),
            "begun": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "jobs": jobs,
            "earlier": {key: value for key, value in before.items() if key not in jobs},
        }
        _write(self.folder / MANIFEST, json.dumps(text, indent=2) + "\n")


def frozen_entry(folder: Path, key: str) -> Entry:
    """Return a job of the sweep in ``folder`` as it was frozen, whatever ``conf/`` says now."""
    facts = _jobs_of(folder)[key]
    text = (folder / FROZEN / "jobs" / f"{key}.yaml").read_text("utf-8")
    config = to_config(OmegaConf.create(dict(yaml.safe_load(text))))
    job = Job(tuple(facts["typed"]), tuple(facts["overrides"]), config, int(facts["clients"]))
    return Entry(job, key, folder / facts["folder"])


def sweep_folder(command: Command, here: Path) -> Path:
    """Return the folder of the sweep that ``command`` asks for: the same for the same command in the same place."""
    folder = command.settings().folder
    if folder is not None:
        return here / Path(folder).expanduser()
    number = hashlib.sha256(shlex.join(command.words + _that_make_jobs(command)).encode()).hexdigest()[:8]
    name = "".join(c if c.isalnum() or c in "-_+" else "-" for c in str(command.sweep))
    return here / "outputs" / f"sweep-{name}-{number}"


def _that_make_jobs(command: Command) -> tuple[str, ...]:
    return tuple(
        word for word in command.launch_words if word.lstrip("+").startswith(("launch.jobs", "launch.clients"))
    )


def identity(job: Job) -> str:
    """Return the name of what ``job`` computes: a digest of its resolved configuration.

    What others report about an experiment, and what a command says about its folder, is no part of it.
    """
    tree = dataclasses.asdict(job.config)
    del tree["resume"], tree["overwrite"]
    tree["experiment"] = job.config.experiment.name if job.config.experiment else None
    tree["federation"]["num_clients"] = job.num_clients
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:10]


def state_of(folder: Path) -> tuple[str, str | None]:
    """Return how the job in a results folder stands, and why if it did not complete."""
    if not folder.is_dir():
        return NOT_STARTED, None
    if is_in_use(folder, LAUNCHER):
        return RUNNING, None
    try:
        summary = read_summary(folder / "summary.json")
    except ValueError as error:
        return FAILED, str(error)
    status, reason = summary["status"], summary.get("reason")
    if status == INCOMPLETE:
        return INTERRUPTED, "killed"
    return (INTERRUPTED, None) if status == FAILED and reason == INTERRUPTED else (status, reason)


def digest(project: Path) -> str:
    """Return a digest of all files of the project that decide what a job computes."""
    total = hashlib.sha256()
    files = (path for part in PARTS for path in (project / part).rglob("*") if path.suffix in (".py", ".yaml", ".json"))
    for path in sorted(files):
        total.update(path.relative_to(project).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def code_digest() -> str:
    """Return the digest of the project as it is now."""
    return digest(PROJECT_DIR)


def status_table(folder: Path) -> tuple[list[str], list[str]]:
    """Return the lines of the table of a sweep that was begun in ``folder``, and the states behind them.

    Raises
    ------
    ValueError
        One line: there is no sweep in the folder.
    """
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder} holds no sweep (no {MANIFEST})")
    jobs = _jobs_of(folder)
    rows = [(state_of(folder / facts["folder"]), facts["typed"], facts["folder"]) for facts in jobs.values()]
    return _table([(status, reason, typed, place) for (status, reason), typed, place in rows])


def entry_table(entries: Sequence[Entry]) -> tuple[list[str], list[str]]:
    """Return the lines of the table of ``entries``, and the states behind them."""
    rows = [(*entry.state(), entry.job.typed, entry.folder.name) for entry in entries]
    return _table(rows)


def differing(typed: Sequence[Sequence[str]]) -> list[str]:
    """Return the words of each job without those that all jobs have; all words of a single job."""
    common = set.intersection(*map(set, typed)) if len(typed) > 1 else set()
    return [" ".join(word for word in words if word not in common) for words in typed]


def newest_sweep(here: Path) -> Path:
    """Return the folder of the sweep below ``here/outputs`` that was begun last; ``ValueError`` if there is none."""
    found = sorted((here / "outputs").glob(f"*/{MANIFEST}"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise ValueError(f"no sweep in {here / 'outputs'}: name its folder, --status=FOLDER")
    return found[-1].parent


def counted(states: Sequence[str]) -> str:
    """Return the states in words: how many there are of each."""
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))


def _table(rows: Sequence[tuple[str, str | None, Sequence[str], str]]) -> tuple[list[str], list[str]]:
    width = max((len(row[0]) for row in rows), default=0)
    words = differing([row[2] for row in rows])
    lines = []
    for number, ((status, reason, _, place), typed) in enumerate(zip(rows, words, strict=True), 1):
        why = f" ({' '.join(reason.split())})" if reason and status not in DONE else ""
        lines.append(f"{number:3}  {status:<{width}}  {typed}  {place}{why}")
    states = [row[0] for row in rows]
    return [*lines, f"{len(states)} jobs: {counted(states)}"], states


def _jobs_of(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.exists():
        return {}
    found = read_json(file).get("jobs")
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: remove it, and the same command makes it again")
    return found


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.new")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)
