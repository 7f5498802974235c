"""How a bad setting is refused: in one line with its key, its value and what is allowed."""


def require(holds: bool, key: str, value: object, allowed: str) -> None:
    """Raise a ``ValueError`` of one line, with ``key``, ``value`` and what is ``allowed``, unless ``holds``."""
    if not holds:
        raise ValueError(f"{key}={value!r} is not allowed: {allowed}")


def require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a ``ValueError`` of one line unless ``value`` is one of ``choices``."""
    require(value in choices, key, value, "one of " + ", ".join(choices))
