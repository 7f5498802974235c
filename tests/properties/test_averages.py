"""What every function that averages must have in common: order, scale, zero weights, one client, bounds."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from server_app.round_fields import metric_means, summarise
from task.averaging import weighted_mean
from task.messages import EvaluationReport
from task.methods.dccfssl_aggregation import aggregate_models, aggregate_prototypes, model_weights
from task.methods.fedconsist import group_weights
from task.methods.feddistill import average_outputs, leave_own_out, make_targets
from task.methods.fedgen import head_shares, label_prior
from task.methods.fedproto import average_prototypes
from task.methods.fedtgp import centroids
from task.methods.lg_fedavg import average_heads
from task.methods.rscfed import sub_consensus

EXAMPLES = settings(max_examples=40, deadline=None)
VALUES = st.floats(-100, 100, width=32)
CLIENTS = st.lists(st.tuples(VALUES, st.integers(1, 500), st.booleans()), min_size=1, max_size=7)
State = dict[str, Tensor]


def state(value: float) -> State:
    return {"weight": torch.tensor([[value, -value]]), "num_batches_tracked": torch.tensor(7)}


def consensus(states: Sequence[State], sizes: Sequence[int], own: Sequence[bool]) -> State:
    scales = {"labelled_factor": 6.0, "labelled_scale": 100.0, "unlabelled_scale": 10000.0}
    return sub_consensus(states, sizes, own, **scales)[0]


def by_group(states: Sequence[State], sizes: Sequence[int], own: Sequence[bool]) -> State:
    return weighted_mean(states, group_weights(sizes, own, 0.5))


def by_authentic(states: Sequence[State], sizes: Sequence[int], own: Sequence[bool]) -> State:
    weights = model_weights([size // 2 for size in sizes], sizes, own)
    return aggregate_models(states, weights, state(0.0))


def prototypes(states: Sequence[State], sizes: Sequence[int], own: Sequence[bool]) -> State:
    vectors = torch.cat([each["weight"] for each in states])
    means, _ = average_prototypes(vectors, torch.zeros(len(states)).long(), torch.tensor(sizes), "weighted", 1)
    return {"weight": means}


def stored_prototypes(states: Sequence[State], sizes: Sequence[int], own: Sequence[bool]) -> State:
    vectors = torch.stack([each["weight"] for each in states])
    counts = torch.tensor(sizes).unsqueeze(1)
    none = torch.zeros(1, 2), torch.zeros(1, dtype=torch.bool)
    return {"weight": aggregate_prototypes(vectors, counts, torch.tensor(own), 9.0, *none)[0]}


Average = Callable[[Sequence[State], Sequence[int], Sequence[bool]], State]
AVERAGES: dict[str, Average] = {
    "weighted_mean": lambda states, sizes, own: weighted_mean(states, sizes),
    "lg_fedavg": lambda states, sizes, own: average_heads(states, sizes),
    "rscfed": consensus,
    "fedconsist": by_group,
    "dccfssl models": by_authentic,
    "dccfssl prototypes": stored_prototypes,
    "fedproto": prototypes,
    "fedproto uniform": lambda states, sizes, own: prototypes(states, [1] * len(sizes), own),
    "fedtgp": lambda states, sizes, own: {
        "weight": centroids(torch.cat([each["weight"] for each in states]), torch.zeros(len(states)).long())[0]
    },
    "feddistill": lambda states, sizes, own: {
        "weight": average_outputs(torch.cat([each["weight"] for each in states]), torch.zeros(len(states)).long(), 2)[
            0
        ][:1]
    },
}
EVERY = pytest.mark.parametrize("name", AVERAGES)
BY_SIZE = ["weighted_mean", "lg_fedavg", "fedconsist", "dccfssl models", "dccfssl prototypes", "fedproto"]


def call(name: str, clients: Sequence[tuple[float, int, bool]]) -> Tensor:
    values, sizes, own = zip(*clients, strict=True)
    return AVERAGES[name]([state(value) for value in values], sizes, own)["weight"].double()


@EVERY
@EXAMPLES
@given(clients=CLIENTS, seed=st.integers(0, 99))
def test_the_order_of_clients_does_not_matter(name: str, clients: list[Any], seed: int) -> None:
    other = list(clients)
    random.Random(seed).shuffle(other)
    assert torch.allclose(call(name, clients), call(name, other), atol=2e-4)


@EVERY
@EXAMPLES
@given(clients=CLIENTS)
def test_an_average_lies_between_its_smallest_and_largest_member(name: str, clients: list[Any]) -> None:
    found = call(name, clients)[0, 0]
    values = [value for value, *_ in clients]
    if (
        name == "dccfssl models"
        and not any(size // 2 for _, size, _ in clients)
        and not any(own for *_, own in clients)
    ):
        values = [0.0]  # nothing to learn from: the model that was there
    assert min(values) - 1e-3 <= found <= max(values) + 1e-3


@EVERY
@EXAMPLES
@given(value=VALUES, size=st.integers(2, 10**6), own=st.booleans())
def test_one_client_is_its_own_average(name: str, value: float, size: int, own: bool) -> None:
    assert torch.allclose(call(name, [(value, size, own)]), state(value)["weight"].double(), rtol=1e-6)


@pytest.mark.parametrize("name", BY_SIZE)
@EXAMPLES
@given(clients=CLIENTS, factor=st.integers(2, 50))
def test_only_the_proportions_of_the_sizes_matter(name: str, clients: list[Any], factor: int) -> None:
    even = [(value, 2 * size, own) for value, size, own in clients]
    scaled = [(value, factor * size, own) for value, size, own in even]
    assert torch.allclose(call(name, even), call(name, scaled), atol=2e-4)


@EVERY
@EXAMPLES
@given(clients=CLIENTS)
def test_a_client_that_is_there_twice_counts_like_one_of_twice_the_size(name: str, clients: list[Any]) -> None:
    if name not in BY_SIZE:
        return
    even = [(value, 2 * size, own) for value, size, own in clients]
    merged = [(even[0][0], 2 * even[0][1], even[0][2]), *even[1:]]
    assert torch.allclose(call(name, [even[0], *even]), call(name, merged), atol=2e-4)


@EXAMPLES
@given(clients=CLIENTS, held=st.sampled_from([float("nan"), float("inf"), 1e38]))
def test_a_client_of_weight_zero_does_not_matter_whatever_it_holds(clients: list[Any], held: float) -> None:
    values, sizes, own = zip(*clients, strict=True)
    states = [state(value) for value in values]
    one, two = weighted_mean(states, sizes), weighted_mean([state(held), *states], [0, *sizes])
    assert torch.equal(one["weight"], two["weight"])
    vectors = torch.stack([each["weight"] for each in [state(held), *states]])
    none = torch.zeros(1, 2), torch.zeros(1, dtype=torch.bool)
    with_it = aggregate_prototypes(
        vectors, torch.tensor([[0], *([n] for n in sizes)]), torch.tensor([True, *own]), 3.0, *none
    )
    without = aggregate_prototypes(vectors[1:], torch.tensor([[n] for n in sizes]), torch.tensor(own), 3.0, *none)
    assert torch.equal(with_it[0], without[0])


def test_nothing_at_all_changes_nothing() -> None:
    assert torch.equal(aggregate_models([], [], state(3.0))["weight"], state(3.0)["weight"])
    assert torch.equal(aggregate_models([state(9.0)], [0.0], state(3.0))["weight"], state(3.0)["weight"])
    previous, known = torch.tensor([[1.0, 2.0]]), torch.tensor([True])
    kept = aggregate_prototypes(
        torch.zeros(2, 1, 2), torch.zeros(2, 1).long(), torch.ones(2).bool(), 2.0, previous, known
    )
    assert torch.equal(kept[0], previous)
    with pytest.raises(ValueError, match="cannot be normalised"):
        weighted_mean([state(1.0)], [0])
    with pytest.raises(ValueError, match="at least one client needs a sample"):
        group_weights([0, 0], [True, False], 0.5)


@EXAMPLES
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=6), share=st.floats(0, 1), data=st.data())
def test_group_weights_sum_to_one_and_labelled_clients_to_their_share(
    sizes: list[int], share: float, data: Any
) -> None:
    own = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    if not sum(sizes):
        return
    weights = group_weights(sizes, own, share)
    assert sum(weights) == pytest.approx(1)
    assert all(weight >= 0 for weight in weights)
    mine = sum(size for size, each in zip(sizes, own, strict=True) if each)
    if 0 < mine < sum(sizes):
        assert sum(weight for weight, each in zip(weights, own, strict=True) if each) == pytest.approx(share)


@EXAMPLES
@given(counts=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=5))
def test_shares_of_heads_sum_to_one_for_every_label(counts: list[list[int]]) -> None:
    table = torch.tensor(counts)
    weights = [float(row.sum()) + 1 for row in table]
    for shares in (head_shares(weights, None, 3), head_shares(weights, table, 3)):
        assert torch.allclose(shares.sum(dim=0), torch.ones(3), atol=1e-6)
        assert bool((shares >= 0).all())
    prior = label_prior(table.sum(dim=0), 3)
    assert float(prior.sum()) == pytest.approx(1, abs=1e-6)


@EXAMPLES
@given(rows=st.lists(st.lists(st.floats(0.0625, 10, width=32), min_size=3, max_size=3), min_size=2, max_size=6))
def test_what_others_answered_is_their_mean_and_a_distribution(rows: list[list[float]]) -> None:
    sent = torch.tensor(rows)
    sent = sent / sent.sum(dim=1, keepdim=True)
    means, holders = average_outputs(sent, torch.zeros(len(rows)).long(), 3)
    own = torch.zeros(3, 3)
    own[0] = sent[0]
    others, known = leave_own_out(means, holders, own, torch.tensor([True, False, False]))
    assert torch.allclose(others[0], sent[1:].mean(dim=0), atol=1e-5)
    assert known.tolist() == [True, False, False]
    assert torch.allclose(make_targets(others, "probabilities")[0].sum(), torch.tensor(1.0), atol=1e-5)


@EXAMPLES
@given(
    tests=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30)), min_size=1, max_size=8),
    by_samples=st.booleans(),
    seed=st.integers(0, 9),
)
def test_the_mean_accuracy_leaves_out_clients_without_tests_and_never_invents_a_zero(
    tests: list[tuple[float, int]], by_samples: bool, seed: int
) -> None:
    reports = [
        EvaluationReport(number, 1, n, {"loss": 1.0, "accuracy-head": accuracy} if n else {})
        for number, (accuracy, n) in enumerate(tests)
    ]
    random.Random(seed).shuffle(reports)
    fields = summarise(reports, "head", by_samples)
    counted = [(accuracy, n if by_samples else 1) for accuracy, n in tests if n]
    assert fields["clients_without_test"] == sum(not n for _, n in tests)
    if not counted:
        assert fields["accuracy"] is None
    else:
        mean = sum(accuracy * n for accuracy, n in counted) / sum(n for _, n in counted)
        assert fields["accuracy"] == pytest.approx(mean)
    assert metric_means([report.metrics for report in reports], "t_").get("t_loss", 1.0) == 1.0
