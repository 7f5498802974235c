"""Tables of results as text: the comparison of many runs, and the clients of one run."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from task.comparison import Group, Statistic, identities, settings_of
from task.result_files import ClientRow
from task.results import RunResult

_CLIENT_HEADER = [
    "partition",
    "model",
    "parameters",
    "device",
    "train",
    "test",
    "classes",
    "last %",
    "best %",
]
_LEFT_ALIGNED = {"model", "device", "classes"}


def as_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return ``rows`` with equal keys as an aligned Markdown table; empty without rows."""
    if not rows:
        return ""
    cells = [list(rows[0]), *([text.replace("|", "\\|") for text in row.values()] for row in rows)]
    widths = [max(3, *(len(row[index]) for row in cells)) for index in range(len(cells[0]))]
    padded = [[f"{text:<{width}}" for text, width in zip(row, widths, strict=True)] for row in cells]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(row)} |" for row in padded) + "\n"


def as_csv(rows: Sequence[Mapping[str, str]]) -> str:
    """Return ``rows`` with equal keys as CSV; empty without rows."""
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def markdown_table(groups: Sequence[Group]) -> str:
    """Return the comparison of ``groups`` as an aligned Markdown table; accuracies in percent."""
    rows = [row | _readable(group) for row, group in zip(identities(groups), groups, strict=True)]
    empty = {key for key in ("note", "paper") if not any(row[key] for row in rows)}
    return as_markdown([{key: text for key, text in row.items() if key not in empty} for row in rows])


def csv_table(groups: Sequence[Group]) -> str:
    """Return the comparison of ``groups`` as CSV; accuracies from 0 to 1, bytes and seconds."""
    rows = [row | _exact(group) for row, group in zip(identities(groups), groups, strict=True)]
    papers = ("paper_accuracy_mean", "paper_accuracy_std")
    empty = set() if any(row[papers[0]] for row in rows) else set(papers)
    return as_csv([{key: text for key, text in row.items() if key not in empty} for row in rows])


FORMATS = {"markdown": markdown_table, "csv": csv_table}


def remarks(groups: Sequence[Group]) -> Iterator[str]:
    """Say in words what the comparison counts."""
    yield "±: the sample standard deviation over n seeds"
    known: dict[tuple[str, str], None] = {}
    for group in groups:
        experiment = group.experiment
        if experiment and (group.paper_accuracy is not None or (experiment.note and not experiment.accuracy)):
            known[experiment.source, experiment.note or "in percent"] = None
    for source, note in known:
        yield f"paper: {source}: {note}"


def _label(client: ClientRow) -> str:
    """Return the number of a client, and its name where it has one of its own."""
    own = client.name not in ("", f"client-{client.partition}")
    return f"{client.partition} {client.name}" if own else str(client.partition)


def client_table(run: RunResult) -> str:
    """Return the clients of ``run`` as aligned plain text: facts, accuracies in percent, means."""
    rows = [
        [
            _label(client),
            client.model or "-",
            show(client.parameters, "{:,}"),
            client.device or "-",
            show(client.train_size),
            show(client.test_size),
            _class_list(client.classes),
            _percent(client.last_accuracy),
            _percent(client.best_accuracy),
        ]
        for client in run.clients
    ]
    mean_of, means = _client_means(run)
    columns = zip(_CLIENT_HEADER, *rows, ["", "", "", "", "", "", "", *means], strict=True)
    widths = [max(map(len, column)) for column in columns]
    rule = "  ".join("-" * width for width in widths)
    label = f"mean over {mean_of} (best: each client in its own best round)"
    # The label takes the room of all columns before the two accuracies.
    label = f"{label:<{sum(widths[:-2]) + 2 * (len(widths) - 3)}}"
    total = "  ".join([label, *(f"{mean:>{width}}" for mean, width in zip(means, widths[-2:], strict=True))])
    return "\n".join([_line(_CLIENT_HEADER, widths), rule, *(_line(row, widths) for row in rows), rule, total])


def summary_lines(run: RunResult) -> list[str]:
    """Return what a reader wants to know of one run: what it was, how good, at what cost, where it lies."""
    summary, settings = run.summary, settings_of(run)
    lines = [
        f"{settings['algorithm']} on {settings['data']}, {settings['partition']}, model {settings['model']}, "
        f"{settings['federation.num_clients']} clients, seed {run.seed}: {run.status}"
    ]
    if run.reason:
        lines.append(f"not complete: {run.reason}")
    if summary.get("last_accuracy") is not None:
        lines.append(
            f"accuracy: last {_percent(summary['last_accuracy'])} %, "
            f"best {_percent(summary.get('best_accuracy'))} % "
            f"in round {summary.get('best_round', '?')} ({settings['accuracy_rule']} rule, "
            f"{settings['accuracy_model']} model, mean over {settings['accuracy_averaging']})"
        )
    lines.append(
        f"cost: {len(run.rounds)} rounds, {show(_number(summary, 'seconds'), '{:.1f}')} s; a round "
        f"{size(bytes_a_round(run, 'up'))} up, {size(bytes_a_round(run, 'down'))} down; "
        f"{summary.get('failures', '?')} failures"
    )
    empty = summary.get("clients_without_training")
    if empty:
        lines.append(f"note: {empty} of {summary.get('num_clients')} clients had no training images")
    return [*lines, *(f"note: {note}" for note in run.notes), f"results: {run.folder}"]


def bytes_a_round(run: RunResult, direction: str) -> float | None:
    """Return the mean bytes a round, all clients together, ``up`` to the server or ``down`` from it."""
    sent = [entry["bytes"] for entry in run.rounds if isinstance(entry.get("bytes"), Mapping)]
    totals = [sum(_number(counts, f"{phase}_{direction}") or 0.0 for phase in ("train", "evaluate")) for counts in sent]
    return Statistic.of(totals).mean


def _statistics(group: Group) -> dict[str, Statistic]:
    """Return the numbers of the comparison over the seeds of ``group``."""
    return {
        "last accuracy": Statistic.of(_number(run.summary, "last_accuracy") for run in group.runs),
        "best accuracy": Statistic.of(_number(run.summary, "best_accuracy") for run in group.runs),
        "bytes up a round": Statistic.of(bytes_a_round(run, "up") for run in group.runs),
        "bytes down a round": Statistic.of(bytes_a_round(run, "down") for run in group.runs),
        "seconds": Statistic.of(_number(run.summary, "seconds") for run in group.runs),
    }


def _readable(group: Group) -> dict[str, str]:
    values = _statistics(group)
    lost = f"{group.losses} of {len(group.runs)} runs completed with losses" if group.losses else ""
    return {
        "n": str(len(group.runs)),
        "rule": group.rule,
        "last accuracy (%)": _mean_and_std(values["last accuracy"], len(group.runs)),
        "best accuracy (%)": _mean_and_std(values["best accuracy"], len(group.runs)),
        "paper": _paper(group),
        "up a round": size(values["bytes up a round"].mean),
        "down a round": size(values["bytes down a round"].mean),
        "seconds": show(values["seconds"].mean, "{:.1f}"),
        "note": lost,
    }


def _exact(group: Group) -> dict[str, str]:
    values = _statistics(group)
    row = {"n": str(len(group.runs)), "rule": group.rule}
    for name in ("last accuracy", "best accuracy"):
        key = name.replace(" ", "_")
        row[f"{key}_mean"] = show(values[name].mean, "{:.6f}", missing="")
        row[f"{key}_std"] = show(values[name].std, "{:.6f}", missing="")
        row[f"{key}_n"] = str(values[name].count)
    for name in ("bytes up a round", "bytes down a round", "seconds"):
        row[name.replace(" ", "_")] = show(values[name].mean, "{:.1f}", missing="")
    mean, std = group.paper_accuracy or (None, None)
    row["paper_accuracy_mean"] = "" if mean is None else f"{mean / 100:.6f}"
    row["paper_accuracy_std"] = "" if std is None else f"{std / 100:.6f}"
    return row | {"completed_with_losses": str(group.losses)}


def _paper(group: Group) -> str:
    """Return the paper's accuracy in percent; empty where it has none."""
    mean, std = group.paper_accuracy or (None, None)
    if mean is None:
        return ""
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def _mean_and_std(value: Statistic, runs: int) -> str:
    if value.mean is None:
        return "-"
    spread = "-" if value.std is None else f"{100 * value.std:.2f}"
    # Fewer values than runs must not look like a mean over all of them.
    return f"{100 * value.mean:.2f} ± {spread}" + (f" (n={value.count})" if value.count < runs else "")


def _client_means(run: RunResult) -> tuple[str, list[str]]:
    """Return what the clients' mean is taken over, in words, and the means of last and best accuracy."""
    weighted = run.summary.get("accuracy_averaging") == "test samples" and all(
        client.test_size is not None for client in run.clients
    )

    def mean(key: str) -> str:
        known = [(getattr(client, key), _weight(client, weighted)) for client in run.clients]
        known = [(accuracy, weight) for accuracy, weight in known if accuracy is not None]
        total = sum(weight for _, weight in known)
        return _percent(sum(accuracy * weight for accuracy, weight in known) / total if total else None)

    return "test samples" if weighted else "clients", [mean("last_accuracy"), mean("best_accuracy")]


def _weight(client: ClientRow, weighted: bool) -> int:
    return (client.test_size or 0) if weighted else 1


def _class_list(classes: tuple[int, ...]) -> str:
    """Return the class numbers with ranges closed up, ``0-3 7``; only how many where that gets long."""
    ranges: list[list[int]] = []
    for number in sorted(classes):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return (text if len(text) <= 24 else f"{len(classes)} classes") or "-"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(
        f"{cell:<{width}}" if name in _LEFT_ALIGNED else f"{cell:>{width}}"
        for name, cell, width in zip(_CLIENT_HEADER, cells, widths, strict=True)
    )


def _number(mapping: Mapping[str, Any], key: str) -> float | None:
    value = mapping.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def show(value: float | None, form: str = "{}", missing: str = "-") -> str:
    """Return ``value`` in a format, or what stands for one that does not exist."""
    return missing if value is None else form.format(value)


def _percent(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{100 * accuracy:.2f}"


def size(count: float | None) -> str:
    """Return bytes in a unit that fits, 1 kB being 1,000 bytes."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
