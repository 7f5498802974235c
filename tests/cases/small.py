"""Every algorithm on a few tiny images in well under a second, for the cases that all of them must pass."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from server_app import main
from server_app.strategies.base import RoundStrategy
from task import composition, config
from task.config import CONF_DIR
from tests.algorithms import ALGORITHMS, fitting
from tests.fake_grid import FakeGrid, run_federation
from tests.stripes import TINY, write

# Two architectures of different width, one with BatchNorm.
HYDRA = composition._compose
TWO = (
    "'model.entries=[{name: plain, _target_: task.models.small.plain, width: 1, features: 16}, "
    "{name: residual, _target_: task.models.small.residual, width: 1, features: 24, norm: batch}]' model.feature_dim=16"
)
WITH_BATCHNORM = (
    "'model.entries=[{name: residual, _target_: task.models.small.residual, width: 1, features: 16, norm: batch}]' "
    "model.feature_dim=16"
)


@cache
def settings(algorithm: str) -> Any:
    """Return the settings of an algorithm as its file has them."""
    return composition._compose([f"algorithm={algorithm}"]).algorithm


def _kinds() -> list[str]:
    """Return one algorithm for each pair of a server half and a client half."""
    pairs: dict[tuple[str, str], str] = {}
    for algorithm in sorted(ALGORITHMS, key=len):
        found = settings(algorithm)
        pairs.setdefault((found.server._target_, found.client._target_), algorithm)
    return sorted(pairs.values())


KINDS = [*_kinds(), "fedavg_fixmatch"]
"""One algorithm for each pair of halves, and one more without labels: the others differ in settings only."""
EVERY = [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in ALGORITHMS]
"""All algorithms, those that are no kind of their own marked slow: for cases that take long runs."""
GROUPS = {path.name for path in CONF_DIR.iterdir() if path.is_dir()}


@cache
def _composed(groups: tuple[str, ...]) -> Any:
    return OmegaConf.to_container(HYDRA(list(groups)), resolve=False)


def compose(words: list[str]) -> DictConfig:
    """Compose as Hydra does, but its groups only once: hundreds of federations differ in single settings alone."""
    groups = tuple(word for word in words if word.split("=")[0] in GROUPS)
    tree = copy.deepcopy(_composed(groups))
    for word in words:
        if word not in groups:
            key, value = word.split("=", 1)
            *parents, last = [int(name) if name.isdecimal() else name for name in key.split(".")]
            node = tree
            for name in parents:
                node = node[name]
            assert last in node, word
            node[last] = yaml.safe_load(value)
    return OmegaConf.create(tree)


@contextmanager
def quick_configuration() -> Iterator[None]:
    """Compose quickly in the block, and once for server and clients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "_compose", compose)
        patch.setattr(main, "load", config.load_cached)
        yield


def has_global_model(algorithm: str) -> bool:
    return "model=cnn_small" in fitting(algorithm)


def words(algorithm: str, folder: Path, model: str = TWO) -> str:
    """Return the overrides for two rounds on the images in ``folder``, which are made when there are none."""
    path = folder / "stripes.npz"
    if not path.exists():
        write(path, samples=64, tests=32)
    server = settings(algorithm).server
    short = [f"algorithm.server.{name}=3" for name in ("epochs", "steps") if name in server]
    group = TINY if has_global_model(algorithm) else model
    data = f"data=npz data.source.path={path} data.cache_dir={folder}/cache train.batch_size=8 federation.rounds=2"
    return f"{fitting(algorithm)} {group} {data} {' '.join(short)}"


def run(algorithm: str, folder: Path, more: str = "", num_nodes: int = 4, model: str = TWO, **grid: Any) -> FakeGrid:
    """Run a federation into ``folder``; the images lie beside it."""
    return federate(f"{words(algorithm, folder.parent, model)} {more}", folder, num_nodes, **grid)


def federate(overrides: str, folder: Path | None, num_nodes: int = 4, **grid: Any) -> FakeGrid:
    """Run a federation with these overrides; no folder for one that is resumed."""
    with quick_configuration():
        return run_federation(overrides, str(folder or ""), num_nodes, **grid)


def dirichlet(algorithm: str) -> str:
    """Return the scheme that divides by Dirichlet and fits the algorithm's way to evaluate."""
    return "dirichlet_train" if "partition=iid_train" in fitting(algorithm) else "dirichlet"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text("utf-8").splitlines()]


def timeless(folder: Path) -> list[str]:
    """Return the lines of ``rounds.jsonl`` without the fields that hold times."""
    return [json.dumps({key: value for key, value in row.items() if key != "seconds"}) for row in rows(folder)]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text("utf-8"))  # type: ignore[no-any-return]


States = list[tuple[dict[str, Tensor], dict[str, Tensor]]]


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> States:
    """The global state before and after the training of each round."""
    seen: States = []
    original = RoundStrategy.aggregate_train

    def watched(self: RoundStrategy, number: int, replies: Any) -> Any:
        before = dict(self.run.state)
        result = original(self, number, replies)
        seen.append((before, dict(self.run.state)))
        return result

    monkeypatch.setattr(RoundStrategy, "aggregate_train", watched)
    return seen
