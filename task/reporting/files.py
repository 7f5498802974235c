"""Reads what only a report needs of a result folder: the confusion matrix, and prototypes of several rounds."""

import csv
from pathlib import Path

import numpy as np
import numpy.typing as npt

from task.result_files import Prototypes, read_prototypes
from task.results import RunResult

_Counts = npt.NDArray[np.int64]


def read_confusion(path: Path) -> _Counts | None:
    """Read ``confusion.csv`` as ``(C, C)`` counts, rows the true classes; None where it is missing.

    Raises
    ------
    ValueError
        The file is no such matrix; names it.
    """
    if not path.exists():
        return None
    try:
        header, *rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
        counts = np.array([[int(cell) for cell in row[1:]] for row in rows], dtype=np.int64)
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: not a confusion matrix: {' '.join(str(error).split())}") from error
    classes = len(header) - 1
    if counts.shape != (classes, classes) or counts.size == 0 or counts.min() < 0:
        raise ValueError(f"{path}: not a confusion matrix: {classes} rows of {classes} counts of at least 0 are needed")
    return counts


def has_confusion(run: RunResult) -> bool:
    """Whether the run kept a confusion matrix."""
    return (run.folder / "confusion.csv").exists()


def read_history(run: RunResult) -> list[tuple[int, Prototypes]]:
    """Return the prototypes of the rounds that kept any, in order, the last ones included.

    Raises
    ------
    ValueError
        A file is malformed; names it.
    """
    last = run.rounds[-1]["round"] if run.rounds else 0
    found: dict[int, Prototypes] = {}
    for path in sorted((run.folder / "prototypes").glob("round-*.npz")):
        number = path.stem.partition("-")[2]
        prototypes = read_prototypes(path)
        if number.isdecimal() and int(number) < last and prototypes is not None:
            found[int(number)] = prototypes
    if run.prototypes is not None:
        found[last] = run.prototypes
    return sorted(found.items())
