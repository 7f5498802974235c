"""Reading the facts of a message from a mapping that somebody else filled, without trusting them."""

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def typed(header: Mapping[str, Any], key: str, who: str, kind: type[T]) -> T:
    """Return the entry ``key``; ``ValueError`` naming the sender unless it is of this ``kind``."""
    value = header.get(key)
    if isinstance(value, bool) or not isinstance(value, kind):
        shown = f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)
        raise ValueError(f"{who} sent {key}={shown}: {kind.__name__} is needed")
    return value


def whole(header: Mapping[str, Any], key: str, who: str, least: int) -> int:
    """Return the entry ``key``, a whole number of at ``least`` this."""
    value = typed(header, key, who, int)
    if value < least:
        raise ValueError(f"{who} sent {key}={value}: at least {least} is needed")
    return value


def numbers(header: Mapping[str, Any], key: str, who: str) -> tuple[int, ...]:
    """Return the entry ``key``, a list of whole numbers of at least 0."""
    values = header.get(key)
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
        raise ValueError(f"{who} sent {key}={values!r}: a list of whole numbers of at least 0 is needed")
    return tuple(values)


def texts(header: Mapping[str, Any], key: str, who: str) -> tuple[str, ...]:
    """Return the entry ``key``, a list of at least one text, all different."""
    values = header.get(key)
    good = isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)
    if not isinstance(values, list) or not good or len(set(values)) < len(values):
        raise ValueError(f"{who} sent {key}={values!r}: a list of at least one text, all different, is needed")
    return tuple(values)
