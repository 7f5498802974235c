"""How every figure of a report looks and is saved: colours, canvas, titles, legends, ticks."""

import base64
import io
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

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
# Written into every file, so that a later report knows its own from the user's.
SIGNATURE = "protofed-report"
LARGEST_SVG = 400_000
"""Bytes beyond which a figure of very many points is embedded as PNG."""
_TITLE = "title"
# Greys of the figures, and what they are on a dark page.
_DARK = {
    INK: "#dfe5ea",
    "#888888": "#8b96a0",
    "#666666": "#9aa6b2",
    "#dddddd": "#323b44",
    "#eeeeee": "#262e36",
    "#ffffff": "#191e23",
}


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
    figure, panels = panel_row(1, width, height)
    return figure, panels[0]


def panel_row(count: int, width: float, height: float, most: int = 3, share: bool = True) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``count`` panels of ``width`` by ``height`` inches each, at most ``most`` side by side.

    All have the same vertical scale, and with ``share`` the same horizontal one.
    """
    columns = min(count, most)
    rows = -(-count // columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained", facecolor="none")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=True)
    every = [axes for row in grid for axes in row]
    for axes in every[count:]:
        axes.remove()
    for axes in every[:count]:
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#888888")
        axes.tick_params(color="#888888", labelcolor=INK, labelsize=9, labelbottom=True)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.set_axisbelow(True)
    return figure, every[:count]


def title(axes: Axes, text: str, details: str = "") -> None:
    """Set the title of a whole figure above its only or first ``axes``, ``details`` in small grey letters below it.

    On a page, which has the words beside the figure, ``svg`` leaves it out.
    """
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    lines = textwrap.wrap(plain(details), int(12.5 * (figure.get_figwidth() - 1)))
    above = figure.suptitle(text, x=0.01, ha="left", fontweight="bold", fontsize=13, color=INK)
    above.set_gid(_TITLE)
    if lines:
        above.set_text(text + "\n" * len(lines))
        below = figure.text(0.01, 1, "\n".join(lines), fontsize=9, color="#666666", va="top", gid=_TITLE)
        below.set_in_layout(False)
        below.set_transform(figure.transFigure + ScaledTranslation(0, -26 / 72, figure.dpi_scale_trans))


def panel_title(axes: Axes, text: str) -> None:
    """Set the small title of one panel; none without ``text``."""
    if text:
        axes.set_title(plain(text, 60), loc="left", fontsize=10, color=INK, fontweight="bold")


def legend(axes: Axes, handles: Sequence[Artist] | None = None, *, below: bool = False) -> None:
    """Put the legend outside all axes of the figure: to the right of them, or ``below`` in a few columns."""
    entries = list(axes.get_legend_handles_labels()[0] if handles is None else handles)
    if not entries:
        return
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    longest = max(len(str(entry.get_label())) for entry in entries)
    style: dict[str, Any] = {"frameon": False, "labelcolor": INK, "fontsize": 9 if len(entries) <= 24 else 7}
    if below:
        columns = int(12.5 * figure.get_figwidth() / (longest + 8))
        style |= {"loc": "outside lower left", "ncols": max(1, min(len(entries), columns, 6))}
    else:
        style |= {"loc": "outside right upper", "ncols": 1 + (len(entries) - 1) // 36}
    figure.legend(handles=entries, **style)


def dot(marker: str, face: str, label: str, size: float = 6.5) -> Line2D:
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


def grid_lines(axes: Axes, axis: str = "y") -> None:
    """Draw faint lines behind the data."""
    axes.grid(axis="x" if axis == "x" else "y" if axis == "y" else "both", color="#dddddd", linewidth=0.7)


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
    buffer = io.BytesIO()
    tight: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.1}
    figure.savefig(buffer, format="png", dpi=150, facecolor="white", metadata={"Software": SIGNATURE}, **tight)
    write_own(path, buffer.getvalue())


def write_own(path: Path, content: bytes) -> None:
    """Write a file that bears the ``SIGNATURE``, whole or not at all; errors as in ``save``."""
    if path.exists() and SIGNATURE.encode() not in path.read_bytes()[:1000]:
        raise ValueError(f"{path}: exists and was not written by protofed-report; choose another --output")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def data_uri(figure: Figure, *, follows_scheme: bool) -> str:
    """Return ``figure`` without its title as an image inside a page: SVG, or PNG where that is much smaller.

    With ``follows_scheme`` the greys of an SVG follow the reader's light or dark scheme; colours are the same in both.
    """
    for text in figure.findobj(lambda artist: artist.get_gid() == _TITLE):
        text.set_visible(False)
    buffer = io.BytesIO()
    tight: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.06}
    with rc_context({"svg.hashsalt": SIGNATURE, "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": SIGNATURE}, **tight)
    if buffer.tell() > LARGEST_SVG:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=180, **tight)
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    svg = buffer.getvalue()
    if follows_scheme:
        svg = svg.replace(b"<defs>", f"<style>{_dark_style()}</style><defs>".encode(), 1)
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _dark_style() -> str:
    rules = (
        f'[style*="{kind}: {light}"]{{{kind}:{dark} !important}}'
        for light, dark in _DARK.items()
        for kind in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme: dark){{{''.join(rules)}}}"
