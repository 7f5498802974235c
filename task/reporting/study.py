"""Sorts the runs of a report into a grid of methods and settings, and says what is missing from it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from task.comparison import Group, natural_key, settings_of
from task.result_files import FAILED
from task.results import RunResult

_PARTS = ("algorithm", "data", "partition", "labels", "model")
_BARE = {"algorithm", "data", "partition", "labels.name", "model", "experiment"}
_SHORT = {"labels.name": "labels", "labels.count": "labelled", "federation.num_clients": "clients"}
Settings = Mapping[str, str]


@dataclass(frozen=True)
class Design:
    """The keys by which runs differ: those of their methods, and those of the settings under which methods compete.

    The name of a method is followed by those of its own settings in which runs of that name differ. A learning rate
    and the like that belong to one method alone are no setting of the comparison.
    """

    method_keys: tuple[str, ...]
    setting_keys: tuple[str, ...]

    @classmethod
    def of(cls, every: Sequence[Settings]) -> "Design":
        """Find the fewest keys that tell apart all settings in ``every``."""
        differing = sorted({key for each in every for key in each if len({other.get(key) for other in every}) > 1})
        differing = [key for key in differing if not key.startswith("accuracy_") and _differs_within(key, every)]
        parts = [_name_key(part) for part in _PARTS[1:] if len({name_of(part, each) for each in every}) > 1]
        methods = ("algorithm", *(key for key in differing if key.startswith("algorithm.")))
        rest = [key for key in differing if key not in _PARTS and not key.startswith("algorithm.")]
        rest = [key for key in rest if not (key.startswith("train.") and _follows(key, "algorithm", every))]
        kept: list[str] = []
        for key in sorted({*parts, *rest}, key=_order):
            # One that splits no further only repeats in other words what the others say.
            if _distinct([*kept, key], every) > _distinct(kept, every):
                kept.append(key)
        for key in sorted({key for each in every for key in each}):  # two cells must never look like one
            if _distinct([*methods, *kept, key], every) > _distinct([*methods, *kept], every):
                kept.append(key)
        return cls(methods, tuple(kept))

    def method(self, settings: Settings) -> str:
        """Return the short name of a run's method."""
        return self.label(self.method_keys, settings)

    def setting(self, settings: Settings) -> str:
        """Return the short name of a run's setting; empty where all have the same."""
        return self.label(self.setting_keys, settings)

    def label(self, keys: Iterable[str], settings: Settings) -> str:
        """Return the values of ``keys`` in a few words."""
        return " ".join(
            value_of(key, settings) if key in _BARE else f"{self.short(key)}={settings[key]}"
            for key in keys
            if key in settings or key in _BARE
        )

    def short(self, key: str) -> str:
        """Return the last word of ``key``, or all of it where two keys end alike."""
        if key in _SHORT:
            return _SHORT[key]
        last = key.rpartition(".")[2]
        every = (*self.method_keys, *self.setting_keys)
        return last if sum(other.rpartition(".")[2] == last for other in every) == 1 else key


@dataclass(frozen=True)
class Cell:
    """One method under one setting: its completed runs, those that are not, and the seeds that nobody ran."""

    group: Group | None
    incomplete: tuple[RunResult, ...]
    missing: tuple[int, ...]

    @property
    def notes(self) -> list[str]:
        """What is not as it should be, in a few words each."""
        failed = sorted(str(run.seed) for run in self.incomplete if run.status == FAILED)
        ongoing = sorted(str(run.seed) for run in self.incomplete if run.status != FAILED)
        words = {"failed": failed, "unfinished": ongoing, "missing": [str(seed) for seed in self.missing]}
        return [f"seed {', '.join(seeds)} {word}" for word, seeds in words.items() if seeds]


class Study:
    """All runs of a report.

    Parameters
    ----------
    groups : sequence of Group
        The completed runs, grouped by settings.
    incomplete : sequence of RunResult
        The others. One without a readable configuration stands in no cell, but in ``unplaced``.
    """

    def __init__(self, groups: Sequence[Group], incomplete: Sequence[RunResult] = ()) -> None:
        self.groups, self.unplaced = list(groups), [run for run in incomplete if not run.config]
        placed = [(run, _settings_of_unfinished(run, groups)) for run in incomplete if run.config]
        self.every = [group.settings for group in groups] + [settings for _, settings in placed]
        self.design = Design.of(self.every)
        places = {self._place(settings): None for settings in self.every}
        self.methods = sorted({method for method, _ in places}, key=natural_key)
        self.settings = sorted({setting for _, setting in places}, key=natural_key)
        self._groups: dict[tuple[str, str], Group] = {}
        for group in groups:
            place = self._place(group.settings)
            assert place not in self._groups, f"two groups in the cell {place}"
            self._groups[place] = group
        self._incomplete: dict[tuple[str, str], list[RunResult]] = {}
        self._places = {run.folder: self._place(group.settings) for group in groups for run in group.runs}
        for run, settings in placed:
            self._places[run.folder] = self._place(settings)
            self._incomplete.setdefault(self._place(settings), []).append(run)

    def _place(self, settings: Settings) -> tuple[str, str]:
        return self.design.method(settings), self.design.setting(settings)

    @cached_property
    def seeds(self) -> list[int]:
        """All seeds that any run has, completed or not."""
        runs = [run for group in self.groups for run in group.runs]
        runs += [run for several in self._incomplete.values() for run in several]
        return sorted({run.seed for run in runs if run.seed is not None})

    def group(self, method: str, setting: str) -> Group | None:
        """Return the completed runs of a cell."""
        return self._groups.get((method, setting))

    def cell(self, method: str, setting: str) -> Cell:
        """Return what there is and what there is not of one method under one setting."""
        group = self.group(method, setting)
        done = {run.seed for run in group.runs} if group else set()
        # A seed that failed and was run again is no failure any more.
        others = [run for run in self._incomplete.get((method, setting), []) if run.seed not in done]
        known = done | {run.seed for run in others}
        return Cell(group, tuple(others), tuple(seed for seed in self.seeds if seed not in known))

    def place(self, group: Group) -> tuple[str, str]:
        """Return method and setting of ``group``."""
        return self._place(group.settings)

    def place_of(self, run: RunResult) -> tuple[str, str]:
        """Return method and setting of any run; only its method where it has no cell, as one that was run again."""
        return self._places.get(run.folder, (run.label("algorithm"), ""))

    def label(self, group: Group) -> str:
        """Return method and setting in a few words, for the title of a figure."""
        return ", ".join(word for word in self.place(group) if word)

    @property
    def is_full(self) -> bool:
        """Whether every method has every seed under every setting."""
        cells = [self.cell(method, setting) for method in self.methods for setting in self.settings]
        return not self.unplaced and all(cell.group and not cell.notes for cell in cells)

    def index(self, method: str) -> int:
        """Return the number of a method, which gives its colour in every figure."""
        return self.methods.index(method)


def name_of(part: str, settings: Settings) -> str:
    """Return the name of a part of the settings; that of a partition is its scheme."""
    name = settings.get(_name_key(part), "-")
    return name.split(" ")[0] if part == "partition" else name


def value_of(key: str, settings: Settings) -> str:
    """Return the value of a key of a ``Design``."""
    return name_of(key, settings) if key in _PARTS else settings.get(key, "-")


def _name_key(part: str) -> str:
    return "labels.name" if part == "labels" else part


def _differs_within(key: str, every: Sequence[Settings]) -> bool:
    """Whether ``key`` says more than the name of its own part."""
    part = key.partition(".")[0]
    if part not in _PARTS:
        return True
    return len({(name_of(part, each), each.get(key)) for each in every}) > len({name_of(part, each) for each in every})


def _follows(key: str, other: str, every: Sequence[Settings]) -> bool:
    return len({(each.get(other), each.get(key)) for each in every}) == len({each.get(other) for each in every})


def _distinct(keys: Sequence[str], every: Sequence[Settings]) -> int:
    return len({tuple(value_of(key, each) for key in keys) for each in every})


def _order(key: str) -> tuple[int, bool, str]:
    part = key.partition(".")[0]
    place = len(_PARTS) + (key == "experiment") if part not in _PARTS else _PARTS.index(part)
    return place, key != _name_key(part), key


def _settings_of_unfinished(run: RunResult, groups: Sequence[Group]) -> dict[str, str]:
    """Return the settings of a run that may have ended before it said how many clients there are, and the like."""
    settings = settings_of(run)
    alike = [group.settings for group in groups if group.settings["algorithm"] == settings["algorithm"]]
    unknown = [key for key in settings if key.startswith("accuracy_") and settings[key] == "?"]
    key = "federation.num_clients"
    if not (run.summary.get("num_clients") or run.clients):
        planned = (run.config.get("federation") or {}).get("num_clients")
        settings[key] = str(planned or "?")
        unknown += [] if planned else [key]
    for key in unknown:
        values = {other.get(key, "?") for other in alike or [group.settings for group in groups]}
        if len(values) == 1:
            settings[key] = values.pop()
    return settings
