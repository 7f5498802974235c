"""Which configuration a run may go on with."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from task.config import to_yaml
from task.schema import Config

FREE_KEYS = (
    "resume",
    "overwrite",
    "name",
    "federation.rounds",
    "federation.checkpoint_every",
    "federation.cpus_per_client",
    "federation.gpus_per_client",
    "federation.node_timeout",
    "federation.round_timeout",
    "federation.on_failure",
    "federation.min_replies",
    "federation.min_clients",
    "federation.max_prototype_norm",
    "federation.max_norm_ratio",
    "federation.state_dir",
    "federation.snapshots",
    "federation.stop_after",
    "listeners",
    "data.cache_dir",
    "experiment",
)
"""Settings that may differ: they change how a run is executed, how long it is, or what others report of the same.
Every other must stay as it was."""
LATER_KEYS = {"labels.warmup_rounds": 0}
"""Settings that earlier versions did not have, with the value that is what those did."""


def check_unchanged(config: Config, folder: Path) -> None:
    """Refuse to go on with the run in ``folder`` under another configuration.

    Raises
    ------
    ValueError
        One line with every setting that differs, or the file that is missing or damaged.
    """
    path = folder.expanduser() / "config.yaml"
    try:
        before = OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8")))
    except (OSError, OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"resume={str(folder)!r}: {path} cannot be read: {error}") from error
    now = OmegaConf.to_container(OmegaConf.create(to_yaml(config)))
    old, new = LATER_KEYS | _flatten(before), _flatten(now)
    changed = [key for key in sorted(set(old) | set(new)) if old.get(key) != new.get(key) and not _is_free(key)]
    if changed:
        pairs = ", ".join(f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in changed[:5])
        raise ValueError(f"resume={str(folder)!r}: the configuration has changed ({pairs}); start a new run instead")


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in FREE_KEYS)


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for name, child in tree.items():
        flat |= _flatten(child, f"{prefix}.{name}" if prefix else str(name))
    return flat
