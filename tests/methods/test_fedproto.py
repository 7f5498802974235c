import pytest
import torch

from task.methods.fedproto import average_prototypes


@pytest.mark.parametrize(
    ("rule", "weights"), [("weighted", (0.25, 0.75)), ("uniform", (0.5, 0.5)), ("literal", (0.125, 0.375))]
)
def test_weights_of_two_clients_with_one_and_three_samples(rule: str, weights: tuple[float, float]) -> None:
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    averages, came = average_prototypes(vectors, torch.tensor([1, 1]), torch.tensor([1, 3]), rule, 3)
    assert averages[1].tolist() == pytest.approx(list(weights))
    assert came.tolist() == [False, True, False]
    assert not averages[0].any()


def test_counts_are_needed_where_the_rule_weights() -> None:
    with pytest.raises(ValueError, match="share_counts"):
        average_prototypes(torch.ones(1, 2), torch.tensor([0]), None, "weighted", 2)


def test_order_and_grouping_do_not_matter() -> None:
    vectors, classes, counts = torch.randn(8, 4), torch.tensor([0, 1, 0, 2, 2, 1, 0, 2]), torch.arange(1, 9)
    order = torch.randperm(8)
    one, _ = average_prototypes(vectors, classes, counts, "weighted", 3)
    two, _ = average_prototypes(vectors[order], classes[order], counts[order], "weighted", 3)
    assert torch.allclose(one, two, atol=1e-6)


def test_one_client_is_returned_as_it_is() -> None:
    vectors = torch.randn(2, 4)
    averages, _ = average_prototypes(vectors, torch.tensor([0, 2]), torch.tensor([5, 1]), "weighted", 3)
    assert torch.allclose(averages[[0, 2]], vectors)
