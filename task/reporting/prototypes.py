"""Figures of prototypes in two dimensions, those of clients and the global ones, by round."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from task.reporting.clients import FACTS, what
from task.reporting.drawing import INK, colour, dot, legend, panel_row, panel_title, plain, shape, title
from task.reporting.files import read_history
from task.result_files import Prototypes
from task.results import RunResult

_Floats = npt.NDArray[np.float64]
_Projected = tuple[_Floats, str, str]
_MANY = 30
"""Classes beyond which points get smaller and their names are left out."""


@dataclass(frozen=True, eq=False)
class Cloud:
    """The finite prototypes of one round: vectors ``(n, K)``, class ids and whether each is global ``(n,)``."""

    round: int
    vectors: _Floats
    ids: npt.NDArray[np.int64]
    is_global: npt.NDArray[np.bool_]


def has_prototypes(run: RunResult) -> bool:
    """Whether there are at least two finite prototypes to draw."""
    return run.prototypes is not None and len(_finite(0, run.prototypes).ids) > 1


def prototype_map(run: RunResult, projection: str) -> Figure:
    """Draw the prototypes of each round that kept them: clients' as dots, global ones as stars, one colour a class.

    All rounds are projected together, so that a way between two panels is a way of the prototypes.
    """
    assert run.prototypes is not None
    history = [(number, found) for number, found in read_history(run) if _same_width(found, run.prototypes)]
    clouds = [cloud for cloud in (_finite(number, found) for number, found in history) if len(cloud.ids)]
    points, horizontal, vertical = PROJECTIONS[projection](np.concatenate([cloud.vectors for cloud in clouds]))
    parts = np.split(points, np.cumsum([len(cloud.ids) for cloud in clouds])[:-1])
    size = (7.0, 6.0) if len(clouds) == 1 else (4.3, 4.0)
    figure, panels = panel_row(len(clouds), *size)
    classes = sorted({number for cloud in clouds for number in cloud.ids.tolist()})
    names = run.class_names(max(classes) + 1)
    for index, (axes, cloud, part) in enumerate(zip(panels, clouds, parts, strict=True)):
        _draw(axes, cloud, part, classes, names if len(classes) <= _MANY and len(clouds) == 1 else ())
        panel_title(axes, f"round {cloud.round}" if len(clouds) > 1 else "")
        if index % 3 == 0:
            axes.set_ylabel(vertical)
        axes.set_xlabel(horizontal)
        axes.grid(color="#eeeeee", linewidth=0.7)
    _limit(panels, points)
    shown = {"pca": "principal components", "tsne": "t-SNE"}[projection]
    title(panels[0], f"Prototypes ({shown})", what(run, *FACTS))
    kinds = [dot("o", "#888888", "of a client"), dot("*", "#888888", "global", 13)]
    legend(panels[0], kinds + [dot(shape(number), colour(number), names[number]) for number in classes])
    return figure


def _draw(axes: Axes, cloud: Cloud, points: _Floats, classes: Sequence[int], names: Sequence[str]) -> None:
    round_size, star = (6.0, 15.0) if len(classes) <= _MANY else (3.5, 11.0)
    for number in classes:
        own, stars = (points[(cloud.ids == number) & (cloud.is_global == kind)] for kind in (False, True))
        face = colour(number)
        axes.plot(*own.T, shape(number), color=face, markersize=round_size, alpha=0.85, mec="white", mew=0.4)
        axes.plot(*stars.T, "*", color=face, markersize=star, markeredgecolor=INK, mew=0.9, zorder=3)
        if names:
            _name_points(axes, stars, names[number])


def _limit(panels: Sequence[Axes], points: _Floats) -> None:
    """Show the same square in every panel: a distance must look the same everywhere and in both directions."""
    middle = (points.max(axis=0) + points.min(axis=0)) / 2
    half = 0.55 * max(float((points.max(axis=0) - points.min(axis=0)).max()), 1e-9)
    for axes in panels:
        axes.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half))
        axes.set_aspect("equal", adjustable="box")


def _same_width(first: Prototypes, second: Prototypes) -> bool:
    return first.client_vectors.shape[1:] == second.client_vectors.shape[1:]


def _name_points(axes: Axes, points: _Floats, name: str) -> None:
    """Write ``name`` beside each point, readable over dots, so that no reader depends on colour."""
    for x, y in points:
        note = axes.annotate(
            plain(name, 28), (x, y), xytext=(7, 6), textcoords="offset points", fontsize=8, color=INK, zorder=4
        )
        note.set_path_effects([withStroke(linewidth=2.5, foreground="white")])


def _finite(number: int, found: Prototypes) -> Cloud:
    """Return the prototypes of round ``number`` without those that diverged."""
    vectors = np.concatenate([found.client_vectors, found.global_vectors])
    ids = np.concatenate([found.client_class_ids, found.global_class_ids])
    is_global = np.arange(len(ids)) >= len(found.client_class_ids)
    finite = np.isfinite(vectors).all(axis=1)
    return Cloud(number, vectors[finite], ids[finite], is_global[finite])


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
    first, second = (f"component {i + 1} ({share:.0%} of variance)" for i, share in enumerate(shares))
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
