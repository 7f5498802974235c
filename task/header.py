"""Reads single values of a message's header, and trusts none of them; errors name the sender and the key."""

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def typed(header: Mapping[str, Any], key: str, who: str, kind: type[T]) -> T:
    """Return the value at ``key``; ``ValueError`` unless it is of this ``kind``, a bool being no number."""
    value = header.get(key)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{who} sent {key}={value!r}: {kind.__name__} is needed")
    return value


def whole(header: Mapping[str, Any], key: str, who: str, least: int) -> int:
    """Return the whole number at ``key``; ``ValueError`` unless it is at least ``least``."""
    value = typed(header, key, who, int)
    if value < least:
        raise ValueError(f"{who} sent {key}={value}: at least {least} is needed")
    return value


def numbers(header: Mapping[str, Any], key: str, who: str) -> tuple[int, ...]:
    """Return the whole numbers of at least 0 at ``key``; ``ValueError`` for anything else."""
    values = header.get(key)
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
        raise ValueError(f"{who} sent {key}={values!r}: a list of whole numbers of at least 0 is needed")
    return tuple(v for v in values if isinstance(v, int))
