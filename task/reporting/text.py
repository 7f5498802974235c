"""A table as text: Markdown for a page, CSV for a program, LaTeX for a paper."""

import csv
import io
import re
from collections.abc import Mapping, Sequence

Rows = Sequence[Mapping[str, str]]
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"±": r"$\pm$", "…": r"\ldots{}"}


def as_markdown(rows: Rows) -> str:
    """Return ``rows`` with equal keys as an aligned Markdown table; empty without rows."""
    if not rows:
        return ""
    cells = [[text.replace("|", "\\|") for text in row] for row in (rows[0], *(row.values() for row in rows))]
    widths = [max(3, *(len(row[index]) for row in cells)) for index in range(len(cells[0]))]
    padded = [[f"{text:<{width}}" for text, width in zip(row, widths, strict=True)] for row in cells]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(row)} |" for row in padded) + "\n"


def as_csv(rows: Rows) -> str:
    """Return ``rows`` with equal keys as CSV; empty without rows."""
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_latex(rows: Rows) -> str:
    """Return ``rows`` with equal keys as a LaTeX tabular of the package booktabs; empty without rows."""
    if not rows:
        return ""
    kinds = "".join("r" if all(_is_number(row[key]) for row in rows) else "l" for key in rows[0])
    lines = [" & ".join(map(latex, row)) + r" \\" for row in (rows[0], *(row.values() for row in rows))]
    head = [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", lines[0], r"\midrule"]
    return "\n".join(["% needs \\usepackage{booktabs}", *head, *lines[1:], r"\bottomrule", r"\end{tabular}"]) + "\n"


def latex(text: str) -> str:
    """Return ``text`` so that LaTeX prints it as it is."""
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _is_number(text: str) -> bool:
    return bool(re.match(r"^([+-]?\d|-?$)", text))
