"""Tables of results as text: the comparison of many runs, and the clients of one run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from task.comparison import Group, Statistic, identities, settings_of
from task.reporting.differences import Baseline, Difference
from task.reporting.text import as_markdown
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


def readable_rows(groups: Sequence[Group], baseline: Baseline | None = None) -> list[dict[str, str]]:
    """Return the comparison of ``groups`` for people; accuracies in percent, differences in points."""
    rows = [row | _readable(group, baseline) for row, group in zip(identities(groups), groups, strict=True)]
    empty = {key for key in ("note", "paper") if not any(row[key] for row in rows)}
    return [{key: text for key, text in row.items() if key not in empty} for row in rows]


def exact_rows(groups: Sequence[Group], baseline: Baseline | None = None) -> list[dict[str, str]]:
    """Return the comparison of ``groups`` for programs; accuracies and differences from 0 to 1, bytes and seconds."""
    rows = [row | _exact(group, baseline) for row, group in zip(identities(groups), groups, strict=True)]
    papers = ("paper_accuracy_mean", "paper_accuracy_std")
    empty = set() if any(row[papers[0]] for row in rows) else set(papers)
    return [{key: text for key, text in row.items() if key not in empty} for row in rows]


def markdown_table(groups: Sequence[Group]) -> str:
    """Return the comparison of ``groups`` as an aligned Markdown table; accuracies in percent."""
    return as_markdown(readable_rows(groups))


def remarks(groups: Sequence[Group], baseline: Baseline | None = None) -> Iterator[str]:
    """Say in words what the comparison counts."""
    yield "±: the sample standard deviation over n seeds"
    if baseline:
        yield (
            f"over {baseline.method}: points of the last accuracy above it, paired by seed under the same setting, "
            "with the 95 % confidence interval (Student's t)"
        )
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
    header = list(_CLIENT_HEADER)
    spent = _mapping(_mapping(run.summary, "privacy"), "epsilon_by_client")
    if spent:  # before the accuracies, which stay last
        header.insert(-2, "epsilon")
        for client, row in zip(run.clients, rows, strict=True):
            row.insert(-2, show(_number(spent, str(client.partition)), "{:.2f}"))
    columns = zip(header, *rows, [*[""] * (len(header) - 2), *means], strict=True)
    widths = [max(map(len, column)) for column in columns]
    rule = "  ".join("-" * width for width in widths)
    label = f"mean over {mean_of} (best: each client in its own best round)"
    # The label takes the room of all columns before the two accuracies.
    label = f"{label:<{sum(widths[:-2]) + 2 * (len(widths) - 3)}}"
    total = "  ".join([label, *(f"{mean:>{width}}" for mean, width in zip(means, widths[-2:], strict=True))])
    lines = [_line(header, header, widths), rule, *(_line(row, header, widths) for row in rows), rule, total]
    return "\n".join(lines)


def summary_lines(run: RunResult) -> list[str]:
    """Return what a reader wants to know of one run: what it was, how good, at what cost, where it lies."""
    summary, settings = run.summary, settings_of(run)
    lines = [
        f"{settings['algorithm']} on {settings['data']}, {settings['partition']}, model {settings['model']}, "
        f"{settings['federation.num_clients']} clients, seed {run.seed}: {run.status}"
    ]
    if run.reason:
        lines.append(f"not complete: {run.reason}")
    if summary.get("stopped_early"):
        lines.append(f"{summary['stopped_early']}; {summary.get('rounds')} rounds were planned")
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
    lines += _privacy_lines(summary)
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


def _readable(group: Group, baseline: Baseline | None) -> dict[str, str]:
    values, runs = _statistics(group), len(group.runs)
    counted = {"completed with losses": group.losses, "stopped early": group.stopped_early}
    over = baseline.over(group) if baseline else None
    return {
        "n": str(len(group.runs)),
        "rule": group.rule,
        "last accuracy (%)": mean_and_std(values["last accuracy"], runs),
        "best accuracy (%)": mean_and_std(values["best accuracy"], runs),
        "paper": _paper(group),
        **({f"over {baseline.method}": "" if over is None else str(over)} if baseline else {}),
        "up a round": size(values["bytes up a round"].mean),
        "down a round": size(values["bytes down a round"].mean),
        "seconds": show(values["seconds"].mean, "{:.1f}"),
        "note": "; ".join(f"{number} of {runs} runs {words}" for words, number in counted.items() if number),
    }


def _exact(group: Group, baseline: Baseline | None) -> dict[str, str]:
    values = _statistics(group)
    row = {"n": str(len(group.runs)), "rule": group.rule}
    for name in ("last accuracy", "best accuracy"):
        key = name.replace(" ", "_")
        row[f"{key}_mean"] = show(values[name].mean, "{:.6f}", missing="")
        row[f"{key}_std"] = show(values[name].std, "{:.6f}", missing="")
        row[f"{key}_n"] = str(values[name].count)
    if baseline:
        row |= {"baseline": baseline.method} | _exact_difference(baseline.over(group))
    for name in ("bytes up a round", "bytes down a round", "seconds"):
        row[name.replace(" ", "_")] = show(values[name].mean, "{:.1f}", missing="")
    mean, std = group.paper_accuracy or (None, None)
    row["paper_accuracy_mean"] = "" if mean is None else f"{mean / 100:.6f}"
    row["paper_accuracy_std"] = "" if std is None else f"{std / 100:.6f}"
    return row | {"completed_with_losses": str(group.losses), "stopped_early": str(group.stopped_early)}


def _exact_difference(over: Difference | None) -> dict[str, str]:
    values = (over.mean, over.low, over.high) if over else (None, None, None)
    names = ("difference_mean", "difference_low", "difference_high")
    shares = [None if value is None else value / 100 for value in values]
    row = {name: show(share, "{:.6f}", missing="") for name, share in zip(names, shares, strict=True)}
    return row | {"difference_pairs": str(over.pairs if over else 0)}


def _paper(group: Group) -> str:
    """Return the paper's accuracy in percent; empty where it has none."""
    mean, std = group.paper_accuracy or (None, None)
    if mean is None:
        return ""
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def mean_and_std(value: Statistic, runs: int) -> str:
    """Return mean and standard deviation in percent, with their number where not all ``runs`` have a value."""
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


def _privacy_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return what a private run has spent, and what that says nothing of; nothing for other runs."""
    privacy = _mapping(summary, "privacy")
    if not privacy:
        return []
    spent, delta = show(_number(privacy, "epsilon"), "{:.2f}"), show(_number(privacy, "delta"), "{:g}")
    lines = [f"privacy: epsilon at most {spent} with delta {delta}, for {privacy.get('unit', '?')}"]
    exceptions = privacy.get("not_covered")
    return lines + [f"not covered: {words}" for words in (exceptions if isinstance(exceptions, list) else [])]


def _line(cells: Sequence[str], header: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(
        f"{cell:<{width}}" if name in _LEFT_ALIGNED else f"{cell:>{width}}"
        for name, cell, width in zip(header, cells, widths, strict=True)
    )


def _number(mapping: Mapping[str, Any], key: str) -> float | None:
    value = mapping.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _mapping(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = mapping.get(key)
    return value if isinstance(value, Mapping) else {}


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
