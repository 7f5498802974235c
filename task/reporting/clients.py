"""Figures of clients: which classes each holds, how well each does, and which classes are taken for which."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from task.comparison import Group, settings_of
from task.reporting.drawing import (
    INK,
    canvas,
    colour,
    dot,
    grid_lines,
    hatch,
    legend,
    panel_row,
    panel_title,
    plain,
    ticks,
    title,
)
from task.reporting.files import read_confusion
from task.reporting.study import Study
from task.results import RunResult

FACTS = ("algorithm", "data", "partition", "model")


def classes_by_client(run: RunResult) -> Figure:
    """Draw how many images of each class each client holds; grey where a client does not share its counts."""
    count = max(len(client.class_counts or ()) for client in run.clients)
    rows = [client.class_counts or [np.nan] * count for client in run.clients]
    counts = np.array(rows, dtype=np.float64).T
    figure, axes = canvas(min(20.0, 4.2 + 0.36 * len(rows)), min(16.0, 2.2 + 0.27 * count))
    # The square root keeps a few images of a class visible beside thousands; no image at all stays white.
    heat_map(axes, counts, PowerNorm(0.5, vmin=0.5, vmax=max(1.0, np.nanmax(counts))), numbered=counts.size <= 400)
    ticks(axes.set_xticks, [str(client.partition) for client in run.clients], 40)
    ticks(axes.set_yticks, run.class_names(count), 60)
    axes.set(xlabel="client (partition)", ylabel="class")
    scale_bar(axes, "images (train and test)")
    unshared = sum(client.class_counts is None for client in run.clients)
    hidden = f"; grey: {unshared} clients do not share their counts" if unshared else ""
    title(axes, "Classes by client", what(run, "data", "partition") + hidden)
    return figure


def box_values(study: Study, setting: str) -> dict[str, list[float]]:
    """Return the last accuracies, in percent, of all clients and seeds of each method under ``setting``."""
    found = {}
    for method in study.methods:
        group = study.group(method, setting)
        runs = group.runs if group else ()
        values = [client.last_accuracy for run in runs for client in run.clients]
        known = [100 * value for value in values if value is not None]
        if known:
            found[method] = known
    return found


def accuracy_boxes(study: Study, settings: Sequence[str]) -> Figure:
    """Draw a panel a setting and a box a method over the last accuracies of its clients, each client as a dot."""
    methods = [method for method in study.methods if any(method in box_values(study, each) for each in settings)]
    height = 1.3 + 0.42 * len(methods)
    figure, panels = panel_row(len(settings), 8.5 if len(settings) == 1 else 4.6, height)
    for axes, setting in zip(panels, settings, strict=True):
        for method, values in box_values(study, setting).items():
            _box(axes, values, methods.index(method), colour(study.index(method)))
        axes.set_yticks(range(len(methods)), [plain(method, 40) for method in methods])
        axes.set_ylim(len(methods) - 0.4, -0.6)
        axes.set_xlabel("last accuracy on own test images (%)")
        grid_lines(axes, "x")
        panel_title(axes, setting)
    title(panels[0], "Accuracy of all clients", "box: quartiles and median; whiskers: 1.5 quartile distances at most")
    return figure


def accuracy_by_client(run: RunResult) -> Figure:
    """Draw each client's best accuracy as a bar in its model's colour, its last one as a dot; best first."""
    known = [client for client in run.clients if client.best_accuracy is not None]
    known.sort(key=lambda client: (-(client.best_accuracy or 0.0), client.partition))
    models = sorted({client.model for client in known})
    figure, axes = canvas(min(20.0, 4.6 + 0.19 * len(known)), 4.0)
    axes.bar(
        range(len(known)),
        [100 * (client.best_accuracy or 0.0) for client in known],
        color=[colour(models.index(client.model)) for client in known],
        hatch=[hatch(models.index(client.model)) for client in known],
        edgecolor="white",
    )
    last = [np.nan if client.last_accuracy is None else 100 * client.last_accuracy for client in known]
    axes.plot(range(len(known)), last, "o", color="white", markeredgecolor=INK, markeredgewidth=1.2, markersize=5.5)
    ticks(axes.set_xticks, [str(client.partition) for client in known], 60)
    axes.set(xlabel="client (partition), best first", ylabel="accuracy on own test images (%)", ylim=(0, 103))
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.margins(x=0.01)
    rule = settings_of(run)["accuracy_rule"]
    title(axes, "Accuracy by client", f"{what(run, *FACTS)}, {rule} rule")
    handles: list[Artist] = [dot("o", "white", "last round")]
    handles += [
        Patch(facecolor=colour(index), hatch=hatch(index), edgecolor="white", label=plain(f"best, {model}", 34))
        for index, model in enumerate(models)
    ]
    legend(axes, handles)
    return figure


def confusion(group: Group) -> npt.NDArray[np.int64] | None:
    """Return the confusion matrix over all seeds of ``group``; None where none kept any.

    Raises
    ------
    ValueError
        A file is malformed, or those of the seeds have different classes.
    """
    found = [matrix for run in group.runs if (matrix := read_confusion(run.folder / "confusion.csv")) is not None]
    if len({matrix.shape for matrix in found}) > 1:
        raise ValueError(f"{group.runs[0].folder}: confusion.csv has other classes than those of the other seeds")
    return np.sum(found, axis=0, dtype=np.int64) if found else None


def confusion_matrix(group: Group) -> Figure:
    """Draw how often each true class (row) was taken for which (column), in percent of the row."""
    counts = confusion(group)
    assert counts is not None
    count = len(counts)
    shares = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure, axes = canvas(min(14.0, 3.4 + 0.42 * count), min(13.0, 2.2 + 0.36 * count))
    norm = PowerNorm(0.5, vmin=0.5, vmax=100)
    heat_map(axes, shares, norm, numbered=count <= 20)
    names = group.runs[0].class_names(count)
    ticks(axes.set_xticks, names, 60)
    ticks(axes.set_yticks, names, 60)
    if max(map(len, names)) > 3 or count > 20:
        axes.tick_params(axis="x", labelrotation=90)
    axes.set(xlabel="taken for", ylabel="true class")
    scale_bar(axes, "share of the true class (%)")
    title(axes, "Confusion matrix", f"{what(group.runs[0], *FACTS)[: -len(f', seed {group.runs[0].seed}')]}, all seeds")
    return figure


def what(run: RunResult, *keys: str) -> str:
    """Return in words which run a figure shows."""
    settings = settings_of(run)
    return ", ".join([*(settings[key] for key in keys), f"seed {run.seed}"])


def heat_map(axes: Axes, values: npt.NDArray[np.float64], norm: Normalize, *, numbered: bool) -> None:
    """Draw a matrix in blues: nothing stays white, what is not a number is grey, cells have lines between them."""
    blues: Colormap = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))
    blues = blues.with_extremes(under="white", bad="#cccccc")
    axes.imshow(values, cmap=blues, norm=norm, aspect="auto", interpolation="nearest")
    rows, columns = values.shape
    # Lines between the cells, because white cells side by side cannot be counted.
    axes.set_xticks(np.arange(1, columns) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, rows) - 0.5, minor=True)
    axes.set_axisbelow(False)
    axes.grid(which="minor", color="#e4e4e4", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    if numbered:
        for (row, column), value in np.ndenumerate(values):
            ink = "white" if norm(value) > 0.5 else INK
            text = f"{value:.0f}" if value >= 0.5 else ""
            axes.text(column, row, text, ha="center", va="center", fontsize=8 if columns <= 12 else 6.5, color=ink)


def scale_bar(axes: Axes, words: str) -> None:
    """Draw beside a heat map what its colours mean."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    bar = figure.colorbar(axes.images[0], ax=axes, pad=0.02, aspect=30)
    bar.set_label(words, color=INK)
    bar.ax.tick_params(colors=INK, labelsize=8)
    bar.outline.set_visible(False)


def _box(axes: Axes, values: Sequence[float], place: int, face: str) -> None:
    axes.boxplot(
        [values],
        positions=[place],
        widths=0.55,
        orientation="horizontal",
        showfliers=False,
        patch_artist=True,
        boxprops={"facecolor": face, "alpha": 0.35, "edgecolor": face},
        medianprops={"color": INK, "linewidth": 1.6},
        whiskerprops={"color": face},
        capprops={"color": face},
    )
    # Dots side by side where many are equal; the same picture from the same numbers.
    offsets = np.random.default_rng(0).uniform(-0.2, 0.2, len(values))
    axes.plot(values, place + offsets, "o", color=face, markersize=3, alpha=0.7, markeredgewidth=0)
