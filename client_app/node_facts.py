"""The facts of one machine, which its SuperNode was started with: the only place where ``--node-config`` is read."""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from task.messages import UNPLACED, Placement
from task.schema import Config

KEYS = ("partition-id", "num-partitions", "name", "data", "model", "role", "device", "state-dir", "cache-dir")
ROLES, DEVICES = ("labelled", "unlabelled"), ("auto", "cpu", "cuda")
LONGEST_NAME = 64
EXAMPLE = "start the SuperNode with --node-config 'partition-id=0 num-partitions=5', or 'name=\"north\"'"


@dataclass(frozen=True)
class NodeFacts:
    """Facts of one machine; null leaves a thing to the settings of the run.

    ``partition`` counts from 0 to ``num_partitions - 1``; of a machine that is known by ``name`` alone it is
    ``UNPLACED`` until the server has told it. ``data`` holds its own images, ``model`` is an entry of the model
    group, ``role`` says whether its images have labels.
    """

    partition: int
    num_partitions: int
    name: str = ""
    data: Path | None = None
    model: str | None = None
    role: str | None = None
    device: str | None = None
    state_dir: Path | None = None
    cache_dir: Path | None = None

    def placed(self, placement: Placement | None) -> "NodeFacts":
        """Return the facts with the place that the server gave; ``ValueError`` when it contradicts the own one."""
        if placement is None:
            return self
        place = placement.partition, placement.num_partitions
        if self.partition != UNPLACED and place != (self.partition, self.num_partitions):
            own = f"partition-id={self.partition} num-partitions={self.num_partitions}"
            raise ValueError(f"the server calls this node client {place[0]} of {place[1]}, its node-config {own}")
        return replace(self, partition=place[0], num_partitions=place[1])


def node_facts(node_config: Mapping[str, Any]) -> NodeFacts:
    """Read what a SuperNode was started with (``--node-config``); a simulation fills in the two numbers.

    Raises
    ------
    ValueError
        One line that names the node, with an example, for a missing, malformed or out-of-range fact.
    """
    with named_errors(node_config):
        return _read(node_config)


@contextmanager
def named_errors(node_config: Mapping[str, Any]) -> Iterator[None]:
    """Let every ``ValueError`` say which node it comes from: nobody knows a node by Flower's random number."""
    name, partition = node_config.get("name"), node_config.get("partition-id")
    who = f"client {partition}" if isinstance(partition, int) else ""
    who = f"node {name!r}" if name and isinstance(name, str) else who
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise ValueError(text if not who or text.startswith(who) else f"{who}: {text}") from error


def _read(node_config: Mapping[str, Any]) -> NodeFacts:
    unknown = sorted(set(node_config) - set(KEYS))
    if unknown:
        close = difflib.get_close_matches(unknown[0], KEYS, n=1)
        nearest = f"; nearest: {close[0]}" if close else ""
        raise ValueError(f"node-config {unknown[0]!r} is unknown; known: {', '.join(KEYS)}{nearest}")
    name = _text(node_config, "name")
    if name is not None and not (0 < len(name) <= LONGEST_NAME and all(c.isalnum() or c in "-_." for c in name)):
        allowed = f"up to {LONGEST_NAME} letters, digits, '-', '_' and '.'"
        raise ValueError(f"node-config name={name!r} is not allowed: {allowed}")
    place = UNPLACED, 0
    if name is None or {"partition-id", "num-partitions"} & set(node_config):
        place = _place(node_config)
    return NodeFacts(
        *place,
        name=name or "",
        data=_path(node_config, "data"),
        model=_text(node_config, "model"),
        role=_choice(node_config, "role", ROLES),
        device=_choice(node_config, "device", DEVICES),
        state_dir=_path(node_config, "state-dir"),
        cache_dir=_path(node_config, "cache-dir"),
    )


def _place(node_config: Mapping[str, Any]) -> tuple[int, int]:
    numbers = []
    for key in ("partition-id", "num-partitions"):
        value = node_config.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"node-config {key}={value!r} is not a whole number; {EXAMPLE}")
        numbers.append(value)
    partition, total = numbers
    if not 0 <= partition < total:
        raise ValueError(f"node-config partition-id={partition} is not in 0..{total - 1}; {EXAMPLE}")
    return partition, total


def _text(node_config: Mapping[str, Any], key: str) -> str | None:
    value = node_config.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"node-config {key}={value!r} is not allowed: text in double quotes")
    return value


def _choice(node_config: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> str | None:
    value = _text(node_config, key)
    if value is not None and value not in choices:
        raise ValueError(f"node-config {key}={value!r} is not allowed: one of {', '.join(choices)}")
    return value


def _path(node_config: Mapping[str, Any], key: str) -> Path | None:
    value = _text(node_config, key)
    path = Path(value).expanduser() if value is not None else None
    if path is not None and not path.is_absolute():
        raise ValueError(f"node-config {key}={value!r} is not allowed: an absolute path, or one that starts with ~")
    return path


def has_labels(config: Config, node: NodeFacts) -> bool:
    """Tell whether a client's images have labels for its training: by its node's role, or as ``labels`` has it.

    Raises
    ------
    ValueError
        The method reveals labels (``algorithm.unlabelled=revealed``) and the node says that it has none.
    """
    if config.algorithm.unlabelled == "revealed":
        if node.role == "unlabelled":
            allowed = f"not with node-config role=unlabelled (client {node.partition}): there is nothing to reveal"
            raise ValueError(f"algorithm.unlabelled='revealed' is not allowed: {allowed}")
        return True
    if node.role is not None:
        return node.role == "labelled"
    return node.partition < config.labels.labelled_clients(node.num_partitions)
