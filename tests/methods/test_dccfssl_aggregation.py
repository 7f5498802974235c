"""Authentication-reweighted aggregation of prototypes (APA) and of models (AMA)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from task.averaging import weighted_mean
from task.methods.dccfssl_aggregation import (
    aggregate_models,
    aggregate_prototypes,
    expansion_factor,
    fresh,
    model_weights,
)

torch.set_num_threads(1)
NAN = float("nan")
LABELLED = torch.tensor([True, False, False])
# client 0 has labels; a class that a client does not have holds NaN, which must never be read
PROTOS = torch.tensor(
    [
        [[1.0, 0.0], [NAN, NAN], [0.0, 1.0]],
        [[0.0, 1.0], [1.0, 1.0], [NAN, NAN]],
        [[1.0, 1.0], [-1.0, 1.0], [1.0, 0.0]],
    ]
)
COUNTS = torch.tensor([[10, 0, 4], [5, 3, 0], [5, 1, 2]])
NOTHING = torch.zeros(3, 2), torch.zeros(3, dtype=torch.bool)


def test_prototypes_of_three_clients() -> None:
    found, known = aggregate_prototypes(PROTOS, COUNTS, LABELLED, expansion_factor(1, 2), *NOTHING)
    assert torch.allclose(found, torch.tensor([[0.833333, 0.333333], [0.5, 1.0], [0.2, 0.8]]), atol=1e-6)
    assert known.tolist() == [True] * 3
    assert found.dtype == torch.float32


def test_prototypes_without_expansion() -> None:
    found, _ = aggregate_prototypes(PROTOS, COUNTS, LABELLED, 1.0, *NOTHING)
    assert torch.allclose(found, torch.tensor([[0.75, 0.5], [0.5, 1.0], [0.333333, 0.666667]]), atol=1e-6)


def test_clients_that_were_not_sampled_keep_what_they_sent_last() -> None:
    before = aggregate_prototypes(PROTOS, COUNTS, LABELLED, 2.0, *NOTHING)
    protos, counts = PROTOS.clone(), COUNTS.clone()
    protos[1], counts[1] = torch.tensor([[0.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), torch.tensor([0, 7, 0])
    found, _ = aggregate_prototypes(protos, counts, LABELLED, 2.0, *before)
    assert torch.allclose(found, torch.tensor([[1.0, 0.2], [-0.125, 1.875], [0.2, 0.8]]), atol=1e-6)


def test_with_labelled_clients_alone_nothing_is_divided_by_zero() -> None:
    protos, counts = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([[3], [1]])
    both = torch.tensor([True, True])
    found, known = aggregate_prototypes(protos, counts, both, expansion_factor(2, 0), *(t[:1] for t in NOTHING))
    assert found.tolist() == [[0.75, 0.25]]
    assert known.tolist() == [True]


def test_a_class_without_support_keeps_what_it_had() -> None:
    previous, known = torch.tensor([[7.0, 8.0], [0.0, 0.0], [1.0, 2.0]]), torch.tensor([True, False, True])
    none = torch.zeros(3, 3, dtype=torch.int64)
    found, still = aggregate_prototypes(PROTOS, none, LABELLED, 2.0, previous, known)
    assert torch.equal(found, previous)
    assert torch.equal(still, known)
    only_last = none.clone()
    only_last[2, 2] = 1
    found, still = aggregate_prototypes(PROTOS, only_last, LABELLED, 2.0, previous, known)
    assert found.tolist() == [[7, 8], [0, 0], [1, 0]]
    assert torch.equal(still, known)


def test_expansion_gives_labelled_clients_half_of_the_weight() -> None:
    assert expansion_factor(5, 45) == 9
    assert expansion_factor(40, 10) == 0.25  # taken literally: more labelled clients than others shrink their counts
    protos, counts = torch.tensor([[[1.0]], [[0.0]]]), torch.tensor([[10], [90]])
    found, _ = aggregate_prototypes(protos, counts, LABELLED[:2], 9.0, torch.zeros(1, 1), torch.tensor([False]))
    assert found.item() == pytest.approx(0.5)


def test_a_federation_without_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 labelled client is needed"):
        expansion_factor(0, 5)


@st.composite
def clients(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, float]:
    number, classes, width = draw(st.integers(1, 5)), draw(st.integers(1, 3)), 2
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    protos = torch.randn(number, classes, width, generator=generator)
    counts = torch.randint(0, 4, (number, classes), generator=generator) * 3
    labelled = torch.rand(number, generator=generator) < 0.5
    return protos, counts, labelled, draw(st.sampled_from([0.25, 1.0, 9.0]))


def slow_prototypes(protos: Tensor, counts: Tensor, labelled: Tensor, expansion: float) -> list[list[float] | None]:
    found: list[list[float] | None] = []
    for c in range(protos.shape[1]):
        top, bottom = [0.0] * protos.shape[2], 0.0
        for vector, count, own in zip(protos[:, c].tolist(), counts[:, c].tolist(), labelled.tolist(), strict=True):
            weight = (expansion if own else 1) * count
            top, bottom = [t + weight * x for t, x in zip(top, vector, strict=True)], bottom + weight
        found.append([t / bottom for t in top] if bottom else None)
    return found


@given(clients())
@settings(max_examples=60, deadline=None)
def test_properties_of_the_prototypes(of: tuple[Tensor, Tensor, Tensor, float]) -> None:
    protos, counts, labelled, expansion = of
    nothing = torch.zeros(protos.shape[1:]), torch.zeros(protos.shape[1], dtype=torch.bool)
    found, known = aggregate_prototypes(protos, counts, labelled, expansion, *nothing)
    for c, expected in enumerate(slow_prototypes(protos, counts, labelled, expansion)):
        assert bool(known[c]) == (expected is not None)
        if expected is not None:
            held = protos[counts[:, c] > 0, c]
            assert found[c].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
            assert (held.amin(dim=0) <= found[c]).all()
            assert (found[c] <= held.amax(dim=0)).all()
    order = torch.randperm(len(protos), generator=torch.Generator().manual_seed(0))
    shuffled, _ = aggregate_prototypes(protos[order], counts[order], labelled[order], expansion, *nothing)
    assert torch.allclose(shuffled, found, atol=1e-6)
    scaled, _ = aggregate_prototypes(protos, 7 * counts, labelled, expansion, *nothing)
    assert torch.allclose(scaled, found, atol=1e-6)
    assert not any(tensor.any() for tensor in nothing)


def test_the_age_of_what_counts() -> None:
    uploaded = torch.tensor([0, 3, 9, 10])
    assert fresh(uploaded, 10, None).tolist() == [False, True, True, True]
    assert fresh(uploaded, 10, 7).tolist() == [False, True, True, True]
    assert fresh(uploaded, 10, 6).tolist() == [False, False, True, True]
    assert fresh(uploaded, 10, 0).tolist() == [False, False, False, True]


def scalars(*values: float) -> list[dict[str, Tensor]]:
    return [{"w": torch.tensor(float(value)), "n": torch.tensor(10 * i)} for i, value in enumerate(values)]


PREVIOUS = {"w": torch.tensor(0.1), "n": torch.tensor(77)}
ONE_LABELLED = [True, False, False]


def normalised(weights: list[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def test_models_weigh_by_authentication_samples() -> None:
    weights = model_weights([60, 30, 10], [100, 100, 100], ONE_LABELLED)
    assert normalised(weights) == pytest.approx([0.6, 0.3, 0.1])
    assert aggregate_models(scalars(1, 2, 4), weights, PREVIOUS)["w"].item() == pytest.approx(1.6)


def test_models_weigh_by_expanded_counts() -> None:
    weights = model_weights([60, 30, 10], [100, 100, 100], ONE_LABELLED, expansion=9.0)
    assert normalised(weights) == pytest.approx([0.931034, 0.051724, 0.017241], abs=5e-7)
    assert aggregate_models(scalars(1, 2, 4), weights, PREVIOUS)["w"].item() == pytest.approx(1.103448, abs=1e-6)


@pytest.mark.parametrize("ignored", [1.0, float("inf"), NAN])
def test_a_model_without_authentication_samples_is_ignored_whatever_it_holds(ignored: float) -> None:
    weights = model_weights([0, 30, 10], [100, 100, 100], ONE_LABELLED)
    assert normalised(weights) == pytest.approx([0, 0.75, 0.25])
    assert aggregate_models(scalars(ignored, 2, 4), weights, PREVIOUS)["w"].item() == pytest.approx(2.5)


def test_without_any_authentication_sample_labelled_clients_are_averaged_by_size() -> None:
    weights = model_weights([0, 0, 0], [100, 300, 50], [True, True, False])
    assert weights == [100, 300, 0]
    assert aggregate_models(scalars(1, 2, 9), weights, PREVIOUS)["w"].item() == pytest.approx(1.75)


def test_without_those_either_the_global_model_stays_bit_for_bit() -> None:
    for examples, labelled in (([100, 300], [False, False]), ([0, 300], [True, False])):
        weights = model_weights([0, 0], examples, labelled)
        assert weights == [0, 0]
        found = aggregate_models(scalars(1, 2), weights, PREVIOUS)
        assert all(torch.equal(found[name], tensor) for name, tensor in PREVIOUS.items())


def test_the_ablation_weighs_by_samples() -> None:
    weights = model_weights([60, 30, 0], [100, 200, 700], ONE_LABELLED, authenticate=False, expansion=9.0)
    assert normalised(weights) == pytest.approx([0.1, 0.2, 0.7])


def test_batchnorm_is_averaged_and_its_counter_comes_from_the_heaviest() -> None:
    nets = [nn.BatchNorm1d(2) for _ in range(3)]
    for index, net in enumerate(nets):
        for _ in range(9 - 4 * index):
            net(torch.full((4, 2), float(index)) + torch.arange(4.0).unsqueeze(1))
    states = [net.state_dict() for net in nets]
    found = aggregate_models(states, [1, 3, 2], nets[0].state_dict())
    assert found["num_batches_tracked"].dtype == torch.int64
    assert int(found["num_batches_tracked"]) == 5
    assert int(weighted_mean(states, [1, 3, 2])["num_batches_tracked"]) == 9
    means = [state["running_mean"] for state in states]
    assert torch.allclose(found["running_mean"], (means[0] + 3 * means[1] + 2 * means[2]) / 6)


def test_where_all_data_are_classified_correctly_the_mean_is_that_of_fedavg() -> None:
    sizes = [120, 30, 77]
    weights = model_weights(sizes, sizes, [True] * 3)
    found = aggregate_models(scalars(1, 2, 4), weights, PREVIOUS)
    assert torch.equal(found["w"], weighted_mean(scalars(1, 2, 4), [float(n) for n in sizes])["w"])
