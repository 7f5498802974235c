import pytest
import torch
from torch.autograd import gradcheck

from task.prototypes import class_means, nearest_prototype, pairwise_distance, smallest_gap
from tests import oracles


def test_distances_are_those_of_a_loop() -> None:
    a, b = torch.randn(5, 7), torch.randn(3, 7)
    expected = [[oracles.distance(x, y) for y in b.tolist()] for x in a.tolist()]
    assert torch.allclose(pairwise_distance(a, b), torch.tensor(expected), atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e-7, 1e-3])
def test_zero_and_tiny_distances_have_finite_gradients(offset: float) -> None:
    # The expanded form gives NaN here: width 512, norm about 23.
    point = torch.randn(1, 512, requires_grad=True)
    other = (point.detach() + offset).requires_grad_()
    pairwise_distance(point, other).sum().backward()
    assert point.grad is not None
    assert other.grad is not None
    assert torch.isfinite(point.grad).all()
    assert torch.isfinite(other.grad).all()


def test_distance_gradient_is_right() -> None:
    a = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(pairwise_distance, (a, b))


def test_class_means_and_absent_classes() -> None:
    feats = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 0.0]])
    means, present = class_means(feats, torch.tensor([2, 2, 0]), 4)
    assert means.tolist() == [[10.0, 0.0], [0.0, 0.0], [2.0, 3.0], [0.0, 0.0]]
    assert present.tolist() == [True, False, True, False]


def test_nearest_prototype_is_the_smallest_distance() -> None:
    feats, protos = torch.randn(50, 8), torch.randn(6, 8)
    assert torch.equal(nearest_prototype(feats, protos), pairwise_distance(feats, protos).argmin(dim=1))


def test_classes_without_prototype_are_never_predicted() -> None:
    feats, protos = torch.zeros(3, 2), torch.tensor([[0.0, 0.0], [5.0, 5.0], [9.0, 9.0]])
    known = torch.tensor([False, True, True])
    assert nearest_prototype(feats, protos, known).tolist() == [1, 1, 1]


def test_smallest_gap() -> None:
    assert smallest_gap(torch.tensor([[0.0], [1.0], [10.0]])) == 1.0
    assert smallest_gap(torch.tensor([[0.0]])) == 0.0
