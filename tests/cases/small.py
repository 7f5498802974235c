"""Every algorithm on a few tiny images in well under a second, for the cases that all of them must pass."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from server_app.strategies.base import RoundStrategy
from task.config import _compose
from tests.algorithms import ALGORITHMS, fitting
from tests.fake_grid import FakeGrid, run_federation
from tests.stripes import TINY, write

ONE_OF_EACH_KIND = [
    "local",
    "fedtgp",
    "fedproto",
    "lg_fedavg",
    "fedgen",
    "feddistill",
    "fml",
    "fedkd",
    "rscfed",
    "dccfssl",
]
"""An algorithm for each pair of a server half and a client half that differ in more than settings."""
# Two architectures of different width, one with BatchNorm.
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
    return _compose([f"algorithm={algorithm}"]).algorithm


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
    return run_federation(f"{words(algorithm, folder.parent, model)} {more}", str(folder), num_nodes, **grid)


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


__all__ = ["ALGORITHMS", "ONE_OF_EACH_KIND"]
