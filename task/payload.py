"""What travels between server and clients, and the only file that names records and keys.

Every message is a Flower ``RecordDict`` of a ``header`` (round, partition, metrics, prototypes) and at most one
``weights`` record of arrays. Flower sends each record, array and chunk of an array by a call of its own that costs 700
bytes, so what is small travels in the header: prototypes as plain little-endian float32. Nothing is pickled. Decoding
trusts nobody: shape, dtype, class ids, round and finiteness are checked; an error names the client, the key and what
is allowed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from task.confusion import from_cells, to_cells
from task.foreign import LARGEST_NORM, check_prototypes, check_weights, metrics, numbers, samples, texts, typed, whole
from task.messages import UNPLACED, Download, EvaluationReport, Expected, NodeReport, Placement, PrototypeSet, Upload
from task.npy import read_npy

HEADER, WEIGHTS = "header", "weights"
CLASS_IDS, VECTORS, COUNTS = "class-ids", "vectors", "counts"
METRIC = "metric."
"""How the keys of metrics begin."""
FLOAT32 = np.dtype("<f4")


def nbytes(content: RecordDict) -> int:
    """Return the size in bytes of the records of a message, as Flower counts them."""
    # Flower looks at the first entry of every list, so an empty one, which has no bytes, is left out.
    total = 0
    for record in content.values():
        if isinstance(record, ConfigRecord):
            record = ConfigRecord({key: value for key, value in record.items() if value != []})
        total += int(record.count_bytes())
    return total


def encode_download(download: Download) -> RecordDict:
    """Return the message content for a client."""
    header: dict[str, Any] = {
        "round": download.round,
        "session": download.session,
        "state-round": download.state_round,
        "durable-round": download.durable_round,
    }
    if download.confusion:
        header["confusion"] = True
    return _content(header | _place(download.placement) | _prototype_keys(download.prototypes), download.weights)


def decode_download(content: RecordDict, num_classes: int, feature_dim: int) -> Download:
    """Return what the server sent; ``ValueError`` when it does not fit C classes of width K."""
    header = _header(content, "server")
    session = typed(header, "session", "server", str)
    if not session or not all(c.isascii() and (c.isalnum() or c in "-_") for c in session):
        raise ValueError(f"server sent session={session!r}: only letters, digits, '-' and '_' are allowed")
    return Download(
        round=whole(header, "round", "server", 0),
        session=session,
        state_round=whole(header, "state-round", "server", 0),
        durable_round=whole(header, "durable-round", "server", 0),
        placement=decode_placement(content),
        confusion=header.get("confusion") is True,
        prototypes=_prototypes(header, "server", num_classes, feature_dim),
        weights=_weights(content, "server"),
    )


def encode_placement(placement: Placement | None) -> RecordDict:
    """Return the message content of a query."""
    return _content(_place(placement))


def decode_placement(content: RecordDict) -> Placement | None:
    """Return what the server tells a node of its place in the run, with any message; None when it tells nothing."""
    if HEADER not in content or "partition" not in _header(content, "server"):
        return None
    header = _header(content, "server")
    place = whole(header, "partition", "server", 0), whole(header, "num-partitions", "server", 1)
    return Placement(*place, texts(header, "class-names", "server"))


def encode_upload(upload: Upload) -> RecordDict:
    """Return the message content of a train reply."""
    return _content(_reply_keys(upload) | _prototype_keys(upload.prototypes), upload.weights)


def decode_upload(content: RecordDict, expected: Expected) -> Upload:
    """Return the train reply of a client.

    Raises
    ------
    ValueError
        One line naming the client, when anything is missing, malformed, out of range or not finite.
    """
    who = f"client {expected.partition}"
    header = _check_header(content, expected, who)
    return Upload(
        expected.partition,
        expected.round,
        prototypes=_prototypes(header, who, expected.num_classes, expected.feature_dim, expected.largest_norm),
        weights=_weights(content, who),
        examples=samples(header, "num-examples", who),
        metrics=_metrics(header, who),
    )


def encode_evaluation(report: EvaluationReport) -> RecordDict:
    """Return the message content of an evaluate reply."""
    header = _reply_keys(report)
    if report.confusion is not None:
        header["confusion-cells"], header["confusion-counts"] = to_cells(report.confusion)
    return _content(header)


def decode_evaluation(content: RecordDict, expected: Expected) -> EvaluationReport:
    """Return the evaluate reply of a client; ``ValueError`` as in ``decode_upload``."""
    who = f"client {expected.partition}"
    header = _check_header(content, expected, who)
    examples, found = samples(header, "num-examples", who), _metrics(header, who)
    if found and not {"loss", "accuracy-head"} <= set(found):
        raise ValueError(f"{who} sent metrics {sorted(found)}: none, or loss and accuracy-head are needed")
    for key, value in found.items():
        if key.startswith("accuracy") and not 0 <= value <= 1:
            raise ValueError(f"{who} sent {METRIC}{key}={value}: it must be in [0, 1]")
    confusion = _confusion(header, expected, who, examples) if "confusion-cells" in header else None
    return EvaluationReport(expected.partition, expected.round, examples, found, confusion)


def encode_node_report(report: NodeReport) -> RecordDict:
    """Return the message content of a query reply."""
    header: dict[str, Any] = {
        "partition": report.partition,
        "num-partitions": report.num_partitions,
        "model": report.model,
        "parameters": report.parameters,
        "feature-dim": report.feature_dim,
        "class-names": list(report.class_names),
        "device": report.device,
        "class-ids": list(report.class_ids),
        "image-shape": list(report.image_shape),
        "role": report.role,
        "name": report.name,
        "own-data": report.own_data,
    }
    for key, value in (("train-size", report.train_size), ("test-size", report.test_size)):
        if value is not None:
            header[key] = value
    if report.class_counts is not None:
        header["class-counts"] = list(report.class_counts)
    return _content(header)


def decode_node_report(content: RecordDict, node_id: int) -> NodeReport:
    """Return the facts of the client on node ``node_id``; ``ValueError`` when one is missing or malformed."""
    who = f"node {node_id}"
    header = _header(content, who)
    names = texts(header, "class-names", who)
    num_classes = len(names)
    counts = numbers(header, "class-counts", who) if "class-counts" in header else None
    if counts is not None and len(counts) != num_classes:
        raise ValueError(f"{who} sent {len(counts)} class-counts for {num_classes} classes")
    class_ids = numbers(header, "class-ids", who)
    if any(not 0 <= class_id < num_classes for class_id in class_ids):
        raise ValueError(f"{who} sent class-ids {class_ids[:5]}...: they must be in 0..{num_classes - 1}")
    role = typed(header, "role", who, str)
    if role not in ("labelled", "unlabelled"):
        raise ValueError(f"{who} sent role={role!r}: labelled or unlabelled is needed")
    return NodeReport(
        partition=whole(header, "partition", who, UNPLACED),
        num_partitions=whole(header, "num-partitions", who, 0),
        model=typed(header, "model", who, str),
        parameters=whole(header, "parameters", who, 0),
        feature_dim=whole(header, "feature-dim", who, 1),
        class_names=names,
        device=typed(header, "device", who, str),
        class_ids=class_ids,
        train_size=samples(header, "train-size", who),
        test_size=samples(header, "test-size", who),
        class_counts=counts,
        image_shape=numbers(header, "image-shape", who),
        role=role,
        name=typed(header, "name", who, str),
        own_data=bool(header.get("own-data")),
    )


def encode_tensors(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return tensors as a Flower record of arrays, in the order given."""
    return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()})


def decode_tensors(record: ArrayRecord, who: str) -> dict[str, Tensor]:
    """Return the tensors of a record of arrays; ``ValueError`` when one is malformed."""
    return {name: torch.from_numpy(_array(record, name, who, np.float32, np.int64)) for name in record}


def _content(header: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None) -> RecordDict:
    content = RecordDict({HEADER: ConfigRecord(dict(header))})
    if weights is not None:
        content[WEIGHTS] = encode_tensors(weights)
    return content


def _place(placement: Placement | None) -> dict[str, Any]:
    if placement is None:
        return {}
    return {
        "partition": placement.partition,
        "num-partitions": placement.num_partitions,
        "class-names": list(placement.class_names),
    }


def _reply_keys(reply: Upload | EvaluationReport) -> dict[str, Any]:
    header: dict[str, Any] = {"round": reply.round, "partition": reply.partition}
    if reply.examples is not None:
        header["num-examples"] = reply.examples
    return header | {f"{METRIC}{key}": float(value) for key, value in reply.metrics.items()}


def _prototype_keys(prototypes: PrototypeSet | None) -> dict[str, Any]:
    if prototypes is None:
        return {}
    vectors = prototypes.vectors.detach().cpu().numpy().astype(FLOAT32)
    header: dict[str, Any] = {CLASS_IDS: prototypes.class_ids.tolist(), VECTORS: vectors.tobytes()}
    if prototypes.counts is not None:
        header[COUNTS] = prototypes.counts.tolist()
    return header


def _weights(content: RecordDict, who: str) -> dict[str, Tensor] | None:
    if WEIGHTS not in content:
        return None
    record = content[WEIGHTS]
    if not isinstance(record, ArrayRecord):
        raise ValueError(f"{who} sent {WEIGHTS} as {type(record).__name__}: an ArrayRecord is needed")
    arrays = {name: _array(record, name, who, np.float32, np.int64) for name in record}
    check_weights(arrays, who)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _prototypes(
    header: ConfigRecord, who: str, num_classes: int, width: int, largest_norm: float = LARGEST_NORM
) -> PrototypeSet | None:
    if not {CLASS_IDS, VECTORS, COUNTS} & set(header):
        return None
    ids, data = np.array(numbers(header, CLASS_IDS, who), np.int64), typed(header, VECTORS, who, bytes)
    if len(data) != len(ids) * width * FLOAT32.itemsize:
        raise ValueError(f"{who} sent {len(data)} bytes of {VECTORS}: float32 ({len(ids)}, {width}) are needed")
    vectors = np.frombuffer(data, FLOAT32).reshape(len(ids), width).astype(np.float32)
    counts = np.array(numbers(header, COUNTS, who), np.int64) if COUNTS in header else None
    check_prototypes(ids, vectors, counts, who, num_classes, width, largest_norm)
    known = torch.from_numpy(counts) if counts is not None else None
    return PrototypeSet(torch.from_numpy(ids), torch.from_numpy(vectors), known)


def _array(record: ArrayRecord, key: str, who: str, *dtypes: type[np.generic]) -> np.ndarray[Any, Any]:
    """Return an array of a record; ``ValueError`` naming the sender and the key when it is malformed."""
    array = record[key]
    try:
        if array.stype != "numpy.ndarray":
            raise ValueError(f"serialised as {array.stype!r}")
        return read_npy(array.data, dtypes)
    except ValueError as error:
        raise ValueError(f"{who} sent a malformed array {key!r}: {error}") from error


def _check_header(content: RecordDict, expected: Expected, who: str) -> ConfigRecord:
    header = _header(content, who)
    for key, wanted in (("round", expected.round), ("partition", expected.partition)):
        found = whole(header, key, who, 0)
        if found != wanted:
            raise ValueError(f"{who} replied for {key} {found}: {wanted} is needed")
    return header


def _metrics(header: ConfigRecord, who: str) -> dict[str, float]:
    return metrics({key.removeprefix(METRIC): value for key, value in header.items() if key.startswith(METRIC)}, who)


def _confusion(header: ConfigRecord, expected: Expected, who: str, examples: int | None) -> Tensor:
    cells, counts = (numbers(header, key, who) for key in ("confusion-cells", "confusion-counts"))
    if examples is not None and sum(counts) > examples:
        raise ValueError(f"{who} sent confusion counts of {sum(counts)} samples: at most num-examples={examples}")
    try:
        return from_cells(cells, counts, expected.num_classes)
    except ValueError as error:
        raise ValueError(f"{who} sent {error}") from error


def _header(content: RecordDict, who: str) -> ConfigRecord:
    record = content.get(HEADER)
    if not isinstance(record, ConfigRecord):
        raise ValueError(f"{who} sent no {HEADER}: a ConfigRecord is needed")
    return record
