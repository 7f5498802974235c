"""What tests look for in messages, and change in them."""

from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Message

Floats = npt.NDArray[np.float32]


def header(message: Message) -> dict[str, Any]:
    """Return the header without the metrics."""
    return {key: value for key, value in message.content["header"].items() if not key.startswith("metric.")}


def metrics(message: Message) -> dict[str, float]:
    """Return the metrics by name."""
    entries: dict[str, Any] = dict(message.content["header"].items())
    return {key.removeprefix("metric."): value for key, value in entries.items() if key.startswith("metric.")}


def has_prototypes(message: Message) -> bool:
    return "header" in message.content and "vectors" in message.content["header"]


def vectors(message: Message) -> Floats:
    """Return a copy of the prototypes, ``(n, K)``."""
    entries: Any = message.content["header"]
    return np.frombuffer(entries["vectors"], "<f4").reshape(len(entries["class-ids"]), -1).copy()


def put_vectors(message: Message, values: Floats) -> None:
    """Put other prototypes in the place of those that are there."""
    message.content["header"]["vectors"] = values.astype("<f4").tobytes()  # type: ignore[index]


def remove_prototypes(message: Message) -> None:
    for key in {"class-ids", "vectors", "counts"} & set(message.content["header"]):
        del message.content["header"][key]  # type: ignore[union-attr]


def prototypes(message: Message) -> dict[str, npt.NDArray[Any]]:
    """Return class ids, vectors and, where there are any, counts."""
    entries: Any = message.content["header"]
    found: dict[str, npt.NDArray[Any]] = {"class-ids": np.array(entries["class-ids"]), "vectors": vectors(message)}
    return found | ({"counts": np.array(entries["counts"])} if "counts" in entries else {})
