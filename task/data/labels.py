"""Labels of any kind become 0..C-1, in one mapping that all clients share; -1 is an image without a label."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

NO_LABEL = -1
"""What stands for the class of an image without a label, in sources that name their classes and everywhere behind."""
LARGEST_LABEL = 2**53
"""Up to here floats hold every whole number."""


def encode_labels(
    labels: npt.NDArray[Any], class_names: Sequence[str] | None = None
) -> tuple[npt.NDArray[np.int64], tuple[str, ...], dict[str, int]]:
    """Map labels to class indices by sorted order.

    Where the source names its classes, integers 0..C-1 and the names themselves keep their place in that
    list, so a class without a single sample stays a class. There the integer -1 means that an image has no label,
    and stays -1; it does not in a source of two classes whose labels are -1 and 1, nor where no class is named.

    Parameters
    ----------
    labels
        ``(N,)`` integers, whole floats or strings.
    class_names
        The names of the C classes, or None for the labels found.

    Returns
    -------
    tuple
        ``(N,)`` int64 class indices, the C class names, and the mapping original label -> index.

    Raises
    ------
    ValueError
        Naming the label, when it is not whole, not a number, or has no class.
    """
    plain = _plain(labels)
    found, inverse = np.unique(plain, return_inverse=True)
    inverse = inverse.reshape(-1).astype(np.int64)
    signs = class_names is not None and len(class_names) == 2 and found.tolist() == [-1, 1]
    if class_names is not None and found.dtype.kind == "i" and NO_LABEL in found and not signs:
        known = plain != NO_LABEL
        indices = np.full(len(plain), NO_LABEL, dtype=np.int64)
        indices[known], names, mapping = encode_labels(plain[known], class_names)
        return indices, names, mapping
    originals = [str(label) for label in found]
    _require_text([*originals, *(class_names or ())])
    if class_names is None:
        return inverse, tuple(originals), {label: index for index, label in enumerate(originals)}
    names = tuple(class_names)
    if len(set(names)) != len(names):
        raise ValueError("class names must be different from one another")
    positions = _positions(found, names)
    mapping = {label: int(position) for label, position in zip(originals, positions, strict=True)}
    return positions[inverse], names, mapping


def _require_text(names: Sequence[str]) -> None:
    """Refuse names that cannot be printed in one line and written as text."""
    odd = next((name for name in names if not name.isprintable()), None)
    if odd is not None:
        raise ValueError(f"class name {odd!a} is not printable text; rename it")


def _plain(labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return labels as int64 or as strings."""
    if labels.ndim != 1:
        raise ValueError(f"labels must be one number or name for each image, got shape {labels.shape}")
    if np.issubdtype(labels.dtype, np.floating):
        wrong = np.flatnonzero(~np.isfinite(labels) | (labels != np.floor(labels)))
        if wrong.size:
            raise ValueError(f"label {labels[wrong[0]]} of sample {wrong[0]} is not a whole number")
    if labels.dtype.kind in "biuf":
        largest = np.abs(labels).max(initial=0) if labels.dtype.kind == "f" else labels.max(initial=0)
        if largest > LARGEST_LABEL:  # a cast would silently make another label of it
            raise ValueError(f"label {largest} is too large: at most {LARGEST_LABEL}")
        return labels.astype(np.int64)
    if labels.dtype.kind == "S":
        return np.char.decode(labels, "utf-8")
    if labels.dtype.kind == "U":
        return labels
    raise ValueError(f"labels must be whole numbers or strings, got type {labels.dtype}")


def _positions(found: npt.NDArray[Any], names: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Return the class index of each distinct label, given in sorted order."""
    if found.dtype.kind == "U":
        unknown = [str(label) for label in found if str(label) not in names]
        if unknown:
            raise ValueError(f"label {unknown[0]!r} is not among the {len(names)} class names")
        return np.array([names.index(str(label)) for label in found], dtype=np.int64)
    if found.size == 0 or (found[0] >= 0 and found[-1] < len(names)):
        return found.astype(np.int64)
    if len(found) == len(names):
        return np.arange(len(names), dtype=np.int64)
    outside = found[0] if found[0] < 0 else found[-1]
    raise ValueError(f"label {outside} is outside 0..{len(names) - 1}, the range of the {len(names)} classes")
