"""Which figures the runs of a report can fill, each with its caption and what it shows in words."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from task.comparison import Group, Statistic
from task.reporting import clients, curves, prototypes
from task.reporting.study import Study, value_of
from task.results import RunResult
from task.tables import size

_MARGINS = {"margin": "margin", "smallest_gap": "smallest gap"}

_Facts = tuple[str, str, Callable[[], Figure]]


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn: file name, section of the page, title, caption, and its text alternative.

    An overview shows all methods, the others one run or one group of runs.
    """

    name: str
    section: str
    title: str
    caption: str
    alternative: str
    draw: Callable[[], Figure]
    is_overview: bool = True


@dataclass(frozen=True)
class Plan:
    """The figures to draw, what was left out because there would be too many, and what cannot be drawn at all."""

    drawings: list[Drawing]
    left_out: list[str]
    problems: list[str]


def plan(study: Study, projection: str, most: int) -> Plan:
    """Return every figure that the runs can fill, at most ``most`` of those of which there is one a group."""
    drawings = [*_lines(study), *_swept(study), *_bytes_and_margins(study), *_boxes(study)]
    left_out, problems = [], list[str]()
    for kind, several in _by_group(study, projection, problems).items():
        shown = several[:most]
        drawings += shown if len(several) > 1 else [replace(each, name=each.name.partition(":")[0]) for each in shown]
        if len(several) > most:
            left_out.append(f"{len(several) - most} of {len(several)} figures of {kind} are left out (--most)")
    return Plan(_with_unique_names(drawings), left_out, problems)


def _lines(study: Study) -> Iterator[Drawing]:
    evaluated = [each for each in study.settings if any(curves.curve(g)[0] for g in _groups(study, each))]
    for part, number in _numbered(evaluated):
        yield Drawing(
            f"accuracy-by-round{number}",
            "Accuracy",
            "By round",
            "Mean over the seeds, in a band of one sample standard deviation.",
            "Lines of accuracy by round. " + " ".join(_ends(study, setting) for setting in part),
            partial(curves.accuracy_by_round, study, part),
        )


def _swept(study: Study) -> Iterator[Drawing]:
    for key in curves.swept_keys(study):
        values, lines = curves.lines_over(study, key)
        rests = list(dict.fromkeys(rest for (_, rest), line in lines.items() if len(line) > 1))
        name = study.design.short(key)
        told = []
        for (method, rest), line in lines.items():
            means = ", ".join(f"{_percent(line[value])} at {value}" for value in values if value in line)
            told.append(f"{' '.join(word for word in (method, rest) if word)}: {means}.")
        for part, number in _numbered(rests):
            yield Drawing(
                f"accuracy-by-{_slug(name)}{number}",
                "Accuracy",
                f"By {name}",
                "Last accuracy, mean over the seeds; whiskers are one sample standard deviation.",
                f"Lines of the last accuracy by {name}. {' '.join(told)}",
                partial(curves.accuracy_by_setting, study, key, part),
            )


def _bytes_and_margins(study: Study) -> Iterator[Drawing]:
    evaluated = [each for each in study.settings if any(curves.curve(g)[0] for g in _groups(study, each))]
    for part, number in _numbered(evaluated):
        yield Drawing(
            f"accuracy-by-bytes{number}",
            "Communication",
            "Accuracy by bytes sent",
            "What all clients together had sent and received in training when they reached an accuracy.",
            "Lines of accuracy by bytes sent, on a logarithmic axis. "
            + " ".join(_ends(study, setting, with_bytes=True) for setting in part),
            partial(curves.accuracy_by_bytes, study, part),
        )
    for metric, words in _MARGINS.items():
        measured = [each for each in study.settings if any(curves.has_metric(g, metric) for g in _groups(study, each))]
        for part, number in _numbered(measured):
            yield Drawing(
                f"{metric.replace('_', '-')}-by-round{number}",
                "Prototypes",
                f"{words[0].upper()}{words[1:]} by round",
                "Mean over the seeds, in a band of one sample standard deviation.",
                f"Lines of the {words} by round. " + " ".join(_metric_ends(study, setting, metric) for setting in part),
                partial(curves.metric_by_round, study, part, metric, words),
            )


def _boxes(study: Study) -> Iterator[Drawing]:
    known = [setting for setting in study.settings if clients.box_values(study, setting)]
    for part, number in _numbered(known):
        told = []
        for setting in part:
            spans = [
                f"{method} from {min(values):.1f} to {max(values):.1f} %"
                for method, values in clients.box_values(study, setting).items()
            ]
            told.append(f"{_in(setting)}{', '.join(spans)}.")
        yield Drawing(
            f"accuracy-of-clients{number}",
            "Clients",
            "Accuracy of all clients",
            "A dot is a client under one seed; the box shows quartiles and median.",
            f"Boxes of the clients' last accuracies. {' '.join(told)}",
            partial(clients.accuracy_boxes, study, part),
        )


def _by_group(study: Study, projection: str, problems: list[str]) -> dict[str, list[Drawing]]:
    """Return the figures of which there is one a group or a division of the data, by kind."""
    firsts = [(study.label(group), group.runs[0]) for group in study.groups]
    return {
        "accuracy by client": [
            _drawing("accuracy-by-client", "Clients", "Accuracy by client", label, _bars(run))
            for label, run in firsts
            if any(client.best_accuracy is not None for client in run.clients)
        ],
        "classes by client": [
            _drawing("classes-by-client", "Clients", "Classes by client", label, _classes(run))
            for label, run in _divisions(study).items()
        ],
        "prototypes": [
            _drawing("prototypes", "Prototypes", "Prototypes", label, _prototypes(run, projection))
            for label, run in firsts
            if prototypes.has_prototypes(run)
        ],
        "confusion": list(_confusions(study, problems)),
    }


def _confusions(study: Study, problems: list[str]) -> Iterator[Drawing]:
    for group in study.groups:
        try:
            counts = clients.confusion(group)
        except ValueError as error:
            problems.append(str(error))
            continue
        if counts is not None and counts.any():
            yield _drawing("confusion", "Classes", "Confusion", study.label(group), _confusion(group, counts))


def _drawing(kind: str, section: str, title: str, label: str, facts: _Facts) -> Drawing:
    caption, alternative, draw = facts
    return Drawing(f"{kind}:{_slug(label)}", section, f"{title}: {label}", caption, alternative, draw, False)


def _bars(run: RunResult) -> _Facts:
    known = sorted(
        (client.best_accuracy, client.partition) for client in run.clients if client.best_accuracy is not None
    )
    (low, worst), (high, best) = known[0], known[-1]
    words = f"Bars of the best accuracy of {len(known)} clients: client {best} has {100 * high:.1f} %, "
    caption = f"Bar: best round of each client; dot: last round. Seed {run.seed}."
    return caption, f"{words}client {worst} {100 * low:.1f} %.", partial(clients.accuracy_by_client, run)


def _classes(run: RunResult) -> _Facts:
    held = [sum(count > 0 for count in client.class_counts) for client in run.clients if client.class_counts]
    words = f"Table of colours: {len(held)} clients hold images of {min(held)} to {max(held)} classes each"
    total = sum(sum(client.class_counts) for client in run.clients if client.class_counts)
    caption = f"Images of each class, training and test together. Seed {run.seed}."
    return caption, f"{words}, {total} images in all.", partial(clients.classes_by_client, run)


def _prototypes(run: RunResult, projection: str) -> _Facts:
    assert run.prototypes is not None
    counts = len(run.prototypes.client_class_ids), len(run.prototypes.global_class_ids)
    words = f"Points in two dimensions: {counts[0]} prototypes of clients and {counts[1]} global ones in the last round"
    caption = f"Dot: prototype of a client; star: global prototype; colour: class. Seed {run.seed}."
    return caption, f"{words}.", partial(prototypes.prototype_map, run, projection)


def _confusion(group: Group, counts: npt.NDArray[np.int64]) -> _Facts:
    names = group.runs[0].class_names(len(counts))
    wrong = [(int(n), i, j) for i, row in enumerate(counts) for j, n in enumerate(row) if i != j and n]
    words = [f"{names[i]} for {names[j]} ({n} images)" for n, i, j in sorted(wrong, reverse=True)[:3]]
    told = f"most often mistaken: {'; '.join(words)}." if words else "no image was mistaken."
    caption = "Last evaluation, test images of all clients and seeds; shares of the true class in percent."
    return caption, f"Table of colours: true class by predicted class; {told}", partial(clients.confusion_matrix, group)


def _divisions(study: Study) -> dict[str, RunResult]:
    """Return one run for each division of data among clients, by what tells the divisions apart."""
    keys = [key for key in study.design.setting_keys if key.partition(".")[0] in ("data", "partition")]
    keys += [key for key in study.design.setting_keys if key == "federation.num_clients"]
    found: dict[str, RunResult] = {}
    for group in study.groups:
        for run in group.runs:
            if any(client.class_counts for client in run.clients):
                label = study.design.label(keys, group.settings) or value_of("partition", group.settings)
                found.setdefault(label, run)
    return found


def _ends(study: Study, setting: str, *, with_bytes: bool = False) -> str:
    """Say where the lines of one panel end."""
    ends = []
    for group in _groups(study, setting):
        rounds, values = curves.curve(group)
        if rounds:
            sent = f" after {size(curves.bytes_until(group, rounds)[-1])}" if with_bytes else ""
            after = sent or f" after round {rounds[-1]}"
            ends.append(f"{study.place(group)[0]} ends at {_percent(values[-1])}{after}")
    return f"{_in(setting)}{', '.join(ends)}."


def _metric_ends(study: Study, setting: str, metric: str) -> str:
    ends = []
    for group in _groups(study, setting):
        rounds, values = curves.curve(group, f"metrics.{metric}")
        if rounds:
            first, last = values[0].mean or 0.0, values[-1].mean or 0.0
            ends.append(f"{study.place(group)[0]} from {first:.3g} to {last:.3g} in round {rounds[-1]}")
    return f"{_in(setting)}{', '.join(ends)}."


def _groups(study: Study, setting: str) -> list[Group]:
    return [group for method in study.methods if (group := study.group(method, setting))]


def _numbered(settings: Sequence[str]) -> list[tuple[Sequence[str], str]]:
    """Return the parts that fit into a figure each, and what to append to its name."""
    parts = list(curves.chunks(settings))
    return [(part, "" if len(parts) == 1 else f"-{number}") for number, part in enumerate(parts, 1)]


def _in(setting: str) -> str:
    return f"{setting}: " if setting else ""


def _percent(value: Statistic) -> str:
    return f"{100 * (value.mean or 0.0):.1f} %"


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9._]+", "-", label.lower()).strip("-.")[:40].rstrip("-.")


def _with_unique_names(drawings: Sequence[Drawing]) -> list[Drawing]:
    taken: set[str] = set()
    named = []
    for each in drawings:
        name = stem = each.name.replace(":", "-")
        number = 1
        while name in taken:
            number += 1
            name = f"{stem}-{number}"
        taken.add(name)
        named.append(replace(each, name=name))
    return named
