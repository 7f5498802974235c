"""What travels between server and clients, and the only file that names records and keys.

Every message is a Flower ``RecordDict``: a ``header`` (round, partition), at most one ``prototypes`` and one
``weights`` record of arrays, and a ``metrics`` record of numbers. Nothing is pickled. Decoding trusts nobody: shape,
dtype, class ids, round and finiteness are checked; an error names the client, the record and what is allowed.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from task.confusion import from_cells, to_cells
from task.header import numbers as _numbers
from task.header import typed as _typed
from task.header import whole as _whole
from task.messages import Download, EvaluationReport, Expected, NodeReport, PrototypeSet, Upload
from task.npy import read_npy

HEADER, PROTOTYPES, WEIGHTS, METRICS = "header", "prototypes", "weights", "metrics"
LARGEST_NORM = 1e6
"""The largest norm of a prototype that is believed; features of trained networks have norms of tens."""


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
    return _with_arrays(RecordDict({HEADER: ConfigRecord(header)}), download)


def decode_download(content: RecordDict, num_classes: int, feature_dim: int) -> Download:
    """Return what the server sent; ``ValueError`` when it does not fit C classes of width K."""
    header = _config(content, HEADER, "server")
    session = _typed(header, "session", "server", str)
    if not session or not all(c.isascii() and (c.isalnum() or c in "-_") for c in session):
        raise ValueError(f"server sent session={session!r}: only letters, digits, '-' and '_' are allowed")
    return Download(
        round=_whole(header, "round", "server", 0),
        session=session,
        state_round=_whole(header, "state-round", "server", 0),
        durable_round=_whole(header, "durable-round", "server", 0),
        confusion=header.get("confusion") is True,
        prototypes=_prototypes(content, "server", num_classes, feature_dim),
        weights=_weights(content, "server"),
    )


def encode_upload(upload: Upload) -> RecordDict:
    """Return the message content of a train reply."""
    header: dict[str, Any] = {"round": upload.round, "partition": upload.partition}
    if upload.examples is not None:
        header["num-examples"] = upload.examples
    metrics = MetricRecord({key: float(value) for key, value in upload.metrics.items()})
    return _with_arrays(RecordDict({HEADER: ConfigRecord(header), METRICS: metrics}), upload)


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
        prototypes=_prototypes(content, who, expected.num_classes, expected.feature_dim),
        weights=_weights(content, who),
        examples=_whole(header, "num-examples", who, 0) if "num-examples" in header else None,
        metrics=_metrics(content, who),
    )


def encode_evaluation(report: EvaluationReport) -> RecordDict:
    """Return the message content of an evaluate reply."""
    header: dict[str, Any] = {"round": report.round, "partition": report.partition}
    if report.examples is not None:
        header["num-examples"] = report.examples
    if report.confusion is not None:
        header["confusion-cells"], header["confusion-counts"] = to_cells(report.confusion)
    metrics = MetricRecord({key: float(value) for key, value in report.metrics.items()})
    return RecordDict({HEADER: ConfigRecord(header), METRICS: metrics})


def decode_evaluation(content: RecordDict, expected: Expected) -> EvaluationReport:
    """Return the evaluate reply of a client; ``ValueError`` as in ``decode_upload``."""
    who = f"client {expected.partition}"
    header = _check_header(content, expected, who)
    examples = _whole(header, "num-examples", who, 0) if "num-examples" in header else None
    metrics = _metrics(content, who)
    for key, value in metrics.items():
        if key.startswith("accuracy") and not 0 <= value <= 1:
            raise ValueError(f"{who} sent {METRICS}.{key}={value}: it must be in [0, 1]")
    confusion = _confusion(header, expected, who, examples) if "confusion-cells" in header else None
    return EvaluationReport(expected.partition, expected.round, examples, metrics, confusion)


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
    }
    for key, value in (("train-size", report.train_size), ("test-size", report.test_size)):
        if value is not None:
            header[key] = value
    if report.class_counts is not None:
        header["class-counts"] = list(report.class_counts)
    return RecordDict({HEADER: ConfigRecord(header)})


def decode_node_report(content: RecordDict, node_id: int) -> NodeReport:
    """Return the facts of the client on node ``node_id``; ``ValueError`` when one is missing or malformed."""
    who = f"node {node_id}"
    header = _config(content, HEADER, who)
    names = header.get("class-names")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{who} sent class-names={names!r}: a list of at least one text is needed")
    num_classes = len(names)
    counts = _numbers(header, "class-counts", who) if "class-counts" in header else None
    if counts is not None and len(counts) != num_classes:
        raise ValueError(f"{who} sent {len(counts)} class-counts for {num_classes} classes")
    class_ids = _numbers(header, "class-ids", who)
    if any(not 0 <= class_id < num_classes for class_id in class_ids):
        raise ValueError(f"{who} sent class-ids {class_ids[:5]}...: they must be in 0..{num_classes - 1}")
    role = _typed(header, "role", who, str)
    if role not in ("labelled", "unlabelled"):
        raise ValueError(f"{who} sent role={role!r}: labelled or unlabelled is needed")
    return NodeReport(
        partition=_whole(header, "partition", who, 0),
        num_partitions=_whole(header, "num-partitions", who, 1),
        model=_typed(header, "model", who, str),
        parameters=_whole(header, "parameters", who, 0),
        feature_dim=_whole(header, "feature-dim", who, 1),
        class_names=tuple(map(str, names)),
        device=_typed(header, "device", who, str),
        class_ids=class_ids,
        train_size=_whole(header, "train-size", who, 0) if "train-size" in header else None,
        test_size=_whole(header, "test-size", who, 0) if "test-size" in header else None,
        class_counts=counts,
        image_shape=_numbers(header, "image-shape", who),
        role=role,
    )


def encode_tensors(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return tensors as a Flower record of arrays, in the order given."""
    return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()})


def decode_tensors(record: ArrayRecord, who: str) -> dict[str, Tensor]:
    """Return the tensors of a record of arrays; ``ValueError`` when one is malformed."""
    return {name: torch.from_numpy(_array(record, name, who, np.float32, np.int64)) for name in record}


def _with_arrays(content: RecordDict, message: Download | Upload) -> RecordDict:
    prototypes = message.prototypes
    if message.weights is not None:
        content[WEIGHTS] = encode_tensors(message.weights)
    if prototypes is not None:
        tensors = {"class-ids": prototypes.class_ids, "vectors": prototypes.vectors}
        if prototypes.counts is not None:
            tensors["counts"] = prototypes.counts
        content[PROTOTYPES] = encode_tensors(tensors)
    return content


def _weights(content: RecordDict, who: str) -> dict[str, Tensor] | None:
    if WEIGHTS not in content:
        return None
    record = content[WEIGHTS]
    if not isinstance(record, ArrayRecord):
        raise ValueError(f"{who} sent {WEIGHTS} as {type(record).__name__}: an ArrayRecord is needed")
    tensors = decode_tensors(record, who)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{who} sent {WEIGHTS}.{name} that is not finite (NaN or Inf)")
    return tensors


def _prototypes(content: RecordDict, who: str, num_classes: int, width: int) -> PrototypeSet | None:
    if PROTOTYPES not in content:
        return None
    record = content[PROTOTYPES]
    if not isinstance(record, ArrayRecord):
        raise ValueError(f"{who} sent {PROTOTYPES} as {type(record).__name__}: an ArrayRecord is needed")
    unknown = set(record) - {"class-ids", "vectors", "counts"}
    if unknown or not {"class-ids", "vectors"} <= set(record):
        raise ValueError(f"{who} sent {PROTOTYPES} with {sorted(record)}: class-ids, vectors and maybe counts")
    ids = _array(record, "class-ids", who, np.int64)
    vectors = _array(record, "vectors", who, np.float32)
    if ids.ndim != 1 or vectors.shape != (len(ids), width):
        shapes = f"class-ids {ids.shape}, vectors {vectors.shape}"
        raise ValueError(f"{who} sent {PROTOTYPES} of shape {shapes}: (n,) and (n, {width}) are needed")
    if len(ids) and (ids.min() < 0 or ids.max() >= num_classes):
        raise ValueError(f"{who} sent class ids {ids.min()}..{ids.max()}: they must be in 0..{num_classes - 1}")
    if len(np.unique(ids)) != len(ids):
        raise ValueError(f"{who} sent a class id twice")
    if not np.isfinite(vectors).all():
        raise ValueError(f"{who} sent prototypes that are not finite (NaN or Inf)")
    if len(ids) and np.linalg.norm(vectors.astype(np.float64), axis=1).max() > LARGEST_NORM:
        raise ValueError(f"{who} sent a prototype with a norm above {LARGEST_NORM:g}")
    counts = None
    if "counts" in record:
        counts = _array(record, "counts", who, np.int64)
        if counts.shape != ids.shape or (len(counts) and (counts.min() < 1 or counts.max() > 2**31)):
            raise ValueError(f"{who} sent malformed counts: one per class, from 1 to {2**31}")
    tensors = [torch.from_numpy(array) if array is not None else None for array in (ids, vectors, counts)]
    assert tensors[0] is not None
    assert tensors[1] is not None
    return PrototypeSet(tensors[0], tensors[1], tensors[2])


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
    header = _config(content, HEADER, who)
    for key, wanted in (("round", expected.round), ("partition", expected.partition)):
        found = _whole(header, key, who, 0)
        if found != wanted:
            raise ValueError(f"{who} replied for {key} {found}: {wanted} is needed")
    return header


def _metrics(content: RecordDict, who: str) -> dict[str, float]:
    record = content.get(METRICS)
    if not isinstance(record, MetricRecord):
        raise ValueError(f"{who} sent no {METRICS}: a MetricRecord is needed")
    values = {}
    for key, value in record.items():
        if isinstance(value, list) or not math.isfinite(value):
            raise ValueError(f"{who} sent {METRICS}.{key}={value}: a finite number is needed")
        values[key] = float(value)
    return values


def _confusion(header: ConfigRecord, expected: Expected, who: str, examples: int | None) -> Tensor:
    cells, counts = (_numbers(header, key, who) for key in ("confusion-cells", "confusion-counts"))
    if examples is not None and sum(counts) > examples:
        raise ValueError(f"{who} sent confusion counts of {sum(counts)} samples: at most num-examples={examples}")
    try:
        return from_cells(cells, counts, expected.num_classes)
    except ValueError as error:
        raise ValueError(f"{who} sent {error}") from error


def _config(content: RecordDict, key: str, who: str) -> ConfigRecord:
    record = content.get(key)
    if not isinstance(record, ConfigRecord):
        raise ValueError(f"{who} sent no {key}: a ConfigRecord is needed")
    return record
