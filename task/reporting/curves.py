"""Figures of lines: accuracy by round, by bytes and by the swept setting, and what a method measures by round."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from task.comparison import Group, Statistic, natural_key
from task.reporting.drawing import colour, grid_lines, legend, line_style, panel_row, panel_title, plain, shape, title
from task.reporting.study import Study, value_of
from task.tables import size

PANELS = 12
"""The largest number of panels in one figure."""
_Floats = npt.NDArray[np.float64]
_BAND = "mean over n seeds, in a band of ± one sample standard deviation"


def curve(group: Group, key: str = "accuracy") -> tuple[list[int], list[Statistic]]:
    """Return the rounds that have a ``key`` under every seed of ``group``, and its statistic there."""
    by_seed = [
        {entry["round"]: value for entry in run.rounds if (value := _value(entry, key)) is not None}
        for run in group.runs
    ]
    # A mean over a changing set of seeds would jump where a seed comes or goes.
    rounds = sorted(set.intersection(*map(set, by_seed)))
    return rounds, [Statistic.of(values[number] for values in by_seed) for number in rounds]


def bytes_until(group: Group, rounds: Sequence[int]) -> list[float]:
    """Return the bytes of training, up and down, that all clients together needed until each of ``rounds``."""
    totals = []
    for run in group.runs:
        sent = [sum(entry.get("bytes", {}).get(f"train_{way}", 0) for way in ("up", "down")) for entry in run.rounds]
        by_round = dict(zip((entry["round"] for entry in run.rounds), accumulate(sent), strict=True))
        totals.append([by_round[number] for number in rounds])
    return [float(value) for value in np.mean(totals, axis=0)]


def chunks(settings: Sequence[str]) -> Iterator[Sequence[str]]:
    """Divide settings into as many as one figure has panels for."""
    for start in range(0, len(settings), PANELS):
        yield settings[start : start + PANELS]


def accuracy_by_round(study: Study, settings: Sequence[str]) -> Figure:
    """Draw a panel a setting and a line a method: the mean accuracy over its seeds, in a band of one deviation."""
    figure, panels = _panels(study, settings, "accuracy", lambda group, rounds: [float(number) for number in rounds])
    for axes in panels:
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    title(panels[0], "Accuracy by round", _BAND)
    return figure


def accuracy_by_bytes(study: Study, settings: Sequence[str]) -> Figure:
    """Draw the accuracy over the bytes that were sent until then, on a logarithmic axis."""
    figure, panels = _panels(study, settings, "accuracy", bytes_until)
    for axes in panels:
        axes.set_xscale("log")
        axes.set_xlabel("sent until then, up and down")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    title(panels[0], "Accuracy by bytes sent", "training messages of all clients together; evaluation is not counted")
    return figure


def metric_by_round(study: Study, settings: Sequence[str], name: str, words: str) -> Figure:
    """Draw a metric that methods record in each round, for those that do."""
    figure, panels = _panels(
        study, settings, f"metrics.{name}", lambda group, rounds: [float(number) for number in rounds], words
    )
    for axes in panels:
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    title(panels[0], f"{words[0].upper()}{words[1:]} by round", _BAND)
    return figure


def has_metric(group: Group, name: str) -> bool:
    """Whether all runs of ``group`` recorded the metric in a round."""
    return bool(curve(group, f"metrics.{name}")[0])


def swept_keys(study: Study) -> list[str]:
    """Return the keys over which a line of accuracies can be drawn: those with at least two values."""
    keys = [*study.design.method_keys[1:], *study.design.setting_keys]
    return [key for key in keys if len(lines_over(study, key)[0]) > 1]


def lines_over(study: Study, key: str) -> tuple[list[str], dict[tuple[str, str], dict[str, Statistic]]]:
    """Return the values of ``key`` in order, and the last accuracies by (method, rest of the setting) and value."""
    design, lines = study.design, dict[tuple[str, str], dict[str, Statistic]]()
    for group in study.groups:
        method = design.label([other for other in design.method_keys if other != key], group.settings)
        rest = design.label([other for other in design.setting_keys if other != key], group.settings)
        accuracy = Statistic.of(run.summary.get("last_accuracy") for run in group.runs)
        if accuracy.mean is not None:
            lines.setdefault((method, rest), {})[value_of(key, group.settings)] = accuracy
    values = sorted({value for line in lines.values() for value in line}, key=natural_key)
    return values, dict(sorted(lines.items(), key=lambda line: natural_key("\0".join(line[0]))))


def accuracy_by_setting(study: Study, key: str, rests: Sequence[str]) -> Figure:
    """Draw the last accuracy over the values of ``key``: a panel for each of ``rests``, the other settings."""
    values, lines = lines_over(study, key)
    methods = list(dict.fromkeys(method for method, _ in lines))
    names = any(_number(value) is None for value in values)
    figure, panels = panel_row(len(rests), *_panel_size(len(rests)))
    for axes, rest in zip(panels, rests, strict=True):
        place = _scale(axes, values)
        for index, method in enumerate(methods):
            found = lines.get((method, rest), {})
            points = [(place[value], 100 * (found[value].mean or 0), 100 * (found[value].std or 0)) for value in found]
            if points:
                x, mean, std = zip(*sorted(points), strict=True)
                style = _style(index, len(x))
                if names:  # between names there is no way, so points stand side by side without a line
                    x = tuple(place + 0.7 * ((index + 0.5) / len(methods) - 0.5) for place in x)
                    style["linestyle"] = "none"
                axes.errorbar(x, mean, yerr=std, capsize=3, **style)
        axes.set_xlabel(study.design.short(key))
        panel_title(axes, rest)
        grid_lines(axes)
    _label_left(panels, "last accuracy (%)")
    name = study.design.short(key)
    title(panels[0], f"Accuracy by {name}", "mean over n seeds, whiskers of ± one sample standard deviation")
    legend(panels[0], _handles(methods), below=True)
    return figure


def _panels(
    study: Study,
    settings: Sequence[str],
    key: str,
    along: Callable[[Group, Sequence[int]], Sequence[float]],
    words: str = "accuracy (%)",
) -> tuple[Figure, list[Axes]]:
    """Draw the curves of ``key`` over what ``along`` returns for their rounds: a panel a setting, a line a method."""
    figure, panels = panel_row(len(settings), *_panel_size(len(settings)), share=False)
    scale, drawn = (100.0 if key == "accuracy" else 1.0), []
    for axes, setting in zip(panels, settings, strict=True):
        for method in study.methods:
            group = study.group(method, setting)
            rounds, values = curve(group, key) if group else ([], [])
            if group is None or not rounds:
                continue
            drawn.append(method)
            _line(
                axes, along(group, rounds), values, scale, study.index(method), 0.18 if len(study.methods) < 5 else 0.08
            )
        panel_title(axes, setting)
        grid_lines(axes)
    _label_left(panels, words)
    methods = [method for method in study.methods if method in drawn]
    labels = [f"{method} (n={count})" if (count := _seeds(study, method)) else method for method in methods]
    legend(panels[0], _handles(labels, [study.index(method) for method in methods]), below=True)
    return figure, panels


def _line(axes: Axes, x: Sequence[float], values: Sequence[Statistic], scale: float, index: int, alpha: float) -> None:
    mean = np.array([scale * (value.mean or 0.0) for value in values])
    std = np.array([scale * (value.std or 0.0) for value in values])
    axes.plot(x, mean, **_style(index, len(x)))
    low, high = mean - std, mean + std
    if scale == 100.0:
        low, high = np.clip([low, high], 0, 100)
    axes.fill_between(x, low, high, color=colour(index), alpha=alpha, linewidth=0)


def _style(index: int, points: int) -> dict[str, Any]:
    # The shape repeats what the colour says, for prints in grey.
    every = max(1, points // 10)
    return {
        "color": colour(index),
        "linestyle": line_style(index),
        "marker": shape(10 * index),
        "markevery": every,
        "markersize": 5,
        "linewidth": 1.8,
    }


def _handles(labels: Sequence[str], indices: Sequence[int] | None = None) -> list[Line2D]:
    places = range(len(labels)) if indices is None else indices
    return [
        Line2D([], [], label=plain(label, 80), **_style(index, 1)) for label, index in zip(labels, places, strict=True)
    ]


def _seeds(study: Study, method: str) -> int:
    """Return the number of seeds of ``method``; 0 where settings have different ones, as the tables show."""
    numbers = {len(group.runs) for setting in study.settings if (group := study.group(method, setting))}
    return numbers.pop() if len(numbers) == 1 else 0


def _panel_size(count: int) -> tuple[float, float]:
    return (8.5, 3.9) if count == 1 else (5.3, 4.1) if count == 2 else (4.2, 3.3)


def _label_left(panels: Sequence[Axes], text: str) -> None:
    for axes in panels:
        specification = axes.get_subplotspec()
        if specification is None or specification.is_first_col():
            axes.set_ylabel(text)


def _scale(axes: Axes, values: Sequence[str]) -> dict[str, float]:
    """Set the horizontal axis for ``values``, and return the place of each: numbers where they are all numbers."""
    numbers = [_number(value) for value in values]
    known = [number for number in numbers if number is not None]
    if len(known) < len(values):
        axes.set_xticks(range(len(values)), [plain(value, 20) for value in values])
        axes.set_xlim(-0.4, len(values) - 0.6)
        return {value: float(index) for index, value in enumerate(values)}
    if min(known) > 0 and max(known) / min(known) >= 10:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(known))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return dict(zip(values, known, strict=True))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if np.isfinite(value) else None


def _value(entry: dict[str, Any], key: str) -> float | None:
    name, _, rest = key.partition(".")
    found = entry.get(name)
    value = found.get(rest) if rest and isinstance(found, dict) else found
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        return None
    return float(value)
