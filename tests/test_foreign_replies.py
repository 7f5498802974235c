"""A foreign reply: every method, every lie that we thought of, and many that nobody did."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from server_app.scrutiny import far_out, inspect_evaluation, inspect_upload
from server_app.strategies.base import RoundStrategy
from server_app.strategies.fedproto import FedProto
from server_app.strategies.fedtgp import FedTGP
from task.foreign import LARGEST_METRIC, LARGEST_NORM, LARGEST_WEIGHT, MOST_SAMPLES, one_line
from task.messages import EvaluationReport, Expected, NodeReport, PrototypeSet, Upload
from task.npy import read_npy
from task.payload import decode_evaluation, decode_node_report, decode_upload, encode_node_report, encode_upload
from tests.algorithms import fitting
from tests.stripes import rows_of, run, same, state_of, summary_of

C, K, TERA = 5, 4, 10**12
EXPECTED = Expected(partition=3, round=2, num_classes=C, feature_dim=K)
Lie = Callable[[RecordDict], None]
METHODS = [
    *("fedtgp", "fedproto", "fedproto_official", "feddistill", "lg_fedavg", "fedgen", "fml", "fedkd", "fedkd_official"),
    *("fedavg", "dccfssl", "rscfed"),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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


@pytest.mark.parametrize("algorithm", METHODS)
def test_every_lie_is_refused_by_name_and_the_others_stay(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round 2 one client tells each lie in turn; then the round goes on without any."""
    found: dict[str, tuple[list[int], list[dict[str, Any]]]] = {}
    honest: list[int] = []
    aggregate = RoundStrategy.aggregate_train

    def probe(self: RoundStrategy, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        contents, sent = [copy.deepcopy(reply.content) for reply in replies], copy.copy(self._sent)
        liar = self.run.roster.node_ids[1]
        if server_round == 2:
            own = contents[[reply.metadata.src_node_id for reply in replies].index(liar)]
            for name, lie in lies_for(own, self.uploads).items():
                for reply, content in zip(replies, contents, strict=True):
                    reply.content = copy.deepcopy(content)
                    if reply.metadata.src_node_id == liar:
                        lie(reply.content)
                self._sent, self._row["failures"] = copy.copy(sent), []
                uploads = self._without_giants(self._collect(replies, "train", decode_upload))
                found[name] = [upload.partition for upload in uploads], self._row["failures"]
            for reply, content in zip(replies, contents, strict=True):
                reply.content = content
            self._sent, self._row["failures"] = sent, []
            honest.extend(self._row["sampled"])
        return aggregate(self, server_round, replies)

    monkeypatch.setattr(RoundStrategy, "aggregate_train", probe)
    run(tmp_path / "run", algorithm, fitting_small(algorithm))
    assert len(found) > 20
    accepted = [name for name, (partitions, _) in found.items() if 1 in partitions]
    assert not accepted
    for name, (partitions, failures) in found.items():
        assert partitions == [partition for partition in honest if partition != 1], (name, failures)
        (failure,) = failures
        assert (failure["partition"], failure["phase"]) == (1, "train")
        assert failure["reason"].startswith("client 1 "), (name, failure)
        assert "nobody foresaw" not in failure["reason"]
        assert "cannot be read" not in failure["reason"], (name, failure)
    assert all(not row["failures"] for row in rows_of(tmp_path / "run"))


def fitting_small(algorithm: str) -> str:
    supervised = "" if "labels=few" in fitting(algorithm) else "labels=all"
    share = " federation.num_clients=4 algorithm.server.subset_size=4" if algorithm == "rscfed" else ""
    return f"partition.max_samples=64 {supervised}{share}"


def test_lies_have_the_effect_of_no_reply(tmp_path: Path) -> None:
    names = iter(["1e6 times as long", "NaN", "class id 999"])
    lies = {"train": [OF_PROTOTYPES[name] for name in names]}

    def spoil(reply: Message, partition: int, number: int) -> Message:
        if reply.metadata.message_type == "train" and partition == 1:
            lies["train"][number - 1](reply.content)
        return reply

    def fail(reply: Message, partition: int, number: int) -> Message:
        if reply.metadata.message_type == "train" and partition == 1:
            raise OSError("no reply")
        return reply

    for name, grid in (("lies", spoil), ("fails", fail)):
        overrides = "federation.rounds=3 federation.evaluate_every=9 partition.max_samples=64 labels=all"
        run(tmp_path / name, "fedtgp", overrides, spoil=grid)
    assert same(state_of(tmp_path / "lies"), state_of(tmp_path / "fails"))
    assert summary_of(tmp_path / "lies")["status"] == "completed with losses"
    assert [len(row["failures"]) for row in rows_of(tmp_path / "lies")] == [1, 1, 1]


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


def test_a_lie_about_the_test_changes_no_other_accuracy(tmp_path: Path) -> None:
    lies = list(EVALUATION.items())

    def spoil(reply: Message, partition: int, number: int) -> Message:
        if reply.metadata.message_type == "evaluate" and partition == 1:
            lies[number - 1][1](reply.content)
        return reply

    words = f"federation.rounds={len(lies)} partition.max_samples=64 labels=all partition=iid"
    run(tmp_path / "run", "fedtgp", words, spoil=spoil)
    for (name, _), row in zip(lies, rows_of(tmp_path / "run"), strict=True):
        (failure,) = row["failures"]
        assert (failure["partition"], failure["phase"]) == (1, "evaluate"), name
        assert failure["reason"].startswith("client 1 "), name
        assert set(row["client_accuracy"]) == {"0", "2", "3"}, name
        assert 0 <= row["accuracy"] <= 1, name


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
    limit = 100.0 * sorted(lengths)[2]  # the liar is the longest of the five
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
    ["round", "partition", "num-examples", "train-size", "class-ids", "class-names", "model", "x\ny"]
)
SHAPES = st.lists(st.one_of(st.integers(-3, 9), st.sampled_from([True, 10**30, 2**62, 2**63])), max_size=4)
DESCRS = st.sampled_from(["<f4", "<i8", ">f4", "<f8", "|O", "<U3", "|b1", "<c8", "<M8[s]", "|V4", "junk"])
NOISE = st.one_of(
    st.builds(lambda data: Array("float32", (1,), "numpy.ndarray", data), st.binary(max_size=60)),
    st.builds(lambda shape, descr, data: promise(tuple(shape), data, descr), SHAPES, DESCRS, st.binary(max_size=64)),
    st.just(Array("float32", (1,), "pickle", b"cos\nsystem\n")),
)
SIZES = st.sampled_from([2, 2, 2, 0, 1, 3])  # two classes are those of the good reply


def values_of(kind: type, elements: st.SearchStrategy[Any], width: int | None) -> st.SearchStrategy[Array]:
    """Arrays that could be those of a reply."""
    shapes = SIZES.map(lambda rows: (rows,) if width is None else (rows, width))
    return shapes.flatmap(lambda shape: arrays(kind, shape, elements=elements)).map(Array)


FLOATS = st.one_of(st.floats(-9, 9, width=32), st.floats(width=32))
PLAUSIBLE = {
    "class-ids": values_of(np.int64, st.integers(-1, 5), None),
    "vectors": values_of(np.float32, FLOATS, K),
    "counts": values_of(np.int64, st.one_of(st.integers(0, 9), st.sampled_from([-1, TERA])), None),
    "w": values_of(np.float32, FLOATS, None),
}
METRICS = st.dictionaries(st.sampled_from(["loss", "accuracy-head", "a\nb", "z" * 99]), NUMBERS, max_size=4)


def change_of(name: str, key: str, value: Any) -> Lie:
    def lie(content: RecordDict) -> None:
        if name in content:
            content[name][key] = value  # type: ignore[index]

    return lie


ARRAY_CHANGES = st.sampled_from(sorted(PLAUSIBLE)).flatmap(
    lambda key: st.one_of(PLAUSIBLE[key], NOISE).map(
        lambda value: change_of("weights" if key == "w" else "prototypes", key, value)
    )
)
LIES = st.one_of(
    ARRAY_CHANGES,
    ARRAY_CHANGES,
    st.builds(lambda key, value: header(**{key: value}), KEYS, VALUES),
    METRICS.map(lambda values: record("metrics", lambda: MetricRecord(values))),
    st.sampled_from(["header", "metrics", "prototypes", "weights"]).map(lambda name: record(name, ArrayRecord)),
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
