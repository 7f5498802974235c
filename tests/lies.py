"""What a foreign reply may try: changes of a good reply, by name, for the tests that a server must survive."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from task.messages import NodeReport, PrototypeSet, Upload

K, TERA = 4, 10**12
Lie = Callable[[RecordDict], None]


def header(**changes: Any) -> Lie:
    def lie(content: RecordDict) -> None:
        content["header"] = ConfigRecord(dict(content["header"]) | changes)  # type: ignore[arg-type]

    return lie


def metric(**changes: Any) -> Lie:
    def lie(content: RecordDict) -> None:
        content["metrics"] = MetricRecord(dict(content["metrics"]) | changes)  # type: ignore[arg-type]

    return lie


def record(name: str, make: Callable[[], Any]) -> Lie:
    def lie(content: RecordDict) -> None:
        content[name] = make()

    return lie


def array(name: str, key: str | None, change: Callable[[np.ndarray[Any, Any]], Any]) -> Lie:
    """Change one array of a record, the first where no key is given."""

    def lie(content: RecordDict) -> None:
        found = content[name]
        chosen = key or next(iter(found))
        new = change(found[chosen].numpy().copy())  # type: ignore[union-attr, index]
        found[chosen] = new if isinstance(new, Array) else Array(np.asarray(new))  # type: ignore[index]

    return lie


def every_float(factor: float) -> Lie:
    def lie(content: RecordDict) -> None:
        for key, found in list(content["weights"].items()):  # type: ignore[union-attr]
            values = found.numpy()
            content["weights"][key] = Array(values * factor if values.dtype == np.float32 else values)  # type: ignore[index]

    return lie


def promise(shape: tuple[Any, ...], data: bytes = b"", descr: str = "<f4") -> Array:
    """Bytes whose own header claims what it likes."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return Array("float32", (1,), "numpy.ndarray", stream.getvalue() + data)


def remove(name: str, key: str | None = None) -> Lie:
    def lie(content: RecordDict) -> None:
        if key is None:
            del content[name]
        else:
            found = content[name]
            del found[next(iter(found)) if key == "first" else key]  # type: ignore[attr-defined, arg-type]

    return lie


def twice(values: np.ndarray[Any, Any]) -> Any:
    return np.repeat(values[:1], len(values)) if len(values) > 1 else values - 1


GENERAL: dict[str, Lie] = {
    "another round": header(round=77),
    "another client": header(partition=0),
    "a negative round": header(round=-1),
    "a round as text": header(round="1"),
    "no header": remove("header"),
    "no metrics": remove("metrics"),
    "1e12 samples": header(**{"num-examples": TERA}),
    "more samples than it has": header(**{"num-examples": 1000}),
    "-1 samples": header(**{"num-examples": -1}),
    "a metric of NaN": metric(loss=float("nan")),
    "a metric of 1e300": metric(loss=1e300),
    "a metric with a line break": metric(**{"a\nb": 1.0}),
    "a thousand metrics": metric(**{f"m{index}": 1.0 for index in range(1000)}),
    "metrics that are arrays": record("metrics", ArrayRecord),
}
OF_PROTOTYPES: dict[str, Lie] = {
    "another width": array("prototypes", "vectors", lambda v: np.hstack([v, v])),
    "class id 999": array("prototypes", "class-ids", lambda v: np.append(v[:-1], 999)),
    "a class id twice": array("prototypes", "class-ids", twice),
    "NaN": array("prototypes", "vectors", lambda v: v * np.float32("nan")),
    "1e6 times as long": array("prototypes", "vectors", lambda v: v * np.float32(1e6) + np.float32(1e5)),
    "3000 times as long": array("prototypes", "vectors", lambda v: v * np.float32(3000) + np.float32(300)),
    "float64": array("prototypes", "vectors", lambda v: v.astype(np.float64)),
    "a shape of terabytes": array("prototypes", "vectors", lambda v: promise((10**6, 10**6))),
    "a shape without elements": array("prototypes", "vectors", lambda v: promise((0, 10**30))),
    "one count for all": array("prototypes", "counts", lambda v: v[:1] if len(v) > 1 else v - 10**4),
    "counts of 1e12": array("prototypes", "counts", lambda v: v + TERA),
    "counts of 1e6": array("prototypes", "counts", lambda v: v + 10**6),
    "negative counts": array("prototypes", "counts", lambda v: -v),
    "an unknown key": array("prototypes", "vectors", lambda v: v),
    "no vectors": remove("prototypes", "vectors"),
    "numbers instead of arrays": record("prototypes", lambda: MetricRecord({"vectors": 1.0})),
}
OF_WEIGHTS: dict[str, Lie] = {
    "an array less": remove("weights", "first"),
    "another shape": array("weights", None, lambda v: np.zeros((3, 3, 3, 3), np.float32)),
    "weights of NaN": array("weights", None, lambda v: v * np.float32("nan")),
    "weights 1e6 times as large": every_float(1e6),
    "weights 1e25 times as large": every_float(1e25),
    "weights as float64": array("weights", None, lambda v: v.astype(np.float64)),
    "no weights but numbers": record("weights", lambda: MetricRecord({"a": 1.0})),
}


def unknown_key(content: RecordDict) -> None:
    content["prototypes"]["pickle"] = Array(np.zeros(1))  # type: ignore[index]


OF_PROTOTYPES["an unknown key"] = unknown_key


def foreign(name: str) -> Lie:
    """What belongs to another method."""
    if name == "weights":
        return record("weights", lambda: ArrayRecord({"w": Array(np.zeros(2, np.float32))}))
    arrays = {"class-ids": np.array([0]), "vectors": np.zeros((1, 16), np.float32), "counts": np.array([1])}
    return record("prototypes", lambda: ArrayRecord({key: Array(value) for key, value in arrays.items()}))


def lies_for(content: RecordDict, shared: frozenset[str]) -> dict[str, Lie]:
    """Every lie that can be made of a reply like this."""
    lies = dict(GENERAL)
    for name, own in (("prototypes", OF_PROTOTYPES), ("weights", OF_WEIGHTS)):
        if name in content:
            counted = name != "prototypes" or "counts" in content["prototypes"]  # type: ignore[operator]
            lies |= {key: lie for key, lie in own.items() if counted or "count" not in key}
        elif name not in shared:
            lies[f"{name} of another method"] = foreign(name)
    return lies


EVALUATION: dict[str, Lie] = {
    "an accuracy of 2": metric(**{"accuracy-head": 2.0}),
    "no loss": remove("metrics", "loss"),
    "no accuracy by head": remove("metrics", "accuracy-head"),
    "no accuracy by prototype": remove("metrics", "accuracy-prototype"),
    "1e12 samples": header(**{"num-examples": TERA}),
    "more samples than it has": header(**{"num-examples": 10**6}),
    "an accuracy of no sample": header(**{"num-examples": 0}),
    "a loss of 1e300": metric(loss=1e300),
}


def node(**changes: Any) -> NodeReport:
    facts: dict[str, Any] = {"parameters": 9, "feature_dim": K, "class_names": tuple("abcde"), "device": "cpu"}
    return NodeReport(
        3, 4, **({"model": "cnn4", "class_ids": (0,), "train_size": 10, "test_size": 5} | facts | changes)
    )


def sent(counts: list[int] | None = None, length: float = 1.0, partition: int = 3) -> Upload:
    vectors = torch.zeros(2, K)
    vectors[:, 0] = length
    known = None if counts is None else torch.tensor(counts)
    return Upload(partition, 2, PrototypeSet(torch.tensor([1, 4]), vectors, known))
