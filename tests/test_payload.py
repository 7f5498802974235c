from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from task.messages import Download, EvaluationReport, Expected, NodeReport, PrototypeSet, Upload
from task.payload import (
    decode_download,
    decode_evaluation,
    decode_node_report,
    decode_upload,
    encode_download,
    encode_evaluation,
    encode_node_report,
    encode_upload,
    nbytes,
)

C, K = 5, 4
EXPECTED = Expected(partition=3, round=2, num_classes=C, feature_dim=K)


def prototypes(counts: bool = False) -> PrototypeSet:
    vectors = torch.arange(8, dtype=torch.float32).reshape(2, K)
    return PrototypeSet(torch.tensor([1, 4]), vectors, torch.tensor([7, 9]) if counts else None)


def upload(counts: bool = False) -> RecordDict:
    return encode_upload(Upload(3, 2, prototypes(counts), metrics={"loss": 0.5}))


def same(a: PrototypeSet | None, b: PrototypeSet | None) -> bool:
    assert a is not None
    assert b is not None
    counts = (a.counts is None) == (b.counts is None) and (a.counts is None or torch.equal(a.counts, b.counts))  # type: ignore[arg-type]
    return torch.equal(a.class_ids, b.class_ids) and torch.equal(a.vectors, b.vectors) and counts


@pytest.mark.parametrize("counts", [True, False])
def test_upload_round_trip(counts: bool) -> None:
    decoded = decode_upload(upload(counts), EXPECTED)
    assert same(decoded.prototypes, prototypes(counts))
    assert decoded.metrics == {"loss": 0.5}


def test_download_round_trip() -> None:
    sent = Download(prototypes(), None, 2, "run-7", 1, 0)
    decoded = decode_download(encode_download(sent), C, K)
    assert (decoded.round, decoded.session, decoded.state_round, decoded.durable_round) == (2, "run-7", 1, 0)
    assert same(decoded.prototypes, prototypes())
    assert decode_download(encode_download(Download(round=1, session="s")), C, K).prototypes is None


@pytest.mark.parametrize("examples", [None, 0, 12])
def test_evaluation_round_trip(examples: int | None) -> None:
    sent = EvaluationReport(3, 2, examples, {"loss": 0.1, "accuracy-head": 0.5})
    assert decode_evaluation(encode_evaluation(sent), EXPECTED) == sent


@pytest.mark.parametrize("shared", [True, False])
def test_node_report_round_trip(shared: bool) -> None:
    sizes = (10, 3, (1, 2, 10)) if shared else (None, None, None)
    sent = NodeReport(1, 4, "cnn4", 99, K, ("a", "b", "c"), "cpu", (0, 2), *sizes, image_shape=(1, 28, 28))
    assert decode_node_report(encode_node_report(sent), 12) == sent


def test_a_client_without_classes_or_labels_can_report() -> None:
    for facts in ((0, 0, (0, 0)), (5, 3, None, (1, 28, 28), "unlabelled")):
        sent = NodeReport(0, 1, "cnn4", 9, K, ("a", "b"), "cpu", (), *facts)  # type: ignore[arg-type]
        assert decode_node_report(encode_node_report(sent), 1) == sent
    with pytest.raises(ValueError, match="node 4 sent role='teacher'"):
        decode_node_report(encode_node_report(NodeReport(0, 1, "x", 9, K, ("a",), "cpu", (), role="teacher")), 4)


def test_weights_round_trip_with_their_types() -> None:
    weights = {"layer.weight": torch.randn(3, 2), "layer.num_batches_tracked": torch.tensor(7)}
    decoded = decode_upload(encode_upload(Upload(3, 2, weights=weights, examples=12)), EXPECTED)
    assert decoded.weights is not None
    assert list(decoded.weights) == list(weights)
    assert all(torch.equal(decoded.weights[name], tensor) for name, tensor in weights.items())
    assert decoded.weights["layer.num_batches_tracked"].dtype == torch.int64
    assert decoded.examples == 12
    received = decode_download(encode_download(Download(None, weights, 1, "s")), C, K).weights
    assert received is not None
    assert torch.equal(received["layer.weight"], weights["layer.weight"])


@pytest.mark.parametrize(
    "tensor", [torch.tensor([1.0, float("nan")]), torch.tensor([float("inf")]), torch.zeros(2, dtype=torch.float64)]
)
def test_bad_weights_are_refused_with_client_and_name(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"client 3 sent .*head\.bias"):
        decode_upload(encode_upload(Upload(3, 2, weights={"head.bias": tensor})), EXPECTED)


def test_vectors_dominate_the_bytes() -> None:
    big = PrototypeSet(torch.arange(100), torch.zeros(100, 512))
    size = nbytes(encode_upload(Upload(0, 1, big)))
    assert 100 * 512 * 4 <= size <= 100 * 512 * 4 + 100 * 8 + 1000


def replaced(key: str, value: object) -> RecordDict:
    content = upload(counts=True)
    content["header"][key] = value.tobytes() if isinstance(value, np.ndarray) else value  # type: ignore[index]
    return content


def weighted(array: Array) -> RecordDict:
    content = upload()
    content["weights"] = ArrayRecord({"layer": array})
    return content


def with_header(**changes: object) -> RecordDict:
    content = upload()
    content["header"] = ConfigRecord(dict(content["header"].items()) | changes)  # type: ignore[arg-type]
    return content


def header_promises(shape: tuple[int, ...], data: bytes = b"") -> Array:
    """Bytes whose own header claims more than they hold."""
    import io

    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return Array(dtype="float32", shape=shape, stype="numpy.ndarray", data=stream.getvalue() + data)


def without(record: str) -> RecordDict:
    content = upload()
    del content[record]
    return content


F32 = np.float32
BROKEN_HEADER = b"\x93NUMPY\x01\x00\x10\x00{'descr': (((((((("
MALFORMED: dict[str, Callable[[], RecordDict]] = {
    "wrong width": lambda: replaced("vectors", np.zeros((2, K + 1), F32)),
    "half a number": lambda: replaced("vectors", np.zeros((2, K), F32).tobytes()[:-2]),
    "other number of ids": lambda: replaced("class-ids", [1]),
    "class id too high": lambda: replaced("class-ids", [1, 999]),
    "class id negative": lambda: replaced("class-ids", [-1, 1]),
    "class id twice": lambda: replaced("class-ids", [1, 1]),
    "float class ids": lambda: replaced("class-ids", [1.0, 2.0]),
    "no class ids": lambda: replaced("class-ids", "1 4"),
    "float64 vectors": lambda: replaced("vectors", np.zeros((2, K))),
    "vectors as numbers": lambda: replaced("vectors", [0.0] * 2 * K),
    "NaN": lambda: replaced("vectors", np.full((2, K), np.nan, F32)),
    "Inf": lambda: replaced("vectors", np.full((2, K), np.inf, F32)),
    "negative count": lambda: replaced("counts", [-1, 5]),
    "absurd count": lambda: replaced("counts", [10**12, 5]),
    "wrong round": lambda: with_header(round=1),
    "other client": lambda: with_header(partition=4),
    "round as text": lambda: with_header(round="2"),
    "no header": lambda: without("header"),
    "metric as text": lambda: replaced("metric.loss", "0.5"),
    "NaN metric": lambda: encode_upload(Upload(3, 2, metrics={"loss": float("nan")})),
    "empty bytes": lambda: replaced("vectors", b""),
    "a norm of a million and more": lambda: replaced("vectors", np.full((2, K), 1e25, F32)),
    "weights with a shape of terabytes": lambda: weighted(header_promises((10**6, 10**6))),
    "weights that are no numpy bytes": lambda: weighted(Array("float32", (2, K), "numpy.ndarray", b"\x80\x04junk")),
    "weights as text": lambda: weighted(Array(np.full((2, K), "x"))),
    "weights as dates": lambda: weighted(Array(np.zeros((2, K), "M8[s]"))),
    "big-endian weights": lambda: weighted(Array(np.zeros((2, K), ">f4"))),
    "a header that is no literal": lambda: weighted(Array("f", (2, K), "numpy.ndarray", BROKEN_HEADER)),
    "weights of no bytes": lambda: weighted(Array("float32", (2, K), "numpy.ndarray", b"")),
    "foreign serialisation": lambda: weighted(Array("float32", (2, K), "pickle", b"junk")),
}


@pytest.mark.parametrize("name", list(MALFORMED))
def test_malformed_uploads_are_refused_with_the_client_named(name: str) -> None:
    with pytest.raises(ValueError, match="client 3") as caught:
        decode_upload(MALFORMED[name](), EXPECTED)
    assert "\n" not in str(caught.value)


def test_object_arrays_are_never_unpickled() -> None:
    import io
    import pickle

    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    array = Array("object", (1,), "numpy.ndarray", stream.getvalue() + pickle.dumps(["boom"]))
    with pytest.raises(ValueError, match="client 3"):
        decode_upload(weighted(array), EXPECTED)


def test_an_empty_list_does_not_stop_the_counting_of_bytes() -> None:
    assert nbytes(with_header(extra=[])) == nbytes(upload())


def test_a_message_has_few_objects() -> None:
    """Flower moves each by a call of its own, which costs 700 bytes."""
    assert list(upload(counts=True)) == ["header"]
    assert list(encode_evaluation(EvaluationReport(3, 2, 5, {"loss": 1.0}))) == ["header"]


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan")])
def test_accuracies_out_of_range_are_refused(value: float) -> None:
    content = encode_evaluation(EvaluationReport(3, 2, 5, {"accuracy-head": value, "loss": 1.0}))
    with pytest.raises(ValueError, match="client 3"):
        decode_evaluation(content, EXPECTED)


def test_session_names_cannot_leave_the_state_folder() -> None:
    with pytest.raises(ValueError, match="session"):
        decode_download(encode_download(Download(round=1, session="../../etc")), C, K)
