import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from task.averaging import weighted_mean
from task.methods.fedconsist import group_weights


def test_weights_of_two_labelled_and_two_other_clients() -> None:
    found = group_weights([100, 200, 50, 650], [True, True, False, False], 0.5)
    assert found == pytest.approx([0.166667, 0.333333, 0.035714, 0.464286], abs=5e-7)


def test_the_share_of_the_labelled_group_is_what_is_asked_for() -> None:
    assert group_weights([1, 9, 30], [False, True, False], 0.25) == pytest.approx([0.75 / 31, 0.25, 0.75 * 30 / 31])
    assert group_weights([1, 9, 30], [False, True, False], 1.0) == [0, 1, 0]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("labelled", [True, False])
def test_where_a_group_is_absent_the_other_takes_all(share: float, labelled: bool) -> None:
    assert group_weights([10, 30], [labelled, labelled], share) == pytest.approx([0.25, 0.75])
    # a group whose clients have no sample has nothing to give either
    assert group_weights([10, 30, 0], [labelled, labelled, not labelled], share) == pytest.approx([0.25, 0.75, 0])


def test_without_a_sample_there_are_no_weights() -> None:
    with pytest.raises(ValueError, match="at least one client needs a sample"):
        group_weights([0, 0], [True, False], 0.5)


@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), min_size=1, max_size=8), st.floats(0, 1))
def test_they_sum_to_one_and_are_proportional_to_samples_within_a_group(
    clients: list[tuple[int, bool]], share: float
) -> None:
    examples, labelled = [n for n, _ in clients], [own for _, own in clients]
    found = group_weights(examples, labelled, share)
    assert sum(found) == pytest.approx(1)
    for kind in (True, False):
        rates = [weight / n for weight, n, own in zip(found, examples, labelled, strict=True) if own == kind]
        assert rates == pytest.approx([rates[0]] * len(rates)) if rates else True


def test_they_weigh_a_mean_of_models() -> None:
    states = [{"w": torch.tensor(value)} for value in (1.0, 3.0, 100.0)]
    assert weighted_mean(states, group_weights([10, 10, 5], [True, False, False], 0.5))["w"].item() == pytest.approx(
        0.5 + 1 + 50 / 3
    )
