"""What tests of semi-supervised methods need: a small data set that can be learnt, runs on it, and what they left."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from safetensors.torch import load_file
from torch import Tensor

from task.averaging import part
from tests import contents
from tests.fake_grid import FakeGrid, run_federation

CLASSES = 4
TINY = "model=cnn_small model.feature_dim=16 model.entries.0.width=2 model.entries.0.features=16"
"""A model of a few hundred parameters, with BatchNorm."""


def stripes(samples: int, seed: int, noise: float = 40.0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return ``(N, 16, 16, 1)`` images and labels: horizontal stripes, the class being their width, in noise."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(samples) % CLASSES)
    rows = np.arange(16)[None, :, None] + rng.integers(0, 16, samples)[:, None, None]
    light = (rows // (2 ** labels[:, None, None])) % 2
    images = 80 + 96 * light + rng.normal(0, noise, (samples, 16, 16))
    return images.clip(0, 255).astype(np.uint8)[..., None], labels


def write(path: Path, samples: int = 96, tests: int = 80, **changes: Any) -> Path:
    """Write the data set, with ``changes`` of its arrays, as an ``.npz`` file for ``data=npz``."""
    x, y = stripes(samples, 0)
    x_test, y_test = stripes(tests, 1)
    names = np.array([f"width {2**label}" for label in range(CLASSES)])
    arrays = {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test, "class_names": names} | changes
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def run(folder: Path, algorithm: str, overrides: str = "", data: Path | None = None, **grid: Any) -> FakeGrid:
    """Run two rounds of ``algorithm`` on 4 clients, one with labels, or what ``overrides`` say instead."""
    path = data or folder.parent / "stripes.npz"
    if not path.exists():
        write(path)
    words = f"algorithm={algorithm} {TINY} data=npz data.source.path={path} data.cache_dir={path.parent}/cache"
    usual = "partition=iid_train labels=few train=fssl train.batch_size=8 federation.rounds=2"
    return run_federation(f"{words} {usual} {overrides}", str(folder), **grid)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of ``rounds.jsonl`` without the fields that hold times."""
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def summary_of(folder: Path) -> dict[str, Any]:
    """Return ``summary.json``."""
    return json.loads((folder / "summary.json").read_text())  # type: ignore[no-any-return]


def state_of(folder: Path) -> dict[str, Tensor]:
    """Return the server's last state."""
    return load_file(folder / "checkpoint" / "state.safetensors")


def model_of(folder: Path) -> dict[str, Tensor]:
    """Return the last global model."""
    return part("model/", state_of(folder))


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """Tell whether two states are the same, bit for bit."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def messages(grid: FakeGrid, kind: str, *, sent: bool = False) -> list[tuple[int, int, Message]]:
    """Return the round, the partition and the message of all replies of a kind, or of all that was ``sent``."""
    found = []
    for message in grid.sent if sent else grid.replies:
        node = message.metadata.dst_node_id if sent else message.metadata.src_node_id
        if message.metadata.message_type == kind:
            partition = int(grid.contexts[node].node_config["partition-id"])
            found.append((int(message.metadata.group_id or 0), partition, message))
    return found


def tensors(message: Message, record: str = "weights") -> dict[str, Tensor]:
    """Return the arrays of one record of a message, or its prototypes."""
    if record == "prototypes":
        return {name: torch.from_numpy(array) for name, array in contents.prototypes(message).items()}
    arrays = message.content[record]
    return {name: torch.from_numpy(arrays[name].numpy().copy()) for name in arrays}  # type: ignore[union-attr, index]
