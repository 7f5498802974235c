"""Reading what comes from elsewhere, without trusting it: every fact has a type, a range, and a sender to name."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

MOST_SAMPLES = 2**31
"""More samples than any client is believed to hold."""
LARGEST_NORM = 1e6
"""The largest norm of a prototype that is believed, where nobody says otherwise."""
LARGEST_WEIGHT = 1e9
"""The largest weight of a model that is believed, in size; sums of such numbers stay finite."""
LARGEST_METRIC = 1e30
"""The largest metric that is believed, in size; sums of such numbers stay finite."""
MOST_METRICS = 32
LONGEST_NAME = 64
T = TypeVar("T")


def one_line(text: str) -> str:
    """Return ``text`` as at most 500 printable characters in one line, for logs and records."""
    words = " ".join(text[:2000].split())
    return "".join(letter if letter.isprintable() else "?" for letter in words)[:500]


def typed(header: Mapping[str, Any], key: str, who: str, kind: type[T]) -> T:
    """Return an entry of a ``kind``; ``ValueError`` naming ``who`` sent it when it is missing or another."""
    value = header.get(key)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{who} sent {key}={_shown(value)}: {kind.__name__} is needed")
    return value


def whole(header: Mapping[str, Any], key: str, who: str, least: int, most: int | None = None) -> int:
    """Return a whole number from ``least`` to ``most``; ``ValueError`` as in ``typed``."""
    value = typed(header, key, who, int)
    if value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{who} sent {key}={_shown(value)}: {allowed} is needed")
    return value


def samples(header: Mapping[str, Any], key: str, who: str) -> int | None:
    """Return a number of samples, None where the sender keeps it to itself; ``ValueError`` as in ``typed``."""
    return whole(header, key, who, 0, MOST_SAMPLES) if key in header else None


def numbers(header: Mapping[str, Any], key: str, who: str) -> tuple[int, ...]:
    """Return a list of numbers of samples, ids or sizes; ``ValueError`` as in ``typed``."""
    values = header.get(key)
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
        raise ValueError(f"{who} sent {key}={_shown(values)}: a list of whole numbers of at least 0 is needed")
    if max(values, default=0) > MOST_SAMPLES:
        raise ValueError(f"{who} sent {key} with {_shown(max(values))}: at most {MOST_SAMPLES} is needed")
    return tuple(values)


def texts(header: Mapping[str, Any], key: str, who: str) -> tuple[str, ...]:
    """Return the entry ``key``, a list of at least one text, all different."""
    values = header.get(key)
    good = isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)
    if not isinstance(values, list) or not good or len(set(values)) < len(values):
        raise ValueError(f"{who} sent {key}={_shown(values)}: a list of at least one text, all different, is needed")
    return tuple(values)


def metrics(record: Mapping[str, Any], who: str) -> dict[str, float]:
    """Return a few numbers by name, finite ones of a size that can be summed; ``ValueError`` naming the first other."""
    if len(record) > MOST_METRICS:
        raise ValueError(f"{who} sent {len(record)} metrics: at most {MOST_METRICS} are needed")
    values = {}
    for key, value in record.items():
        if not (key.isascii() and key.isprintable() and len(key) <= LONGEST_NAME):
            raise ValueError(f"{who} sent a metric called {_shown(key)}: a short word is needed")
        if not isinstance(value, int | float) or not -LARGEST_METRIC <= value <= LARGEST_METRIC:
            raise ValueError(f"{who} sent metrics.{key}={_shown(value)}: a finite number of moderate size is needed")
        values[key] = float(value)
    return values


def check_weights(arrays: Mapping[str, np.ndarray[Any, Any]], who: str) -> None:
    """Refuse weights that are not finite, or too large to be anybody's; ``ValueError`` naming the first."""
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{who} sent weights.{one_line(name)[:LONGEST_NAME]} that is not finite (NaN or Inf)")
        most = LARGEST_WEIGHT if np.issubdtype(array.dtype, np.floating) else MOST_SAMPLES
        if array.size and (array.max() > most or array.min() < -most):
            raise ValueError(f"{who} sent weights.{one_line(name)[:LONGEST_NAME]} beyond {most:g}")


def check_prototypes(
    ids: np.ndarray[Any, Any],
    vectors: np.ndarray[Any, Any],
    counts: np.ndarray[Any, Any] | None,
    who: str,
    num_classes: int,
    width: int,
    largest_norm: float,
) -> None:
    """Refuse prototypes that do not fit C classes of width K, or cannot be features; ``ValueError`` naming why."""
    if ids.ndim != 1 or vectors.shape != (len(ids), width):
        shapes = f"class-ids {ids.shape}, vectors {vectors.shape}"
        raise ValueError(f"{who} sent prototypes of shape {shapes}: (n,) and (n, {width}) are needed")
    if len(ids) and (ids.min() < 0 or ids.max() >= num_classes):
        raise ValueError(f"{who} sent class ids {ids.min()}..{ids.max()}: they must be in 0..{num_classes - 1}")
    if len(np.unique(ids)) != len(ids):
        raise ValueError(f"{who} sent a class id twice")
    if not np.isfinite(vectors).all():
        raise ValueError(f"{who} sent prototypes that are not finite (NaN or Inf)")
    norm = np.linalg.norm(vectors.astype(np.float64), axis=1).max(initial=0)
    if norm > largest_norm:
        raise ValueError(f"{who} sent a prototype of norm {norm:.4g}: at most {largest_norm:.4g} is allowed")
    if counts is not None and (
        counts.shape != ids.shape or (len(counts) and (counts.min() < 1 or counts.max() > MOST_SAMPLES))
    ):
        raise ValueError(f"{who} sent malformed counts: one per class, from 1 to {MOST_SAMPLES}")


def _shown(value: object) -> str:
    """Return a foreign value so that it neither breaks a line nor fills a page."""
    if isinstance(value, int) and not -(10**20) < value < 10**20:
        return "a number of more than 20 digits"  # Python refuses to print longer ones
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = repr(value) if not isinstance(value, float) or math.isfinite(value) else str(value)
    return one_line(text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}...")
