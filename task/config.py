"""Configuration: ``load`` composes and checks ``conf/``, ``build`` turns a ``_target_`` into an object.

``task/composition.py`` has what Hydra does in it.
"""

import dataclasses
import importlib
import inspect
import re
import shlex
import types
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from task.composition import CONF_DIR as CONF_DIR
from task.composition import LAUNCH, SWEEP, compose_words, launch_of, nearest, one_line, without_plus
from task.schema import Config

OWN_PACKAGES = ("task", "server_app", "client_app")


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
    composed = compose_words(words)
    launch_of(composed, words)  # nobody reads it here, but a misspelt key is a mistake at every door
    own = [str(key) for key in composed if key != LAUNCH]  # that one is of the command, not of the run
    config = to_config(OmegaConf.masked_copy(composed, own), words)
    sweep = next((word for word in words if word.startswith(SWEEP)), None)
    if sweep:
        raise ValueError(f"{sweep} is not allowed here: it is many runs, and only the command `protofed` starts them")
    _check_targets(config)
    _put_stand_in(config)
    return config


def to_config(tree: DictConfig, words: Sequence[str] = ()) -> Config:
    """Return the settings ``tree`` as a ``Config``; ``words`` gave them, for messages.

    Raises
    ------
    ValueError
        One line for an unknown key, a wrong type or a value out of range.
    """
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), tree))
    except OmegaConfBaseException as error:
        raise ValueError(one_line(error, words)) from error
    assert isinstance(config, Config)
    return config


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




def _check_targets(config: Config) -> None:
    """Build every node once, so that a wrong setting is found here and not in round 1."""
    # First what needs no torch, whose import takes seconds: a typo should not wait for it.
    build(config.data.source, "data.source")
    build(config.partition, "partition")
    for index, entry in enumerate(config.model.entries):
        _bind(entry, f"model.entries[{index}]", frozenset({"image_shape"}))
    if config.model.auxiliary is not None:
        _bind(config.model.auxiliary, "model.auxiliary", frozenset({"image_shape"}))
    for name, node in config.listeners.items():  # built by the server alone, which needs what they need
        _bind(node, f"listeners.{name}", frozenset())
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
            raise ValueError(f"unknown setting {place!r}{nearest(key, known)}")
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
