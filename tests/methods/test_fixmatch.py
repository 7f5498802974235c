import math

import pytest
import torch
from torch import Tensor

from task.methods.fixmatch import Targets, pseudo_labels, true_labels, unlabelled_loss
from tests import oracles

torch.set_num_threads(1)
WEAK = torch.tensor([[4.0, 0, 0], [1, 0, 0]])


def test_confidence_label_and_trust_of_two_images() -> None:
    targets = pseudo_labels(WEAK, 0.95)
    assert targets.confidence_B.tolist() == pytest.approx([0.964663, 0.576117], abs=5e-7)
    assert targets.labels_B.tolist() == [0, 0]
    assert targets.trusted_B.tolist() == [True, False]


def test_the_loss_is_divided_by_all_images_and_not_by_the_trusted_ones() -> None:
    strong = torch.zeros(2, 3)
    assert unlabelled_loss(strong, pseudo_labels(WEAK, 0.95)).item() == pytest.approx(0.549306, abs=5e-7)
    assert unlabelled_loss(strong, pseudo_labels(WEAK, 0.5)).item() == pytest.approx(math.log(3))


def test_without_a_trusted_image_loss_and_gradient_are_zero() -> None:
    strong = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = unlabelled_loss(strong, pseudo_labels(WEAK, 0.97))
    (gradient,) = torch.autograd.grad(loss, strong)
    assert loss.item() == 0
    assert not gradient.any()


def test_the_weak_view_gets_no_gradient() -> None:
    weak, strong = torch.tensor([[4.0, 0, 0]], requires_grad=True), torch.tensor([[2.0, 0, 0]], requires_grad=True)
    targets = pseudo_labels(weak, 0.95)
    loss = unlabelled_loss(strong, targets)
    assert not targets.confidence_B.requires_grad
    assert loss.item() == pytest.approx(0.239545, abs=5e-7)
    loss.backward()  # type: ignore[no-untyped-call]
    assert weak.grad is None
    assert strong.grad is not None
    assert strong.grad.any()


def test_a_confidence_equal_to_the_threshold_is_trusted() -> None:
    # softmax of (0, 0) is exactly one half; the next float above the threshold is not reached
    half = torch.zeros(1, 2)
    assert pseudo_labels(half, 0.5).trusted_B.tolist() == [True]
    assert pseudo_labels(half, 0.5 + 1e-6).trusted_B.tolist() == [False]
    assert pseudo_labels(torch.tensor([[200.0, 0]]), 1.1).trusted_B.tolist() == [False]


def slow_loss(weak: list[list[float]], strong: list[list[float]], threshold: float) -> float:
    total = 0.0
    for weak_row, strong_row in zip(weak, strong, strict=True):
        probabilities = [math.exp(value) for value in oracles.log_softmax(weak_row)]
        if max(probabilities) >= threshold:
            total += -oracles.log_softmax(strong_row)[probabilities.index(max(probabilities))]
    return total / len(weak)


@pytest.mark.parametrize("threshold", [0.0, 0.4, 0.6, 0.9])
def test_loss_and_gradient_are_those_of_a_slow_loop(threshold: float) -> None:
    generator = torch.Generator().manual_seed(3)
    weak, strong = (2 * torch.randn(7, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    targets = pseudo_labels(weak, threshold)
    assert unlabelled_loss(strong, targets).item() == pytest.approx(
        slow_loss(weak.tolist(), strong.tolist(), threshold)
    )

    def loss_of(logits: Tensor) -> Tensor:
        return unlabelled_loss(logits, targets)

    assert torch.autograd.gradcheck(loss_of, strong.requires_grad_())


def test_true_labels_are_certain() -> None:
    labels = torch.tensor([2, 0, 1])
    targets = true_labels(labels)
    assert isinstance(targets, Targets)
    assert targets.labels_B is labels
    assert targets.confidence_B.tolist() == [1, 1, 1]
    assert targets.trusted_B.tolist() == [True, True, True]
    strong = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(unlabelled_loss(strong, targets), torch.nn.functional.cross_entropy(strong, labels))
