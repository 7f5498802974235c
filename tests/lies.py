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
    return header(**{f"metric.{name}": value for name, value in changes.items()})


def without(*keys: str) -> Lie:
    """Leave out entries of the header."""

    def lie(content: RecordDict) -> None:
        held: dict[str, Any] = dict(content["header"])  # type: ignore[arg-type]
        content["header"] = ConfigRecord({key: value for key, value in held.items() if key not in keys})

    return lie


def listed(key: str, change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Lie:
    """Change class ids or counts."""

    def lie(content: RecordDict) -> None:
        values: Any = content["header"][key]  # type: ignore[index]
        header(**{key: change(np.array(values, np.int64)).tolist()})(content)

    return lie


def vectors(change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Lie:
    """Change the vectors of prototypes."""

    def lie(content: RecordDict) -> None:
        held: Any = content["header"]
        found = np.frombuffer(held["vectors"], "<f4").reshape(len(held["class-ids"]), -1).copy()
        header(vectors=change(found).tobytes())(content)

    return lie


def record(name: str, make: Callable[[], Any]) -> Lie:
    def lie(content: RecordDict) -> None:
        content[name] = make()

    return lie


def array(key: str | None, change: Callable[[np.ndarray[Any, Any]], Any]) -> Lie:
    """Change one array of the weights, the first where no key is given."""

    def lie(content: RecordDict) -> None:
        found: Any = content["weights"]
        chosen = key or next(iter(found))
        new = change(found[chosen].numpy().copy())
        found[chosen] = new if isinstance(new, Array) else Array(np.asarray(new))

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
    "1e12 samples": header(**{"num-examples": TERA}),
    "more samples than it has": header(**{"num-examples": 1000}),
    "-1 samples": header(**{"num-examples": -1}),
    "a metric of NaN": metric(loss=float("nan")),
    "a metric of 1e300": metric(loss=1e300),
    "a metric with a line break": metric(**{"a\nb": 1.0}),
    "a thousand metrics": metric(**{f"m{index}": 1.0 for index in range(1000)}),
    "a metric that is text": metric(loss="low"),
    "a header of arrays": record("header", ArrayRecord),
}
OF_PROTOTYPES: dict[str, Lie] = {
    "another width": vectors(lambda v: np.hstack([v, v])),
    "class id 999": listed("class-ids", lambda v: np.append(v[:-1], 999)),
    "a class id twice": listed("class-ids", twice),
    "NaN": vectors(lambda v: v * np.float32("nan")),
    "1e6 times as long": vectors(lambda v: v * np.float32(1e6) + np.float32(1e5)),
    "3000 times as long": vectors(lambda v: v * np.float32(3000) + np.float32(300)),
    "float64": vectors(lambda v: v.astype(np.float64)),
    "half a number": vectors(lambda v: np.frombuffer(v.tobytes()[:-2], np.uint8)),
    "vectors without classes": without("class-ids"),
    "classes without vectors": without("vectors"),
    "vectors as text": header(vectors="long"),
    "vectors as numbers": header(vectors=[1.0, 2.0]),
    "class ids as text": header(**{"class-ids": ["cat"]}),
    "one count for all": listed("counts", lambda v: v[:1] if len(v) > 1 else v - 10**4),
    "counts of 1e12": listed("counts", lambda v: v + TERA),
    "counts of 1e6": listed("counts", lambda v: v + 10**6),
    "negative counts": listed("counts", lambda v: -v),
}
OF_WEIGHTS: dict[str, Lie] = {
    "an array less": remove("weights", "first"),
    "another shape": array(None, lambda v: np.zeros((3, 3, 3, 3), np.float32)),
    "weights of NaN": array(None, lambda v: v * np.float32("nan")),
    "weights 1e6 times as large": every_float(1e6),
    "weights 1e25 times as large": every_float(1e25),
    "weights as float64": array(None, lambda v: v.astype(np.float64)),
    "a shape of terabytes": array(None, lambda v: promise((10**6, 10**6))),
    "a shape without elements": array(None, lambda v: promise((0, 10**30))),
    "no weights but numbers": record("weights", lambda: MetricRecord({"a": 1.0})),
}


def foreign(name: str) -> Lie:
    """What belongs to another method."""
    if name == "weights":
        return record("weights", lambda: ArrayRecord({"w": Array(np.zeros(2, np.float32))}))
    return header(**{"class-ids": [0], "vectors": bytes(64), "counts": [1]})


def lies_for(content: RecordDict, shared: frozenset[str]) -> dict[str, Lie]:
    """Every lie that can be made of a reply like this."""
    lies = dict(GENERAL)
    held: Any = content["header"]
    for name, own, here in (
        ("prototypes", OF_PROTOTYPES, "vectors" in held),
        ("weights", OF_WEIGHTS, "weights" in content),
    ):
        if here:
            counted = name != "prototypes" or "counts" in held
            lies |= {key: lie for key, lie in own.items() if counted or "count" not in key}
        elif name not in shared:
            lies[f"{name} of another method"] = foreign(name)
    return lies


EVALUATION: dict[str, Lie] = {
    "an accuracy of 2": metric(**{"accuracy-head": 2.0}),
    "no loss": without("metric.loss"),
    "no accuracy by head": without("metric.accuracy-head"),
    "no accuracy by prototype": without("metric.accuracy-prototype"),
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
