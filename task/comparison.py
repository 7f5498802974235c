"""Groups runs that differ by nothing but the seed, and says what tells the groups apart."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from task.result_files import COMPLETED_WITH_LOSSES, Experiment
from task.results import RunResult

# The seed, over which a group averages, and settings that cannot change a result.
_NOT_COMPARED = {"seed", "name", "resume", "overwrite", "data.cache_dir", "federation.state_dir"}
_NOT_COMPARED |= {f"federation.{key}" for key in ("cpus_per_client", "gpus_per_client", "node_timeout", "snapshots")}
_LISTENERS, _STOP_AFTER = "listeners", "federation.stop_after."
_NAMED = ("algorithm", "data", "partition", "model")
_EXPERIMENT = "experiment"


@dataclass(frozen=True)
class Statistic:
    """Mean and sample standard deviation of the ``count`` values that exist."""

    mean: float | None
    std: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Statistic":
        """Take the statistic of the values that exist; one value alone has no standard deviation."""
        known = [value for value in values if value is not None]
        return cls(fmean(known) if known else None, stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True, eq=False)
class Group:
    """Completed runs that differ by nothing but the seed, one a seed, in the order of their seeds.

    ``settings`` holds everything that could make two groups different, as text, by dotted key.
    """

    settings: Mapping[str, str]
    runs: tuple[RunResult, ...]

    @property
    def rule(self) -> str:
        """The inference rule behind the group's accuracies."""
        return self.settings["accuracy_rule"]

    @property
    def experiment(self) -> Experiment | None:
        """The paper's experiment that the runs repeat."""
        return self.runs[0].experiment

    @property
    def paper_accuracy(self) -> tuple[float, float | None] | None:
        """The paper's accuracy of this algorithm: mean and standard deviation in percent; None where it has none."""
        return self.experiment.accuracy.get(self.settings["algorithm"]) if self.experiment else None

    @property
    def paper_communication(self) -> float | None:
        """The paper's millions of parameters a round of this algorithm; None where it has no number."""
        return self.experiment.communication.get(self.settings["algorithm"]) if self.experiment else None

    @property
    def stopped_early(self) -> int:
        """The number of runs that ended before their last round, as their settings want it."""
        return sum(bool(run.summary.get("stopped_early")) for run in self.runs)

    @property
    def losses(self) -> int:
        """The number of runs that completed, but lost replies or clients on the way."""
        return sum(run.status == COMPLETED_WITH_LOSSES for run in self.runs)


def group_runs(runs: Iterable[RunResult]) -> tuple[list[Group], list[RunResult]]:
    """Group completed ``runs`` by every setting except the seed.

    Two runs of one seed are not two samples: the one that started last counts, the others are returned apart.
    """
    by_settings: dict[tuple[tuple[str, str], ...], dict[int | None, RunResult]] = {}
    repeated = []
    for run in sorted(runs, key=lambda run: (run.started, run.folder), reverse=True):
        assert run.is_complete, "only numbers of completed runs may be averaged"
        seeds = by_settings.setdefault(tuple(sorted(settings_of(run).items())), {})
        if run.seed in seeds:
            repeated.append(run)
        else:
            seeds[run.seed] = run
    groups = [
        Group(dict(settings), tuple(sorted(seeds.values(), key=lambda run: (run.seed is None, run.seed or 0))))
        for settings, seeds in by_settings.items()
    ]
    return sorted(groups, key=_natural), repeated


def identities(groups: Sequence[Group]) -> list[dict[str, str]]:
    """Return what tells each group apart: the four names, then every other setting that differs.

    A setting that follows from one of the names (another algorithm has other settings) is left out.
    """
    keys = sorted({key for group in groups for key in group.settings})
    differing = [key for key in keys if key not in _NAMED and _adds_information(key, groups)]
    short = [key.rpartition(".")[2] for key in differing]
    titles = {
        key: name if short.count(name) == 1 and name not in _NAMED else key
        for key, name in zip(differing, short, strict=True)
    }
    return [
        {name: group.settings[name] for name in _NAMED}
        | {titles[key]: group.settings.get(key, "-") for key in differing}
        for group in groups
    ]


def partition_label(partition: Mapping[str, Any]) -> str:
    """Return a partition's scheme and settings in one short text, for instance ``dirichlet alpha=0.1``.

    What is switched off, and what only bounds the search for a division, is left out; any two divisions that differ
    still differ in this text.
    """
    scheme = str(partition.get("_target_") or partition.get("name") or "?").rpartition(".")[2].lower()
    shown = {key: value for key, value in partition.items() if key not in ("_target_", "name", "max_attempts")}
    off = {key for key, value in shown.items() if value is None or value is False or (key, value) == ("pool", "all")}
    return " ".join([scheme, *(f"{key}={_text(value)}" for key, value in shown.items() if key not in off)])


def settings_of(run: RunResult) -> dict[str, str]:
    """Return everything that makes ``run`` comparable with another one, as text, by dotted key."""
    flat = {key: text for key, text in _flat(run.config) if key not in _NOT_COMPARED}
    # A paper's numbers do not tell runs apart, the name of its experiment does.
    flat = {key: text for key, text in flat.items() if key.partition(".")[0] not in (_EXPERIMENT, _LISTENERS)}
    if flat.get(f"{_STOP_AFTER}patience", "null") == "null":  # never: then the rest means nothing
        flat = {key: text for key, text in flat.items() if not key.startswith(_STOP_AFTER)}
    if run.experiment is not None:
        flat[_EXPERIMENT] = run.experiment.name
    flat |= {key: run.label(key) for key in ("algorithm", "data", "model")}
    partition = run.config.get("partition") or run.summary.get("partition")
    flat["partition"] = partition_label(partition) if isinstance(partition, Mapping) else "?"
    # The number of clients that there were, because the setting may leave it to the connected nodes.
    flat["federation.num_clients"] = str(run.summary.get("num_clients") or len(run.clients))
    for key in ("accuracy_rule", "accuracy_model", "accuracy_averaging"):
        flat[key] = str(run.summary.get(key) or "?")
    return flat


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _adds_information(key: str, groups: Sequence[Group]) -> bool:
    """Whether ``key`` differs between groups and does not follow from the name of its own part."""
    # The rule has a column of its own in every table.
    if key == "accuracy_rule" or len({group.settings.get(key) for group in groups}) == 1:
        return False
    part = key.partition(".")[0]
    if part not in _NAMED:
        return True
    pairs = {(group.settings[part], group.settings.get(key)) for group in groups}
    return len(pairs) > len({group.settings[part] for group in groups})


def natural_key(text: str) -> list[tuple[float, str]]:
    """Return a key that sorts numbers within texts by value, 2 before 10."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(float(part), "") if index % 2 else (0.0, part) for index, part in enumerate(parts)]


def _natural(group: Group) -> list[tuple[float, str]]:
    """Sort by data, partition, model, algorithm, then the rest."""
    keys = ["data", "partition", "model", "algorithm", *sorted(group.settings)]
    return natural_key("\0".join(group.settings[key] for key in keys))
