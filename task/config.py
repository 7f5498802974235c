"""Configuration: ``load`` composes and checks ``conf/``, ``build`` turns a ``_target_`` into an object.

This file and ``task/launch.py`` are the only ones that know Hydra.
"""

import dataclasses
import difflib
import importlib
import inspect
import re
import shlex
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from task.schema import Config, require_choice

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
NODE_KEYS = {"partition-id", "num-partitions", "device", "state-dir", "cache-dir", "role"}
ROLES = ("labelled", "unlabelled")
OWN_PACKAGES = ("task", "server_app", "client_app")
SWEEP = "sweep="


@lru_cache(maxsize=8)
def load_cached(overrides: str) -> Config:
    """Return ``load(overrides)``, composed once in a process: every message of a run needs it."""
    return load(overrides)


def load(overrides: str | Sequence[str] = "") -> Config:
    """Compose ``conf/`` with Hydra ``overrides`` and check every setting.

    Parameters
    ----------
    overrides : str or sequence of str
        As on Hydra's command line, e.g. ``"algorithm=fedproto federation.rounds=20"``.

    Raises
    ------
    ValueError
        One line for an unknown key (with the nearest known ones), a wrong type or a value out of range.
    """
    words = without_plus(shlex.split(overrides) if isinstance(overrides, str) else overrides)
    try:
        composed = _compose(words)
        merged = OmegaConf.merge(OmegaConf.structured(Config), composed)
        config = OmegaConf.to_object(merged)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_one_line(error, words)) from error
    assert isinstance(config, Config)
    sweep = next((word for word in words if word.startswith(SWEEP)), None)
    if sweep:
        raise ValueError(f"{sweep} is not allowed here: it is many runs, and only the command `protofed` starts them")
    _check_targets(config)
    _put_stand_in(config)
    return config


def without_plus(words: Sequence[str]) -> list[str]:
    """Return Hydra overrides in which ``+debug=smoke`` has become ``debug=smoke``; Hydra itself refuses the plus."""
    return [re.sub(r"^\+(?=(experiment|sweep|debug)=)", "", word) for word in words]


def to_yaml(config: Config) -> str:
    """Return the resolved ``config`` as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def build(node: Mapping[str, Any], where: str = "", **runtime: Any) -> Any:
    """Call the ``_target_`` of ``node`` with its settings and the ``runtime`` arguments.

    Parameters
    ----------
    node : Mapping[str, Any]
        ``_target_`` (a dotted name inside our three packages) and keyword settings; a ``name`` is a label only
        where the target takes none.
    where : str
        The place of the node in the configuration, for messages.
    **runtime
        Arguments that are no settings, such as ``image_shape``.

    Raises
    ------
    ValueError
        One line for a foreign or missing target, an unknown or missing setting, a wrong type or range.
    """
    target, settings = _bind(node, where, frozenset(runtime))
    try:
        return target(**settings, **runtime)
    except ValueError as error:
        raise ValueError(f"{where}.{error}" if where and "=" in str(error).split(" ", 1)[0] else str(error)) from error


@dataclass(frozen=True)
class NodeSettings:
    """Facts of one machine. ``partition`` counts from 0 to ``num_partitions - 1``; null means the run's own.

    ``role`` says whether the node's images have labels: ``labelled`` or ``unlabelled``; null leaves it to ``labels``.
    """

    partition: int
    num_partitions: int
    device: str | None = None
    state_dir: Path | None = None
    cache_dir: Path | None = None
    role: str | None = None


def node_settings(node_config: Mapping[str, Any]) -> NodeSettings:
    """Read what a SuperNode was started with (``--node-config``); a simulation fills in the two numbers.

    Raises
    ------
    ValueError
        One line with an example, for a missing, malformed or out-of-range fact.
    """
    unknown = sorted(set(node_config) - NODE_KEYS)
    if unknown:
        raise ValueError(f"node-config {unknown[0]!r} is unknown; known: {', '.join(sorted(NODE_KEYS))}")
    example = "start the SuperNode with --node-config 'partition-id=0 num-partitions=5'"
    numbers = {}
    for key in ("partition-id", "num-partitions"):
        value = node_config.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"node-config {key}={value!r} is not a whole number; {example}")
        numbers[key] = value
    partition, total = numbers["partition-id"], numbers["num-partitions"]
    if not 0 <= partition < total:
        raise ValueError(f"node-config partition-id={partition} is not in 0..{total - 1}; {example}")
    device = node_config.get("device")
    if device not in (None, "auto", "cpu", "cuda"):
        raise ValueError(f"node-config device={device!r} is not allowed: one of auto, cpu, cuda")
    role = node_config.get("role")
    if role is not None:
        require_choice("node-config role", str(role), ROLES)
    folders = {}
    for key in ("state-dir", "cache-dir"):
        path = Path(str(node_config[key])).expanduser() if key in node_config else None
        if path is not None and not path.is_absolute():
            raise ValueError(f"node-config {key}={str(path)!r} is not allowed: an absolute path")
        folders[key] = path
    named = None if role is None else str(role)
    return NodeSettings(partition, total, device, folders["state-dir"], folders["cache-dir"], named)


def has_labels(config: Config, node: NodeSettings) -> bool:
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


def _compose(words: list[str]) -> DictConfig:
    with initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3", job_name="protofed"):
        return compose(config_name="config", overrides=words)


def _check_targets(config: Config) -> None:
    """Build every node once, so that a wrong setting is found here and not in round 1."""
    # First what needs no torch, whose import takes seconds: a typo should not wait for it.
    build(config.data.source, "data.source")
    build(config.partition, "partition")
    for index, entry in enumerate(config.model.entries):
        _bind(entry, f"model.entries[{index}]", frozenset({"image_shape"}))
    if config.model.auxiliary is not None:
        _bind(config.model.auxiliary, "model.auxiliary", frozenset({"image_shape"}))
    build(config.algorithm.client, "algorithm.client")
    build(config.algorithm.server, "algorithm.server").check(config)


def _put_stand_in(config: Config) -> None:
    """Put the stand-in of the source in its place, if the settings ask for one and the source has one."""
    data, source = config.data, build(config.data.source, "data.source")
    if data.stand_in and (stand_in := source.stand_in()) is not source:
        target = f"{type(stand_in).__module__}.{type(stand_in).__qualname__}"
        data.name, data.source = f"{data.name} (stand-in)", {"_target_": target, **dataclasses.asdict(stand_in)}
        if config.experiment is not None:  # a paper's numbers do not belong beside those of noise
            experiment = config.experiment
            experiment.accuracy, experiment.communication, experiment.note = {}, {}, ""


def _bind(node: Mapping[str, Any], where: str, runtime: frozenset[str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the target of ``node`` and its settings, checked against the target's signature."""
    target = _find_target(node.get("_target_"), where)
    parameters = inspect.signature(target).parameters
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    settings = {str(key): value for key, value in node.items() if key != "_target_"}
    if "name" not in parameters:
        settings.pop("name", None)
    for key, value in settings.items():
        place = f"{where}.{key}" if where else key
        if key not in parameters or key in runtime:
            known = [name for name in parameters if name not in runtime]
            raise ValueError(f"unknown setting {place!r}{_nearest(key, known)}")
        if key in hints and not _conforms(value, hints[key]):
            raise ValueError(f"{place}={value!r} is not allowed: {_describe(hints[key])}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in settings and name not in runtime:
            raise ValueError(f"setting {f'{where}.{name}' if where else name!r} is missing")
    return target, settings


def _find_target(name: object, where: str) -> Callable[..., Any]:
    if not isinstance(name, str) or not re.fullmatch(rf"({'|'.join(OWN_PACKAGES)})(\.[A-Za-z]\w*)+", name):
        raise ValueError(f"{where}._target_={name!r} is not allowed: a name inside {', '.join(OWN_PACKAGES)}")
    module_name, _, attribute = name.rpartition(".")
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where}._target_={name!r} cannot be imported: {error}") from error
    if not callable(target) or not str(getattr(target, "__module__", "")).startswith(OWN_PACKAGES):
        raise ValueError(f"{where}._target_={name!r} is not allowed: a class or function of our own")
    return target  # type: ignore[no-any-return]


def _conforms(value: object, hint: Any) -> bool:
    """Tell whether ``value``, as YAML gives it, fits the annotation ``hint``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in arguments
    if origin in (Union, types.UnionType):
        return any(_conforms(value, argument) for argument in arguments)
    if origin in (list, tuple, Sequence):
        inner = arguments[0] if arguments else Any
        return isinstance(value, list | tuple) and all(_conforms(item, inner) for item in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(_conforms(item, arguments[1]) for item in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_describe(argument) for argument in get_args(hint))
    names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(hint, str(hint))


def _nearest(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    return f"; nearest known: {', '.join(close)}" if close else "; `protofed --cfg job` shows all settings"


def _one_line(error: Exception, words: list[str]) -> str:
    """Turn Hydra's message of several lines into one, naming the key and the nearest known ones."""
    text = str(error)
    if isinstance(error.__cause__, ValueError) and not isinstance(error.__cause__, OmegaConfBaseException):
        return str(error.__cause__).splitlines()[0]
    missing = re.search(r"Could not override '(.+?)'", text)
    if missing:
        key = missing.group(1)
        kept = [word for word in words if word.lstrip("+~").split("=")[0] != key]
        try:
            known = _flat_keys(OmegaConf.to_container(_compose(kept)))
        except (HydraException, OmegaConfBaseException):
            known = []
        return f"unknown setting {key!r}{_nearest(key, known)}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    place = re.search(r"full_key: (\S+)", text)
    noise = ("full_key:", "reference_type=", "object_type=", "Config search path", "provider=", "set env variable")
    line = " ".join(line for line in lines if not line.startswith(noise))
    return f"{place.group(1)}: {line}" if place and place.group(1) not in line else line


def _flat_keys(tree: Any, prefix: str = "") -> list[str]:
    if not isinstance(tree, dict):
        return [prefix]
    return [key for name, child in tree.items() for key in _flat_keys(child, f"{prefix}.{name}".lstrip("."))]
