"""A foreign reply by itself: what is capped, how far it can move anything, and many that nobody thought of."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from server_app.scrutiny import far_out, inspect_evaluation, inspect_upload
from server_app.strategies.fedproto import FedProto
from server_app.strategies.fedtgp import FedTGP
from task.foreign import LARGEST_METRIC, LARGEST_NORM, LARGEST_WEIGHT, MOST_SAMPLES, one_line
from task.messages import EvaluationReport, Expected, Upload
from task.npy import read_npy
from task.payload import decode_evaluation, decode_node_report, decode_upload, encode_node_report, encode_upload
from tests.lies import TERA, K, Lie, header, metric, node, promise, record, sent

C = 5
EXPECTED = Expected(partition=3, round=2, num_classes=C, feature_dim=K)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def test_counts_are_capped_by_what_the_client_said_at_the_start() -> None:
    both = frozenset({"prototypes", "weights"})
    inspect_upload(sent([6, 4]), node(), both, passes=1)
    inspect_upload(sent([12, 8]), node(), both, passes=2)
    inspect_upload(sent([10**6, 1]), node(train_size=None), both, passes=1)  # it keeps its size to itself
    with pytest.raises(ValueError, match="client 3 sent counts of 11 samples: at most 10"):
        inspect_upload(sent([6, 5]), node(), both, passes=1)
    with pytest.raises(ValueError, match="client 3 sent num-examples of 11 samples: at most 10"):
        inspect_upload(Upload(3, 2, examples=11), node(), both, passes=5)
    report = EvaluationReport(3, 2, 6, {"loss": 1.0, "accuracy-head": 0.5})
    with pytest.raises(ValueError, match="client 3 sent num-examples of 6 samples: at most 5"):
        inspect_evaluation(report, node(), with_prototypes=False, report_sizes=True)


def test_a_giant_is_told_from_the_median_of_three() -> None:
    lengths = [0.5, 1.0, 3.0, 10.1]
    uploads = [(sent(length=length, partition=number), None) for number, length in enumerate(lengths)]
    assert dict(far_out(uploads, 10.0)) == {
        3: "client 3 sent a longest prototype of 10.1: at most 10 times the round's median, 1, is allowed"
    }
    small = [(sent(length=length, partition=number), None) for number, length in enumerate((1e-4, 1e-4, 0.5))]
    assert not dict(far_out(small, 100.0))  # longer than features of a model that learnt nothing, and harmless
    assert not dict(far_out(uploads[1:3], 1.5))  # of two nobody knows which is the giant
    weights = [(Upload(number, 2), {"w": torch.full((4,), size)}) for number, size in enumerate([1.0, -2.0, 1.0, 1e8])]
    assert list(dict(far_out(weights, 100.0))) == [3]
    assert list(dict(far_out([(Upload(7, 2), {"w": torch.tensor(float("inf"))})], 100.0))) == [7]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    st.integers(1, 2**31),
    st.sampled_from(["weighted", "uniform"]),
)
def test_an_average_moves_by_no_more_than_the_stated_bound(lengths: list[float], claimed: int, rule: str) -> None:
    """What passes moves a mean in which it weighs w by at most w (limit + the longest honest prototype)."""
    uploads = [sent([5, 5], length, number) for number, length in enumerate(lengths)]
    limit = 100.0 * max(sorted(lengths)[2], 1.0)  # the liar is the longest of the five
    liar = sent([claimed, claimed], -limit * 0.999, 4)
    assert not dict(far_out([(upload, None) for upload in [*uploads, liar]], 100.0))
    strategy = FedProto(aggregation=rule)  # type: ignore[arg-type]
    state = strategy.init_state(C, K, torch.Generator())
    honest, moved = (
        strategy.absorb(state, replies, torch.Generator(), torch.device("cpu"))[0]["vectors"]
        for replies in (uploads, [*uploads, liar])
    )
    share = claimed / (claimed + 20) if rule == "weighted" else 1 / 5
    bound = share * (limit + max(lengths))
    assert float(torch.linalg.vector_norm(moved - honest, dim=1).max()) <= bound * 1.0001


def test_a_round_of_fedtgp_moves_no_parameter_by_more_than_its_steps_allow() -> None:
    """One step of AdamW moves a parameter by at most lr (1 - beta1) / sqrt(1 - beta2), 3.2 lr, and the decay."""
    strategy = FedTGP(epochs=20, lr=0.001, weight_decay=0.0, init_norm=None)
    before = strategy.init_state(C, K, torch.Generator().manual_seed(0))
    uploads = [sent(length=length, partition=number) for number, length in enumerate((1.0, 2.0, -9999.0))]
    after, metrics = strategy.absorb(before, uploads, torch.Generator().manual_seed(0), torch.device("cpu"))
    moved = max(float((after[name] - before[name]).abs().max()) for name in before if name != "trained_rounds")
    assert 0 < moved <= 20 * 0.001 * 0.1 / 0.001**0.5
    assert metrics["margin"] <= strategy.margin_cap


NUMBERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(), st.sampled_from([0, 1, 2, 3, TERA, 2**31]))
VALUES = st.one_of(
    NUMBERS, st.booleans(), st.text(max_size=9), st.binary(max_size=9), st.lists(st.integers(-9, 2**62), max_size=9)
)
KEYS = st.sampled_from(
    ("round", "partition", "num-examples", "train-size", "class-ids", "class-names", "counts", "vectors", "x\ny")
)
SHAPES = st.lists(st.one_of(st.integers(-3, 9), st.sampled_from([True, 10**30, 2**62, 2**63])), max_size=4)
DESCRS = st.sampled_from(["<f4", "<i8", ">f4", "<f8", "|O", "<U3", "|b1", "<c8", "<M8[s]", "|V4", "junk"])
NOISE = st.one_of(
    st.builds(lambda data: Array("float32", (1,), "numpy.ndarray", data), st.binary(max_size=60)),
    st.builds(lambda shape, descr, data: promise(tuple(shape), data, descr), SHAPES, DESCRS, st.binary(max_size=64)),
    st.just(Array("float32", (1,), "pickle", b"cos\nsystem\n")),
)
FLOATS = st.one_of(st.floats(-9, 9, width=32), st.floats(width=32))
SIZES = st.sampled_from([2, 2, 2, 0, 1, 3])  # two classes are those of the good reply
LISTS = SIZES.flatmap(
    lambda size: st.one_of(
        *(
            st.lists(elements, min_size=size, max_size=size)
            for elements in (st.integers(-1, 5), st.sampled_from([-1, 0, 1, 7, TERA]))
        )
    )
)
VECTORS = SIZES.flatmap(lambda rows: arrays("<f4", (rows, K), elements=FLOATS)).map(lambda found: found.tobytes())
WEIGHTS = SIZES.flatmap(lambda size: arrays(np.float32, (size,), elements=FLOATS)).map(Array)
METRICS = st.dictionaries(st.sampled_from(["loss", "accuracy-head", "a\nb", "z" * 99]), NUMBERS, max_size=4)


def weight(value: Array) -> Lie:
    def lie(content: RecordDict) -> None:
        if "weights" in content:
            content["weights"]["w"] = value  # type: ignore[index]

    return lie


PROTOTYPE_CHANGES = st.one_of(
    st.builds(lambda key, value: header(**{key: value}), st.sampled_from(["class-ids", "counts"]), LISTS),
    st.builds(lambda value: header(vectors=value), st.one_of(VECTORS, st.binary(max_size=40))),
)
LIES = st.one_of(
    PROTOTYPE_CHANGES,
    PROTOTYPE_CHANGES,
    st.one_of(WEIGHTS, NOISE).map(weight),
    st.builds(lambda key, value: header(**{key: value}), KEYS, VALUES),
    METRICS.map(lambda values: metric(**values)),
    st.sampled_from(["header", "weights"]).map(lambda name: record(name, ArrayRecord)),
)
GOOD: list[Callable[[], RecordDict]] = [
    lambda: encode_upload(sent([3, 4])),
    lambda: encode_upload(sent([3, 4])),
    lambda: encode_upload(Upload(3, 2, weights={"w": torch.ones(2)}, examples=4, metrics={"loss": 1.0})),
    lambda: encode_node_report(node()),
]


@st.composite
def contents(draw: st.DrawFn) -> RecordDict:
    """A good reply in which up to three things are not."""
    content = draw(st.sampled_from(GOOD))()
    for lie in draw(st.lists(LIES, max_size=3)):
        try:
            lie(content)
        except (KeyError, TypeError, ValueError):  # Flower itself does not let it be sent
            continue
    return content


FUZZ = settings(max_examples=200, deadline=1000, suppress_health_check=[HealthCheck.too_slow])


def refused(decode: Callable[[], Any]) -> Any:
    """The decoded reply, or None for one that was refused as every bad one must be: in one line with its sender."""
    try:
        return decode()
    except ValueError as error:
        message = str(error)
    assert message.startswith(("client 3 ", "node 12 "))
    assert one_line(message).isprintable()
    return None


@FUZZ
@given(contents())
def test_whatever_comes_is_refused_by_name_or_is_what_it_claims(content: RecordDict) -> None:
    upload = refused(lambda: decode_upload(content, EXPECTED))
    report = refused(lambda: decode_evaluation(content, EXPECTED))
    refused(lambda: decode_node_report(content, 12))
    for reply in (upload, report):
        if reply is not None:
            assert (reply.partition, reply.round) == (3, 2)
            assert all(abs(value) <= LARGEST_METRIC for value in reply.metrics.values())
            assert reply.examples is None or 0 <= reply.examples <= MOST_SAMPLES
    for tensor in (upload.weights or {}).values() if upload is not None else ():
        assert tensor.dtype in (torch.float32, torch.int64)
        assert bool((tensor.double().abs() <= LARGEST_WEIGHT * 3).all())
    prototypes = upload.prototypes if upload is not None else None
    if prototypes is not None:
        assert prototypes.vectors.shape == (len(prototypes.class_ids), K)
        assert set(prototypes.class_ids.tolist()) <= set(range(C))
        assert len(set(prototypes.class_ids.tolist())) == len(prototypes.class_ids)
        assert bool((torch.linalg.vector_norm(prototypes.vectors.double(), dim=1) <= LARGEST_NORM).all())
        assert prototypes.counts is None or bool((prototypes.counts.clamp(1, MOST_SAMPLES) == prototypes.counts).all())
        with torch.no_grad():
            dense, known = prototypes.dense(C)
        assert bool(torch.isfinite(dense).all())
        assert int(known.sum()) == len(prototypes.class_ids)


@FUZZ
@given(SHAPES, DESCRS, st.binary(max_size=64), st.integers(0, 200))
def test_bytes_are_an_array_or_refused(shape: list[Any], descr: str, data: bytes, cut: int) -> None:
    whole = promise(tuple(shape), data, descr).data
    for bytes_ in (whole, whole[:cut], data, whole[cut:]):
        try:
            found = read_npy(bytes_, (np.float32, np.int64))
        except ValueError:
            continue
        assert found.dtype in (np.dtype(np.float32), np.dtype(np.int64))
        assert found.nbytes <= len(bytes_)
