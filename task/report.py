"""Console script ``protofed-report``: any number of result folders to tables, figures and one HTML page."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from task import communication, tables
from task.comparison import group_runs
from task.reporting.content import gaps, grid_rows
from task.reporting.differences import Baseline
from task.reporting.study import Study
from task.reporting.text import as_csv, as_latex, as_markdown
from task.results import RunResult, find_runs, read_run
from task.terminal import show_any_text

PAGE = "report.html"
FORMATS = {"markdown": as_markdown, "csv": as_csv, "latex": as_latex}


def main(arguments: Sequence[str] | None = None) -> int:
    """Report on the folders of the command line.

    Returns
    -------
    int
        0 if every folder was read and everything written, 1 otherwise; 2, as argparse has it, at a bad command line.
    """
    show_any_text()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(typed)
    output = options.output or options.folders[0] / "report"
    runs, errors = _read(options.folders)
    groups, repeated = group_runs([run for run in runs if run.is_complete])
    study = Study(groups, [run for run in runs if not run.is_complete])
    try:
        baseline = Baseline.chosen(options.baseline, study)
    except ValueError as error:
        print(f"protofed-report: {error}", file=sys.stderr)
        return 2
    print(FORMATS[options.format](_rows(study, baseline, options)), end="")
    # A table for a program goes to a file or a pipe, where no other line may stand.
    side = sys.stdout if options.format == "markdown" else sys.stderr
    counted = f"{sum(len(group.runs) for group in groups)} of {len(runs)} runs are in the table"
    notes = communication.remarks(groups) if options.communication else tables.remarks(groups, baseline)
    missing = (f"not full: {line}" for line in gaps(study))
    for line in ["", counted, *notes, *missing, *_left_out(runs, repeated)]:
        print(line, file=side)
    if groups and not options.communication:
        remarks = [*tables.remarks(groups, baseline), *_left_out(runs, repeated)]
        for line in _write(study, runs, baseline, output, options, ["protofed-report", *typed], remarks, errors):
            print(line, file=side)
    for text in errors:
        print(f"protofed-report: {text}", file=sys.stderr)
    return 1 if errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="protofed-report",
        description="Compare the results of runs: a table of means over seeds, figures as PNG files, and report.html, "
        "one page with all of it that needs no network and can be sent as it is.",
        epilog="Exit status: 0 all read and written, 1 no runs or a file that cannot be read or written, 2 usage.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run, or a folder of runs")
    text = "what others are compared with, seed by seed (default: local if there is one; none: no comparison)"
    parser.add_argument("--baseline", metavar="METHOD", help=text)
    parser.add_argument("--grid", action="store_true", help="print method by setting instead of a row for each")
    parser.add_argument("--communication", action="store_true", help="print what was sent in a round; no files")
    parser.add_argument("--format", choices=tuple(FORMATS), default="markdown", help="of the table (default: markdown)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where the files go (FOLDER/report of the first)")
    parser.add_argument("--title", default="Federated learning by method and setting", help="of the page")
    parser.add_argument("--projection", choices=("pca", "tsne"), default="pca", help="of the prototypes (default: pca)")
    text = "the most figures of one kind, where there is one a method and setting (default: 12)"
    parser.add_argument("--most", type=_count, default=12, metavar="N", help=text)
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not allowed: at least 1")
    return value


def _rows(study: Study, baseline: Baseline | None, options: argparse.Namespace) -> Sequence[Mapping[str, str]]:
    """Return the table that the command line asks for: exact numbers for a program, rounded ones for people."""
    exact = options.format == "csv"
    if options.communication:
        return (communication.exact_rows if exact else communication.readable_rows)(study.groups)
    if options.grid:
        return grid_rows(study)
    return (tables.exact_rows if exact else tables.readable_rows)(study.groups, baseline)


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


def _write(
    study: Study,
    runs: Sequence[RunResult],
    baseline: Baseline | None,
    output: Path,
    options: argparse.Namespace,
    command: Sequence[str],
    remarks: list[str],
    errors: list[str],
) -> Iterator[str]:
    """Draw one figure after the other, so that memory holds one at a time, and write the page; say what was written."""
    # Imported here because it takes a second, which a bad command line need not wait for.
    from matplotlib.image import AxesImage

    from task.reporting import drawing, page, plan

    planned = plan.plan(study, options.projection, options.most)
    remarks += planned.left_out
    errors += planned.problems
    yield from planned.left_out
    try:
        output.mkdir(parents=True, exist_ok=True)
        pictures = []
        for each in planned.drawings:
            path = output / f"{each.name}.png"
            try:
                figure = each.draw()
                drawing.save(figure, path)
            except ValueError as error:  # a malformed file, or one of the user's in its place: the others are drawn
                errors.append(str(error))
                continue
            yield f"figure: {path}"
            wide = figure.get_figwidth() > 8.6 or each.is_overview
            matrix = bool(figure.findobj(AxesImage))
            uri = drawing.data_uri(figure, follows_scheme=not matrix)
            facts = (each.name, each.section, each.title, each.caption, each.alternative)
            pictures.append(page.Picture(*facts, uri, wide, matrix))
        text = page.render(study, runs, baseline, pictures, title=options.title, command=command, remarks=remarks)
        drawing.write_own(output / PAGE, text.encode())
        yield f"page: {output / PAGE}"
    except ValueError as error:
        errors.append(str(error))
    except OSError as error:
        errors.append(f"{error.filename or output}: cannot be written: {error.strerror}")


if __name__ == "__main__":
    sys.exit(main())
