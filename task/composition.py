"""Hydra's part in a configuration: ``conf/`` and overrides to one tree, and its errors in one line each."""

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from task.launch_settings import LaunchConfig

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
SWEEP = "sweep="
LAUNCH = "launch"
"""The node of the settings that belong to the command ``protofed`` and to no run."""


def compose_words(words: Sequence[str]) -> DictConfig:
    """Compose ``conf/`` with Hydra overrides.

    Raises
    ------
    ValueError
        One line for an unknown name, with the nearest known ones, or for what Hydra cannot read.
    """
    removed = [word for word in words if word.startswith("~")]
    if removed:  # a default that nobody sees would come in its place
        word = " ".join(removed[0].split())
        raise ValueError(f"{word} is not allowed: give the setting a value instead of removing it")
    try:
        return _compose(words)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(one_line(error, words)) from error


def load_launch(words: Sequence[str]) -> LaunchConfig:
    """Return the settings of the command itself that these overrides give; ``ValueError`` in one line."""
    return launch_of(compose_words(words), words)


def launch_of(tree: DictConfig, words: Sequence[str]) -> LaunchConfig:
    """Return the settings of the command itself in a whole ``tree``; ``ValueError`` as in ``load_launch``."""
    try:
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(LaunchConfig), tree[LAUNCH]))
    except (OmegaConfBaseException, ValueError) as error:
        line = one_line(error, words)
        raise ValueError(line if f"{LAUNCH}." in line else f"{LAUNCH}.{line}") from error
    assert isinstance(settings, LaunchConfig)
    return settings


def without_plus(words: Iterable[str]) -> list[str]:
    """Return Hydra overrides in which ``+debug=smoke`` has become ``debug=smoke``; Hydra itself refuses the plus."""
    return [re.sub(r"^\+(?=(experiment|sweep|debug)=)", "", word) for word in words]


def groups() -> list[str]:
    """Return the names of the groups of ``conf/``."""
    return sorted(folder.name for folder in CONF_DIR.iterdir() if folder.is_dir() and any(folder.glob("*.yaml")))


def options(group: str) -> list[str]:
    """Return the names that the group has, for ``group=NAME``."""
    files = (file.relative_to(CONF_DIR / group) for file in (CONF_DIR / group).rglob("*.yaml"))
    return sorted(file.with_suffix("").as_posix() for file in files)


def nearest(key: str, known: Sequence[str]) -> str:
    """Return the end of a message: the known names nearest to ``key``, or where to look for all of them."""
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    return f"; nearest known: {', '.join(close)}" if close else "; `protofed --cfg job` shows all settings"


def one_line(error: Exception, words: Sequence[str]) -> str:
    """Turn Hydra's message of several lines into one, naming the key and the nearest known ones."""
    text = str(error)
    if isinstance(error.__cause__, ValueError) and not isinstance(error.__cause__, OmegaConfBaseException):
        return str(error.__cause__).splitlines()[0]
    absent = re.search(r"Could not find '([\w/-]+)/([^/']+)'", text)
    if absent and "Available options" in text:
        known = text.split("Available options in ", 1)[1].split(":\n", 1)[-1].split("Config search path")[0].split()
        close = nearest(absent[2], known) if difflib.get_close_matches(absent[2], known, 1, 0.5) else ""
        return f"{absent[1]}={absent[2]} is not known{close or _listed(known)}"
    missing = re.search(r"Could not override '(.+?)'", text)
    if missing:
        return unknown_key(missing.group(1), words)
    absent = re.search(r"Key '(\w+)' not in '", text)  # what a word with a plus would add below
    if absent:
        keys = [word.lstrip("+~").split("=")[0] for word in words]
        return unknown_key(next((key for key in keys if absent[1] in key.split(".")), absent[1]), words)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    place = re.search(r"full_key: (\S+)", text)
    noise = ("full_key:", "reference_type=", "object_type=", "Config search path", "provider=", "set env variable")
    line = " ".join(line for line in lines if not line.startswith(noise))
    return f"{place.group(1)}: {line}" if place and place.group(1) not in line else line


def unknown_key(key: str, words: Sequence[str]) -> str:
    """Say that there is no setting and no group ``key``, with the nearest that there are."""
    kept = [word for word in words if word.lstrip("+~").split("=")[0] != key]
    try:
        known = _flat_keys(OmegaConf.to_container(_compose(kept)))
    except (HydraException, OmegaConfBaseException):
        known = []
    if "." not in key and (close := difflib.get_close_matches(key, groups(), n=3, cutoff=0.5)):
        return f"unknown setting or group {key!r}; nearest known: {', '.join(close)}"
    return f"unknown setting {key!r}{nearest(key, known)}"


def _compose(words: Sequence[str]) -> DictConfig:
    with initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3", job_name="protofed"):
        return compose(config_name="config", overrides=list(words))


def _listed(known: Sequence[str]) -> str:
    return f"; known: {', '.join(known)}"


def _flat_keys(tree: Any, prefix: str = "") -> list[str]:
    if not isinstance(tree, dict):
        return [prefix]
    return [key for name, child in tree.items() for key in _flat_keys(child, f"{prefix}.{name}".lstrip("."))]
