"""Finds the result folders of runs and reads them; everything that shows results starts here.

Nothing here needs torch or matplotlib, so the launcher can use it without a slow start.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from task.result_files import (
    COMPLETED,
    COMPLETED_WITH_LOSSES,
    ClientRow,
    Experiment,
    Prototypes,
    read_clients,
    read_config,
    read_experiment,
    read_json,
    read_prototypes,
    read_rounds,
    read_summary,
)

# Any of these makes a folder a run. ``config.yaml`` does not, because Hydra writes one into ``.hydra``.
_MARKERS = ("run.json", "rounds.jsonl", "summary.json")


@dataclass(frozen=True, eq=False)
class RunResult:
    """Everything that one result folder says.

    ``notes`` holds one line for each thing that was wrong and could be tolerated.
    """

    folder: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    started: str
    rounds: list[dict[str, Any]]
    clients: list[ClientRow]
    prototypes: Prototypes | None
    experiment: Experiment | None = None
    overrides: str = ""
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """The run's own word on how it ended, or ``incomplete``."""
        return str(self.summary["status"])

    @property
    def is_complete(self) -> bool:
        """Whether every round was done or the run stopped early as set, so that its numbers may be averaged."""
        if self.status not in (COMPLETED, COMPLETED_WITH_LOSSES):
            return False
        return bool(self.summary.get("stopped_early")) or self.summary.get("rounds_done") == self.summary.get("rounds")

    @property
    def reason(self) -> str:
        """Why the run is not complete, in one line; empty for a complete one."""
        if self.is_complete:
            return ""
        done = self.summary.get("rounds_done", len(self.rounds))
        planned = self.summary.get("rounds", _at(self.config, "federation", "rounds"))
        rounds = f"{done} of {'?' if planned is None else planned} rounds done"
        given = self.summary.get("reason")
        return f"{' '.join(str(given).split())}; {rounds}" if given else rounds

    @property
    def seed(self) -> int | None:
        """The seed of the run."""
        seed = self.summary.get("seed", self.config.get("seed"))
        return seed if isinstance(seed, int) else None

    def label(self, key: str) -> str:
        """Return the name of the run's ``algorithm``, ``data`` or ``model``; ``?`` where no file says it."""
        name = self.summary.get(key) or _at(self.config, key, "name")
        return str(name) if name else "?"

    def class_names(self, count: int) -> list[str]:
        """Return ``count`` class names; a class without a name is called by its number."""
        names = list(self.summary.get("class_names") or [])[:count]
        return [str(name) for name in names] + [str(index) for index in range(len(names), count)]


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders among ``paths`` and below them, sorted, each once.

    Raises
    ------
    ValueError
        If a path is no folder, cannot be listed or holds no run.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        runs = list(_runs_below(path))
        if not runs:
            raise ValueError(f"{path}: no run in this folder or below it (no {' or '.join(_MARKERS)})")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return sorted(found.values())


def read_run(folder: Path) -> RunResult:
    """Read one result folder.

    A run that did not complete may lack any piece and is still returned, with its status; a truncated
    last line of ``rounds.jsonl`` is left out and noted.

    Raises
    ------
    ValueError
        If a piece of a completed run is missing, or a piece of any run is corrupt; names the file.
    """
    summary = read_summary(folder / "summary.json")
    required = summary["status"] in (COMPLETED, COMPLETED_WITH_LOSSES)
    rounds, notes = read_rounds(folder / "rounds.jsonl", required=required)
    config = read_config(folder / "config.yaml", required=required)
    experiment = None
    try:
        experiment = read_experiment(config, folder / "config.yaml")
    except ValueError as error:  # it holds a paper's numbers, none of the run
        notes.append(str(error))
    run_file = folder / "run.json"
    facts = read_json(run_file) if run_file.exists() else {}
    return RunResult(
        folder=folder,
        summary=summary,
        config=config,
        started=str(facts.get("started") or ""),
        overrides=str(facts.get("overrides") or ""),
        rounds=rounds,
        clients=read_clients(folder / "clients.csv", required=required),
        prototypes=read_prototypes(folder / "prototypes.npz"),
        experiment=experiment,
        notes=tuple(notes),
    )


def _runs_below(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        raise ValueError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}")

    def refuse(error: OSError) -> None:
        raise ValueError(f"{error.filename}: cannot be listed: {error.strerror}") from error

    for folder, subfolders, files in os.walk(path, onerror=refuse):
        if any(marker in files for marker in _MARKERS):
            subfolders.clear()
            yield Path(folder)


def _at(mapping: Mapping[str, Any], *keys: str) -> Any:
    """Follow ``keys`` into nested mappings; None where the way ends early."""
    value: Any = mapping
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
