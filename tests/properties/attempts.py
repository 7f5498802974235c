"""What properties share: a call that may refuse what it is given, but only as the product promises to."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def attempt(call: Callable[[], T]) -> tuple[T | None, str]:
    """Return what ``call`` returns, or None and its refusal: a ``ValueError`` of one line; anything else passes on."""
    try:
        return call(), ""
    except ValueError as error:
        text = str(error)
    assert text
    assert "\n" not in text
    return None, text
