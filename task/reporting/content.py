"""The tables of the page: rows of cells that can be sorted, each table also as Markdown, CSV and LaTeX."""

import base64
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from task import communication, tables
from task.comparison import Group, Statistic, identities, natural_key
from task.reporting.differences import Baseline, Difference
from task.reporting.study import Cell, Study, value_of
from task.reporting.text import as_csv, as_latex, as_markdown
from task.results import RunResult

_UNITS = {"": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_NUMBER = re.compile(r"([+-]?[\d,]*\.?\d+)(?: ?(B|kB|MB|GB)$| ?%?$| [±[(].*)")
_EMPTY = ("", "-")


@dataclass(frozen=True)
class Entry:
    """A cell of a table: its text, what it is sorted by (None: last), remarks below it, and its kind for the looks."""

    text: str
    sort: float | str | None
    remarks: tuple[str, ...] = ()
    kind: str = ""

    @classmethod
    def of(cls, text: str, remarks: Sequence[str] = (), kind: str = "") -> "Entry":
        """Make an entry that is sorted by the number with which ``text`` begins, or else by its letters."""
        return cls(text, sort_value(text), tuple(remarks), kind)


@dataclass(frozen=True)
class Table:
    """A table of the page; ``downloads`` are labels, file names and data URIs of the same in other formats."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    downloads: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each column holds numbers."""
        columns = zip(*self.rows, strict=True) if self.rows else [() for _ in self.columns]
        return tuple(
            any(isinstance(entry.sort, float) for entry in column)
            and not any(isinstance(entry.sort, str) for entry in column)
            for column in columns
        )


def sort_value(text: str) -> float | str | None:
    """Return the number with which ``text`` begins, bytes in their unit; else the text; None where it says nothing."""
    if text in _EMPTY:
        return None
    found = _NUMBER.fullmatch(text)
    return float(found[1].replace(",", "")) * _UNITS[found[2] or ""] if found else text.lower()


def grid_rows(study: Study) -> list[dict[str, str]]:
    """Return the last accuracies as text: a row a method, a column a setting, with what is missing."""
    return [
        {"method": method} | {_column(setting): _in_words(study.cell(method, setting)) for setting in study.settings}
        for method in study.methods
    ]


def grid_table(study: Study) -> Table:
    """Return the last accuracies as a table, the best of each setting marked."""
    best = {setting: _best(study, setting) for setting in study.settings}
    seeds = f"{len(study.seeds)} seeds in every cell." if study.is_full else ""
    rows = []
    for method in study.methods:
        row = [Entry.of(method, kind="name")]
        for setting in study.settings:
            cell = study.cell(method, setting)
            kind = "missing" if cell.group is None else "best" if best[setting] is cell.group else ""
            count = [f"n={len(cell.group.runs)}"] if cell.group and not seeds else []
            remarks = [*count, *cell.notes] if cell.group or cell.incomplete else []
            row.append(Entry.of(_accuracy(cell), remarks, f"{kind} partial".strip() if cell.notes else kind))
        rows.append(tuple(row))
    columns = ("method", *map(_column, study.settings))
    note = "Last accuracy in percent: mean ± sample standard deviation over n seeds. Bold: the highest of a column."
    note = f"{note} {seeds}".strip()
    downloads = _downloads("accuracy", grid_rows(study))
    return Table("accuracy", "Accuracy by method and setting", columns, tuple(rows), downloads, (note,))


def numbers_table(study: Study, baseline: Baseline | None) -> Table:
    """Return everything that the comparison counts, a row a method and setting."""
    rows, exact = (make(study.groups, baseline) for make in (tables.readable_rows, tables.exact_rows))
    remarks = list(tables.remarks(study.groups, baseline))
    return from_rows("numbers", "All numbers", _by_place(study, rows), exact, remarks)


def differences_table(study: Study, baseline: Baseline) -> Table:
    """Return how far each method is above the baseline, a column a setting and one over all of them."""
    texts, rows = [], []
    for method in study.methods:
        if method == baseline.method:
            continue
        groups = [study.group(method, setting) for setting in study.settings]
        found = [baseline.over(group) if group else None for group in groups]
        if len(groups) > 1:
            found.append(baseline.over_all(method))
        row = (Entry.of(method, kind="name"), *map(_difference, found))
        rows.append(row)
        texts.append(tuple(f"{e.text} {' '.join(e.remarks)}".strip() for e in row))
    columns = ("method", *map(_column, study.settings), *(["all settings"] if len(study.settings) > 1 else []))
    plain = [dict(zip(columns, each, strict=True)) for each in texts]
    title = f"Points above {baseline.method}"
    note = (
        f"Last accuracy minus that of {baseline.method}, paired by seed under the same setting, with the 95 % "
        "confidence interval (Student's t). ▲ and ▼: the interval leaves out zero."
    )
    return Table("differences", title, columns, tuple(rows), _downloads("differences", plain), (note,))


def communication_table(study: Study) -> Table:
    """Return what was sent in a round."""
    rows, exact = communication.readable_rows(study.groups), communication.exact_rows(study.groups)
    remarks = list(communication.remarks(study.groups))
    return from_rows("communication", "Sent in a round", _by_place(study, rows), exact, remarks)


def runs_table(study: Study, runs: Sequence[RunResult]) -> Table:
    """Return every run, also those that did not complete, with the command that made it."""
    parent = Path(os.path.commonpath([run.folder.resolve() for run in runs])) if runs else Path()
    rows = []
    for run in runs:
        method, setting = study.place_of(run)
        summary = run.summary
        accuracy = summary.get("last_accuracy")
        seconds = summary.get("seconds")
        rows.append(
            {
                "run": str(run.folder.resolve().relative_to(parent)) if len(runs) > 1 else run.folder.resolve().name,
                "status": run.status + (", stopped early" if summary.get("stopped_early") else ""),
                "method": method,
                "setting": setting,
                "seed": "-" if run.seed is None else str(run.seed),
                "last accuracy (%)": "-" if accuracy is None else f"{100 * accuracy:.2f}",
                "rounds": str(summary.get("rounds_done", len(run.rounds))),
                "seconds": f"{seconds:.1f}" if isinstance(seconds, int | float) else "-",
                "overrides": run.overrides,
            }
        )
    if not any(row["setting"] for row in rows):
        rows = [{key: text for key, text in row.items() if key != "setting"} for row in rows]
    return from_rows("runs", "Runs", rows, rows, ["protofed followed by the overrides repeats a run."])


def settings_tables(study: Study) -> tuple[Table, Table]:
    """Return the settings that tell the runs apart with their values, and those that differ in consequence."""
    every = study.every
    keys = sorted({key for each in every for key in each if len({other.get(key) for other in every}) > 1})
    first = [key for key in (*study.design.method_keys, *study.design.setting_keys) if key in keys]
    names = {"algorithm.name", "data.name", "model.name", "partition._target_", "partition"}
    rest = [key for key in keys if key not in first and key not in names]
    rows, others = ([{"setting": key, "values": _values(key, every)} for key in some] for some in (first, rest))
    return (
        from_rows("settings", "Settings that differ", rows, rows, []),
        from_rows("consequences", "What differs because the above does", others, others, []),
    )


def common_settings(study: Study) -> list[str]:
    """Return the settings that all runs share, as ``key=value``."""
    every = study.every
    first = every[0] if every else {}
    return [f"{key}={text}" for key, text in sorted(first.items()) if all(each.get(key) == text for each in every)]


def versions(runs: Sequence[RunResult]) -> list[tuple[str, str]]:
    """Return the versions with which the runs were made, by package."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        known = run.summary.get("versions")
        for package, version in (known if isinstance(known, Mapping) else {}).items():
            found.setdefault(str(package), {})[str(version)] = None
    return [(package, ", ".join(several)) for package, several in found.items()]


def gaps(study: Study) -> Iterator[str]:
    """Say which cells of the grid are not full, a line each."""
    for method in study.methods:
        for setting in study.settings:
            cell = study.cell(method, setting)
            where = f"{method}, {setting}" if setting else method
            if cell.group is None and not cell.incomplete:
                yield f"{where}: no run"
            elif cell.notes:
                yield f"{where}: {'; '.join(cell.notes)}"


def from_rows(
    name: str, title: str, rows: Sequence[Mapping[str, str]], exact: Sequence[Mapping[str, str]], notes: Sequence[str]
) -> Table:
    """Return ``rows`` with equal keys as a table; the CSV holds the ``exact`` ones."""
    columns = tuple(rows[0]) if rows else ()
    entries = tuple(tuple(Entry.of(text) for text in row.values()) for row in rows)
    return Table(name, title, columns, entries, _downloads(name, rows, exact), tuple(notes))


def _downloads(
    name: str, rows: Sequence[Mapping[str, str]], exact: Sequence[Mapping[str, str]] | None = None
) -> tuple[tuple[str, str, str], ...]:
    forms = (
        ("Markdown", "md", as_markdown(rows)),
        ("CSV", "csv", as_csv(rows if exact is None else exact)),
        ("LaTeX", "tex", as_latex(rows)),
    )
    return tuple(
        (label, f"{name}.{ending}", f"data:text/plain;base64,{base64.b64encode(text.encode()).decode()}")
        for label, ending, text in forms
    )


def _column(setting: str) -> str:
    return setting or "last accuracy (%)"


def _accuracy(cell: Cell) -> str:
    if cell.group is None:
        return "failed" if cell.incomplete and "failed" in cell.notes[0] else "-" if cell.incomplete else "no run"
    values = Statistic.of(run.summary.get("last_accuracy") for run in cell.group.runs)
    return tables.mean_and_std(values, len(cell.group.runs)).removesuffix(" ± -")


def _in_words(cell: Cell) -> str:
    text = _accuracy(cell)
    remarks = ([f"n={len(cell.group.runs)}"] if cell.group else []) + (
        cell.notes if cell.group or cell.incomplete else []
    )
    return f"{text} ({'; '.join(remarks)})" if remarks else text


def _best(study: Study, setting: str) -> Group | None:
    """Return the group with the highest mean under ``setting``, where at least two compete."""
    groups = [group for method in study.methods if (group := study.group(method, setting))]
    means = [(Statistic.of(run.summary.get("last_accuracy") for run in group.runs).mean, group) for group in groups]
    known = [(mean, group) for mean, group in means if mean is not None]
    return max(known, key=lambda pair: pair[0])[1] if len(known) > 1 else None


def _difference(found: Difference | None) -> Entry:
    if found is None:
        return Entry.of("-")
    sign = "" if not found.is_clear else " ▲" if found.mean > 0 else " ▼"
    interval = "" if found.low is None else f"[{found.low:+.2f}, {found.high:+.2f}], "
    kind = "" if not found.is_clear else "above" if found.mean > 0 else "below"
    pairs = f"{found.pairs} pairs" if found.pairs > 1 else "one pair"
    return Entry(f"{found.mean:+.2f}{sign}", found.mean, (interval + pairs,), kind)


def _values(key: str, every: Sequence[Mapping[str, str]]) -> str:
    values = sorted({value_of(key, each) for each in every}, key=natural_key)
    return ", ".join(values[:12]) + (f" and {len(values) - 12} more" if len(values) > 12 else "")


def _by_place(study: Study, rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return the rows of the groups with the short names of method and setting in the place of what tells them."""
    known = {key for row in identities(study.groups) for key in row}
    found = []
    for group, row in zip(study.groups, rows, strict=True):
        method, setting = study.place(group)
        names = {"method": method} | ({"setting": setting} if len(study.settings) > 1 else {})
        found.append(names | {key: text.removesuffix(" ± -") for key, text in row.items() if key not in known})
    return found
