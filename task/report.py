"""Console script ``protofed-report``: any number of result folders to one table and to figures."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from task import communication, tables
from task.comparison import Group, group_runs, short_labels
from task.results import RunResult, find_runs, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Report on the folders of the command line.

    Returns
    -------
    int
        0 if every folder was read and every figure written, 1 otherwise; argparse leaves with 2 at a bad
        command line.
    """
    options = _parser().parse_args(arguments)
    output = options.output or options.folders[0] / "report"
    runs, errors = _read(options.folders)
    completed = [run for run in runs if run.is_complete]
    groups, repeated = group_runs(completed)
    view = communication if options.communication else tables
    print(view.FORMATS[options.format](groups), end="")
    # A table in CSV goes to a file or a pipe, where no other line may stand.
    side = sys.stdout if options.format == "markdown" else sys.stderr
    counted = f"{sum(len(group.runs) for group in groups)} of {len(runs)} runs are in the table"
    for line in ["", counted, *view.remarks(groups), *_left_out(runs, repeated)]:
        print(line, file=side)
    if groups and not options.communication:
        try:
            for path in _write_figures(groups, output, options.projection):
                print(f"figure: {path}", file=side)
        except ValueError as error:
            errors.append(str(error))
        except OSError as error:
            errors.append(f"{error.filename or output}: cannot be written: {error.strerror}")
    for text in errors:
        print(f"protofed-report: {text}", file=sys.stderr)
    return 1 if errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="protofed-report",
        description="Compare the results of runs: a table of means over seeds, and figures as PNG files.",
        epilog="Exit status: 0 all read, 1 no runs or a file that cannot be read or written, 2 usage.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run, or a folder of runs")
    parser.add_argument("--communication", action="store_true", help="what was sent in a round instead; no figures")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where the figures go (FOLDER/report of the first)")
    parser.add_argument("--projection", choices=("pca", "tsne"), default="pca", help="of the prototypes (default: pca)")
    formats = tuple(tables.FORMATS)
    parser.add_argument("--format", choices=formats, default="markdown", help="of the table (default: markdown)")
    return parser


def _read(folders: Sequence[Path]) -> tuple[list[RunResult], list[str]]:
    """Read every run that can be read, each once, and return what could not be read."""
    runs: dict[Path, RunResult] = {}
    errors = []
    for folder in folders:
        try:
            found = find_runs([folder])
        except ValueError as error:
            errors.append(str(error))
            continue
        for run in found:
            try:
                runs.setdefault(run.resolve(), read_run(run))
            except ValueError as error:
                errors.append(str(error))
    return list(runs.values()), list(dict.fromkeys(errors))


def _left_out(runs: Sequence[RunResult], repeated: Sequence[RunResult]) -> Iterator[str]:
    """Say what the table leaves out and why, and what was wrong in the files."""
    for run in runs:
        if not run.is_complete:
            yield f"not in the table: {run.folder}: {run.status}: {run.reason}"
    for run in repeated:
        yield f"not in the table: {run.folder}: a later run has the same settings and seed {run.seed}"
    for run in runs:
        for note in run.notes:
            yield f"note: {note}"


def _write_figures(groups: Sequence[Group], output: Path, projection: str) -> Iterator[Path]:
    """Draw and save one figure after the other, so that memory holds one at a time."""
    # Imported here because it takes a second, which a bad command line need not wait for.
    from task.drawing import save

    output.mkdir(parents=True, exist_ok=True)
    for name, draw in _plan(groups, projection):
        path = output / f"{name}.png"
        save(draw(), path)
        yield path


def _plan(groups: Sequence[Group], projection: str) -> Iterator[tuple[str, Callable[[], "Figure"]]]:
    """Name every figure that the runs can fill, with the function that draws it."""
    from task import figures

    if any(figures.curve(group)[0] for group in groups):
        yield "accuracy-by-round", partial(figures.accuracy_by_round, groups)
    partitions: dict[tuple[str, ...], RunResult] = {}
    for group in groups:
        key = tuple(group.settings[name] for name in ("data", "partition", "federation.num_clients"))
        shared = [run for run in group.runs if any(client.class_counts for client in run.clients)]
        if shared:
            partitions.setdefault(key, shared[0])
    by_label = [(" ".join(key), run) for key, run in partitions.items()]
    for name, run in _named("classes-by-client", by_label):
        yield name, partial(figures.classes_by_client, run)
    # One picture a group, of its first seed: another seed is another partition with other prototypes.
    firsts = [
        (label.rpartition(" (")[0], group.runs[0]) for label, group in zip(short_labels(groups), groups, strict=True)
    ]
    drawable = [(label, run) for label, run in firsts if figures.has_prototypes(run)]
    for name, run in _named("prototypes", drawable):
        yield name, partial(figures.prototype_map, run, projection)
    tested = [pair for pair in firsts if any(row.best_accuracy is not None for row in pair[1].clients)]
    for name, run in _named("accuracy-by-client", tested):
        yield name, partial(figures.accuracy_by_client, run)


def _named(kind: str, runs: Sequence[tuple[str, RunResult]]) -> Iterator[tuple[str, RunResult]]:
    """Name one figure a run: ``kind`` alone for a single run, else with the run's label."""
    taken: set[str] = set()
    for label, run in runs:
        slug = re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")[:60]
        name = stem = kind if len(runs) == 1 else f"{kind}-{slug}"
        number = 1
        while name in taken:
            number += 1
            name = f"{stem}-{number}"
        taken.add(name)
        yield name, run


if __name__ == "__main__":
    sys.exit(main())
