import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from task.averaging import require_alike, weighted_mean


def state(value: float, count: int = 1) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 2), value), "num_batches_tracked": torch.tensor(count)}


def test_floats_are_averaged_and_counters_kept() -> None:
    mean = weighted_mean([state(1.0, 3), state(5.0, 9)], [1, 3])
    assert mean["weight"].tolist() == [[4.0, 4.0], [4.0, 4.0]]
    assert mean["num_batches_tracked"].dtype == torch.int64
    assert int(mean["num_batches_tracked"]) == 9


def test_counters_can_come_from_the_heaviest_state() -> None:
    states = [state(1.0, 9), state(5.0, 4), state(9.0, 7)]
    mean = weighted_mean(states, [1, 3, 2], counters="heaviest")["num_batches_tracked"]
    assert mean.dtype == torch.int64
    assert int(mean) == 4
    assert int(weighted_mean(states, [3, 0, 3], counters="heaviest")["num_batches_tracked"]) == 9


@pytest.mark.parametrize("held", [float("inf"), float("nan")])
def test_a_state_of_weight_zero_is_left_out_whatever_it_holds(held: float) -> None:
    mean = weighted_mean([state(held, 99), state(2.0, 3), state(4.0, 5)], [0, 3, 1])
    assert mean["weight"].tolist() == [[2.5, 2.5], [2.5, 2.5]]
    assert int(mean["num_batches_tracked"]) == 5


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(0.01, 100)), min_size=1, max_size=6), st.randoms())
@settings(max_examples=40, deadline=None)
def test_order_and_scale_of_the_weights_do_not_matter(pairs, rng) -> None:  # type: ignore[no-untyped-def]
    one = weighted_mean([state(value) for value, _ in pairs], [weight for _, weight in pairs])
    rng.shuffle(pairs)
    two = weighted_mean([state(value) for value, _ in pairs], [7 * weight for _, weight in pairs])
    assert torch.allclose(one["weight"], two["weight"], atol=1e-4)


def test_one_client_is_returned_as_it_is() -> None:
    assert torch.equal(weighted_mean([state(0.3)], [17])["weight"], state(0.3)["weight"])


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1]])
def test_weights_that_cannot_be_normalised_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot be normalised"):
        weighted_mean([state(1.0), state(2.0)], weights)


def test_other_names_shapes_or_types_are_refused_by_name() -> None:
    require_alike("client 3", state(1.0), state(2.0))
    with pytest.raises(ValueError, match="client 3 sent no weights"):
        require_alike("client 3", None, state(1.0))
    with pytest.raises(ValueError, match=r"client 3 .*: extra"):
        require_alike("client 3", state(1.0) | {"extra": torch.zeros(1)}, state(1.0))
    with pytest.raises(ValueError, match=r"weights\.weight as \(3,\)"):
        require_alike("client 3", state(1.0) | {"weight": torch.zeros(3)}, state(1.0))
