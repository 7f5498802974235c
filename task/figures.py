"""The figures of a report. Only ``protofed-report`` imports this file, because matplotlib starts slowly."""

import textwrap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from task.comparison import Group, Statistic, settings_of, short_labels
from task.drawing import INK, canvas, colour, hatch, legend, line_style, plain, shape, ticks, title
from task.results import RunResult

_FACTS = ("algorithm", "data", "partition", "model")
_Floats = npt.NDArray[np.float64]
_Projected = tuple[_Floats, str, str]


def curve(group: Group) -> tuple[list[int], list[Statistic]]:
    """Return the rounds that were evaluated under every seed of ``group``, and the accuracies there."""
    by_seed = [
        {entry["round"]: entry["accuracy"] for entry in run.rounds if entry["accuracy"] is not None}
        for run in group.runs
    ]
    # A mean over a changing set of seeds would jump where a seed comes or goes.
    rounds = sorted(set.intersection(*map(set, by_seed)))
    return rounds, [Statistic.of(accuracies[number] for accuracies in by_seed) for number in rounds]


def accuracy_by_round(groups: Sequence[Group]) -> Figure:
    """Draw one line a group: the mean accuracy over its seeds, in a band of one standard deviation."""
    # Wrapped, never cut: the rule stands at the end of the label.
    labels = [textwrap.fill(label, 95) for label in short_labels(groups)]
    lines = sum(1 + label.count("\n") for label in labels)
    figure, axes = canvas(8.5, 5.0 + 0.22 * lines)
    for index, (group, label) in enumerate(zip(groups, labels, strict=True)):
        rounds, values = curve(group)
        mean = np.array([100 * (value.mean or 0.0) for value in values])
        std = np.array([100 * (value.std or 0.0) for value in values])
        if not rounds:
            continue
        axes.plot(
            rounds,
            mean,
            line_style(index),
            color=colour(index),
            # The shape repeats what the colour says, for prints in grey.
            marker=shape(10 * index),
            markevery=max(1, len(rounds) // 12),
            markersize=5,
            label=plain(label, 1000),
        )
        low, high = np.clip([mean - std, mean + std], 0, 100)
        axes.fill_between(rounds, low, high, color=colour(index), alpha=0.18, linewidth=0)
    averagings = {group.settings["accuracy_averaging"] for group in groups}
    over = f", mean over {averagings.pop()}" if len(averagings) == 1 else ""
    axes.set(xlabel="round", ylabel=f"accuracy (%{over})")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    alone = len(groups) == len(groups[0].runs) == 1
    band = "mean over n seeds, in a band of ± one sample standard deviation"
    title(axes, "Accuracy by round", _what(groups[0].runs[0], *_FACTS) if alone else band)
    legend(axes, below=True)
    return figure


def classes_by_client(run: RunResult) -> Figure:
    """Draw how many images of each class each client holds; grey where a client does not share its counts."""
    count = max(len(client.class_counts or ()) for client in run.clients)
    rows = [client.class_counts or [np.nan] * count for client in run.clients]
    counts = np.array(rows, dtype=np.float64).T
    figure, axes = canvas(min(20.0, 4.2 + 0.36 * len(rows)), min(16.0, 2.6 + 0.27 * count))
    # The square root keeps a few images of a class visible beside thousands; no image at all stays white.
    blues = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))
    colours = blues.with_extremes(under="white", bad="#cccccc")
    norm = PowerNorm(0.5, vmin=0.5, vmax=max(1.0, np.nanmax(counts)))
    image = axes.imshow(counts, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    ticks(axes.set_xticks, [str(client.partition) for client in run.clients], 40)
    ticks(axes.set_yticks, run.class_names(count), 60)
    axes.set(xlabel="client (partition)", ylabel="class")
    # Lines between the cells, because white cells side by side cannot be counted.
    axes.set_xticks(np.arange(1, len(rows)) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, count) - 0.5, minor=True)
    axes.set_axisbelow(False)
    axes.grid(which="minor", color="#e4e4e4", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    if counts.size <= 400:
        for (row, column), value in np.ndenumerate(counts):
            ink = "white" if norm(value) > 0.5 else INK
            text = f"{value:.0f}" if value > 0 else ""
            axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=ink)
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=30, label="images (train and test)")
    bar.outline.set_visible(False)
    unshared = sum(client.class_counts is None for client in run.clients)
    hidden = f"; grey: {unshared} clients do not share their counts" if unshared else ""
    title(axes, "Classes by client", _what(run, "data", "partition") + hidden)
    return figure


def has_prototypes(run: RunResult) -> bool:
    """Whether there are at least two finite prototypes to draw."""
    return run.prototypes is not None and len(_finite_prototypes(run)[0]) > 1


def prototype_map(run: RunResult, projection: str) -> Figure:
    """Draw all prototypes in two dimensions: clients' as dots, global ones as stars, one colour a class."""
    vectors, ids, is_global = _finite_prototypes(run)
    points, horizontal, vertical = PROJECTIONS[projection](vectors)
    figure, axes = canvas(8.5, 6.5)
    classes = sorted(set(ids.tolist()))
    names = run.class_names(max(classes) + 1)
    dot, star = (6, 17) if len(classes) <= 30 else (3.5, 12)
    for number in classes:
        own, stars = (points[(ids == number) & (is_global == kind)] for kind in (False, True))
        face = colour(number)
        axes.plot(*own.T, shape(number), color=face, markersize=dot, alpha=0.85, mec="white", mew=0.4)
        axes.plot(*stars.T, "*", color=face, markersize=star, markeredgecolor=INK, mew=0.9, zorder=3)
        if len(classes) <= 30:
            _name_points(axes, stars, names[number])
    axes.set(xlabel=horizontal, ylabel=vertical)
    # A distance must look the same in both directions.
    axes.set_aspect("equal", adjustable="datalim")
    axes.grid(color="#eeeeee", linewidth=0.7)
    shown = {"pca": "principal components", "tsne": "t-SNE"}[projection]
    title(
        axes,
        f"Prototypes at the end of the run ({shown})",
        _what(run, *_FACTS),
    )
    legend(
        axes,
        [_dot("o", "#888888", "of a client"), _dot("*", "#888888", "global", 13)]
        + [_dot(shape(number), colour(number), names[number]) for number in classes],
    )
    return figure


def accuracy_by_client(run: RunResult) -> Figure:
    """Draw each client's best accuracy as a bar in its model's colour, its last one as a dot; best first."""
    known = [client for client in run.clients if client.best_accuracy is not None]
    known.sort(key=lambda client: (-(client.best_accuracy or 0.0), client.partition))
    models = sorted({client.model for client in known})
    figure, axes = canvas(min(20.0, 5.5 + 0.28 * len(known)), 4.8)
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
    title(axes, "Accuracy by client", f"{_what(run, *_FACTS)}, {rule} rule")
    handles: list[Artist] = [_dot("o", "white", "last round")]
    handles += [
        Patch(facecolor=colour(index), hatch=hatch(index), edgecolor="white", label=plain(f"best, {model}", 34))
        for index, model in enumerate(models)
    ]
    legend(axes, handles)
    return figure


def _what(run: RunResult, *keys: str) -> str:
    settings = settings_of(run)
    return ", ".join([*(settings[key] for key in keys), f"seed {run.seed}"])


def _dot(marker: str, face: str, label: str, size: float = 6.5) -> Line2D:
    """Return a legend entry that shows one marker."""
    edge = INK if face in ("white", "#888888") else face
    return Line2D(
        [],
        [],
        linestyle="",
        marker=marker,
        color=face,
        markeredgecolor=edge,
        markersize=size,
        label=plain(label, 28),
    )


def _name_points(axes: Axes, points: _Floats, name: str) -> None:
    """Write ``name`` beside each point, readable over dots, so that no reader depends on colour."""
    for x, y in points:
        note = axes.annotate(
            plain(name, 28), (x, y), xytext=(7, 6), textcoords="offset points", fontsize=8, color=INK, zorder=4
        )
        note.set_path_effects([withStroke(linewidth=2.5, foreground="white")])


def _finite_prototypes(run: RunResult) -> tuple[_Floats, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return vectors ``(n + N, K)``, classes and whether each is global, without those that diverged."""
    assert run.prototypes is not None
    found = run.prototypes
    kinds = [
        (vectors, ids, is_global)
        for vectors, ids, is_global in (
            (found.client_vectors, found.client_class_ids, False),
            (found.global_vectors, found.global_class_ids, True),
        )
        if len(ids)
    ]
    if not kinds:
        return np.empty((0, 1)), np.empty(0, np.int64), np.empty(0, np.bool_)
    vectors = np.concatenate([vectors for vectors, _, _ in kinds])
    ids = np.concatenate([ids for _, ids, _ in kinds])
    is_global = np.concatenate([np.full(len(ids), kind) for _, ids, kind in kinds])
    finite = np.isfinite(vectors).all(axis=1)
    return vectors[finite], ids[finite], is_global[finite]


def _principal_components(vectors: _Floats) -> _Projected:
    """Project ``(N, K)`` onto the two directions of the largest variance."""
    centred = vectors - vectors.mean(axis=0)
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    points = np.zeros((len(vectors), 2))
    points[:, : min(2, len(singular))] = (left * singular)[:, :2]
    # The sign of a component is arbitrary; this one makes the same picture from the same prototypes.
    points *= np.where(points[np.abs(points).argmax(axis=0), [0, 1]] < 0, -1.0, 1.0)
    shares = np.zeros(2)
    shares[: min(2, len(singular))] = (singular**2 / max(float((singular**2).sum()), 1e-300))[:2]
    first, second = (f"principal component {i + 1} ({share:.0%} of the variance)" for i, share in enumerate(shares))
    return points, first, second


def _t_sne(vectors: _Floats) -> _Projected:
    """Embed ``(N, K)`` by t-SNE, started from the principal components and therefore repeatable."""
    if len(vectors) < 5:
        return _principal_components(vectors)
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped, unused-ignore]

    perplexity = min(30.0, (len(vectors) - 1) / 3)
    start = "pca" if vectors.shape[1] > 1 else "random"
    method = TSNE(perplexity=perplexity, init=start, random_state=0)
    # A few hundred points gain nothing from more threads, and lose much where the cores are shared.
    with threadpool_limits(1):
        points = np.asarray(method.fit_transform(vectors), dtype=np.float64)
    first, second = (f"t-SNE dimension {i} (no unit; perplexity {perplexity:.3g})" for i in (1, 2))
    return points, first, second


PROJECTIONS = {"pca": _principal_components, "tsne": _t_sne}
