"""Settings that are paths: those marked ``path`` in ``task/schema.py``."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from task.schema import Config, require


def declared_paths(settings: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield key and value of every setting that is a path: a text, or a mapping of texts."""
    for each in dataclasses.fields(settings):
        value, key = getattr(settings, each.name), f"{prefix}{each.name}"
        if dataclasses.is_dataclass(value):
            yield from declared_paths(value, f"{key}.")
        elif each.metadata.get("path") and isinstance(value, str):
            yield key, value
        elif each.metadata.get("path") and isinstance(value, Mapping):
            yield from ((f"{key}.{name}", path) for name, path in value.items())


def require_absolute_paths(config: Config) -> None:
    """Refuse relative paths: server and clients do not work in the folder where the command was typed."""
    for key, value in declared_paths(config):
        require(Path(value).expanduser().is_absolute(), key, value, "an absolute path, or one that starts with ~")
