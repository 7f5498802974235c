"""How every figure of a report looks and is saved: colours, canvas, titles, legends, ticks."""

import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK = "#333333"
# Ten colours that stay apart for colour-blind readers (Petroff, 2021, arXiv:2107.02270).
_COLOURS = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadd",
)
_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
_LINE_STYLES = ("-", "--", "-.", ":")
# Written into every PNG, so that a later report knows its own files from the user's.
_SIGNATURE = "protofed-report"


def colour(index: int) -> str:
    """Return the colour of the line, class or model number ``index``."""
    return _COLOURS[index % len(_COLOURS)]


def shape(index: int) -> str:
    """Return the marker that, with ``colour``, tells the class number ``index`` from 99 others."""
    return _SHAPES[index // len(_COLOURS) % len(_SHAPES)]


def line_style(index: int) -> str:
    """Return the line style that, with ``colour``, tells the line number ``index`` from 39 others."""
    return _LINE_STYLES[index // len(_COLOURS) % len(_LINE_STYLES)]


def hatch(index: int) -> str:
    """Return the hatching that, with ``colour``, tells the bar number ``index`` from others."""
    return "/" * 3 * (index // len(_COLOURS))


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of ``width`` by ``height`` inches and its axes, without any global state."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#888888")
    axes.tick_params(color="#888888", labelcolor=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.set_axisbelow(True)
    return figure, axes


def title(axes: Axes, text: str, details: str) -> None:
    """Set a bold title with ``details`` in small grey letters below it, wrapped to the figure's width."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    lines = textwrap.wrap(plain(details), int(12.5 * (figure.get_figwidth() - 1)))
    axes.set_title(text, loc="left", fontweight="bold", fontsize=13, color=INK, pad=8 + 13 * len(lines))
    below = axes.annotate(
        "\n".join(lines),
        (0, 1),
        xytext=(0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9,
        color="#666666",
        va="bottom",
    )
    # The details may run on above a legend; the title's distance already keeps their height free.
    below.set_in_layout(False)


def legend(axes: Axes, handles: Sequence[Artist] | None = None, *, below: bool = False) -> None:
    """Put the legend outside the axes, in as many columns as its entries need."""
    entries = list(axes.get_legend_handles_labels()[0] if handles is None else handles)
    if not entries:
        return
    longest = max(len(str(entry.get_label())) for entry in entries)
    style: dict[str, Any] = {"frameon": False, "labelcolor": INK, "fontsize": 9 if len(entries) <= 24 else 7}
    if below:
        style |= {
            "loc": "upper left",
            "bbox_to_anchor": (0, -0.14),
            "ncols": 2 if len(entries) > 6 and longest <= 45 else 1,
        }
    else:
        style |= {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "ncols": 1 + (len(entries) - 1) // 36}
    axes.legend(handles=entries, **style)


def ticks(set_ticks: Callable[..., object], names: Sequence[str], most: int) -> None:
    """Name the places 0, 1, ... of an axis, at most ``most`` of them."""
    every = 1 + (len(names) - 1) // most
    places = list(range(0, len(names), every))
    set_ticks(places, [plain(names[place], 28) for place in places])


def plain(text: str, most: int = 200) -> str:
    """Return ``text`` so that matplotlib shows it as it is: no mathematics at ``$``, no hiding at ``_``.

    Beyond ``most`` letters it is cut, because a long name would leave no room for the axes.
    """
    escaped = (text if len(text) <= most else f"{text[: most - 1]}…").replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as PNG, whole or not at all.

    Raises
    ------
    ValueError
        If ``path`` exists and was not written by a report.
    OSError
        If the file cannot be written.
    """
    if path.exists() and _SIGNATURE.encode() not in path.read_bytes()[:1000]:
        raise ValueError(f"{path}: exists and is not a figure of protofed-report; choose another --output")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": _SIGNATURE})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
