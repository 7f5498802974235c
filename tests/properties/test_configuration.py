"""Configuration: unknown keys, any text at all, numbers that are none, and the way to YAML and back."""

import dataclasses
import inspect
import math
from functools import cache
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from task.composition import _compose
from task.config import CONF_DIR, _find_target, build, load, to_yaml
from task.schema import Config, FederationConfig, TrainConfig
from tests.algorithms import ALGORITHMS, fitting
from tests.properties.attempts import attempt

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
WORDS = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=9)
# Mappings whose keys are names of the user's own: algorithms, listeners, or entries of the model group.
FREE = ("experiment", "listeners", "model.pretrained")


@cache
def tree(algorithm: str = "fedtgp") -> dict[str, Any]:
    return OmegaConf.to_container(_compose([f"algorithm={algorithm}"]), resolve=True)  # type: ignore[return-value]


def mappings(node: Any, prefix: str = "") -> list[tuple[str, set[str]]]:
    """Return the place and the keys of every mapping of a configuration."""
    if not isinstance(node, dict) or prefix.startswith(FREE):
        return []
    below = [each for key, child in node.items() for each in mappings(child, f"{prefix}.{key}".lstrip("."))]
    return [(prefix, set(node)), *below]


@FEW
@given(
    data=st.data(), key=WORDS, plus=st.booleans(), value=st.sampled_from(["1", "true", "x", "null", "[1]", "{a: 1}"])
)
def test_any_unknown_key_is_refused_by_name(data: Any, key: str, plus: bool, value: str) -> None:
    place, known = data.draw(st.sampled_from(mappings(tree())))
    path = f"{place}.{key}".lstrip(".")
    groups = {entry.stem for entry in CONF_DIR.iterdir()} | {"hydra"}
    assume(key not in known and (place or key not in groups))
    config, refusal = attempt(lambda: load([f"{'+' if plus else ''}{path}={value}"]))
    assert config is None
    assert key in refusal


SYNTAX = st.text("ab=.,[]{}:'\"$+~ \n\t\\/@#%()0-1e!é\x00", max_size=14)
STARTS = [
    "",
    "train.lr=",
    "algorithm=",
    "+",
    "~",
    "algorithm.client.weight=",
    "model.entries.0.width=",
    "name=",
    "data=",
]


@FEW
@given(start=st.sampled_from(STARTS), text=SYNTAX)
def test_any_text_is_a_configuration_or_one_line(start: str, text: str) -> None:
    config, _ = attempt(lambda: load(start + text))
    assert config is None or isinstance(config, Config)


@pytest.mark.parametrize(
    "overrides", [*map(fitting, ALGORITHMS), "model=htfe8_htc4 algorithm=local", "experiment=fssl"]
)
def test_yaml_and_back(overrides: str) -> None:
    config = load(overrides)
    read = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(to_yaml(config)))
    assert OmegaConf.to_object(read) == config


@FEW
@given(
    seed=st.integers(0, 2**31 - 1),
    lr=st.floats(1e-6, 10),
    rounds=st.integers(1, 10**6),
    share=st.floats(0.01, 1),
    name=st.one_of(st.none(), st.text("abc-_.19", min_size=1, max_size=8)),
)
def test_values_arrive_as_they_are(seed: int, lr: float, rounds: int, share: float, name: str | None) -> None:
    text = f"seed={seed} train.lr={lr!r} federation.rounds={rounds} federation.participation={share!r}"
    named = "null" if name is None else f"'\"{name}\"'"
    config = load(f"{text} name={named}")
    found = (config.seed, config.train.lr, config.federation.rounds, config.federation.participation, config.name)
    assert found == (seed, lr, rounds, share, name)


def numeric(hint: Any) -> bool:
    return hint in (int, float) or any(option in (int, float) for option in get_args(hint))


def nodes() -> list[tuple[str, dict[str, Any]]]:
    """Return every different target that ``conf/`` names, with its settings."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for algorithm in ALGORITHMS:
        for half in ("server", "client"):
            node = tree(algorithm)["algorithm"][half]
            found.setdefault(node["_target_"], (f"algorithm.{half}", node))
    for scheme in ("iid", "pathological", "dirichlet", "given"):
        node = OmegaConf.to_container(_compose([f"partition={scheme}"]).partition)
        found[node["_target_"]] = ("partition", node)  # type: ignore[index, call-overload, assignment]
    found["views"] = ("views", {"_target_": "task.data.augment.Augmentation"})
    return list(found.values())


def settings_of(node: dict[str, Any]) -> list[str]:
    """Return the settings of a target that are numbers."""
    target: Any = _find_target(node["_target_"], "node")
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    return [name for name, hint in hints.items() if name != "return" and numeric(hint)]


@pytest.mark.parametrize(("where", "node"), nodes(), ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -5, -0.5, "much"])
def test_numbers_that_mean_nothing_are_refused_for_every_setting_of_every_target(
    where: str, node: dict[str, Any], value: Any
) -> None:
    for name in settings_of(node):
        built, refusal = attempt(lambda changed={**node, name: value}: build(changed, where))  # type: ignore[misc]
        assert built is None, f"{node['_target_']}.{name}={value}"
        assert name in refusal


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -5])
def test_numbers_that_mean_nothing_are_refused_for_training_and_federation(value: float) -> None:
    for kind in (TrainConfig, FederationConfig):
        for name in settings_of({"_target_": f"task.schema.{kind.__name__}"}):
            if not math.isfinite(value) and isinstance(getattr(kind(), name), int):
                continue  # OmegaConf lets no such value into a whole number
            built, refusal = attempt(lambda name=name, kind=kind: dataclasses.replace(kind(), **{name: value}))  # type: ignore[misc]
            assert built is None, f"{kind.__name__}.{name}={value}"
            assert name in refusal
