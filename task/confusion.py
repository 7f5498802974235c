"""How often each class was taken for which: a matrix, of which a message holds only the cells that are not zero."""

from collections.abc import Sequence

import torch
from torch import Tensor

MOST = 2**31
"""The largest number of samples that is believed."""


def to_cells(counts_CC: Tensor) -> tuple[list[int], list[int]]:
    """Return the cells of ``(C, C)`` that are not zero, numbered row by row, and what they hold."""
    flat = counts_CC.flatten().cpu()
    cells = flat.nonzero().flatten()
    return cells.tolist(), flat[cells].tolist()


def from_cells(cells: Sequence[int], counts: Sequence[int], num_classes: int) -> Tensor:
    """Return int64 ``(C, C)``, rows the true and columns the predicted classes.

    Raises
    ------
    ValueError
        The cells do not fit C classes, stand twice, or hold impossible counts.
    """
    if len(cells) != len(counts) or len(set(cells)) != len(cells):
        raise ValueError(f"{len(cells)} confusion cells with {len(counts)} counts: each cell once, with its count")
    if any(not 0 <= cell < num_classes**2 for cell in cells):
        raise ValueError(f"confusion cells that are not in 0..{num_classes**2 - 1}")
    if any(count < 1 for count in counts) or sum(counts) > MOST:
        raise ValueError(f"confusion counts that are not from 1 to {MOST}")
    flat = torch.zeros(num_classes**2, dtype=torch.int64)
    flat[torch.tensor(cells, dtype=torch.int64)] = torch.tensor(counts, dtype=torch.int64)
    return flat.view(num_classes, num_classes)
