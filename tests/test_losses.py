import pytest
import torch

from task.losses import class_mean_distance, prototype_cross_entropy, sample_squared_error
from tests import oracles

LABELS = [0, 2, 2, 1, 0]
KNOWN = {0: [1.0, -1.0, 0.5], 2: [0.0, 3.0, 1.0]}


def dense() -> tuple[torch.Tensor, torch.Tensor]:
    protos, known = torch.zeros(4, 3), torch.zeros(4, dtype=torch.bool)
    for class_id, vector in KNOWN.items():
        protos[class_id], known[class_id] = torch.tensor(vector), True
    return protos, known


def test_class_mean_distance_is_the_papers() -> None:
    feats = torch.randn(5, 3)
    found = class_mean_distance(feats, torch.tensor(LABELS), *dense())
    assert found.item() == pytest.approx(oracles.class_mean_distance(feats.tolist(), LABELS, KNOWN), abs=1e-6)


def test_sample_squared_error_is_the_public_codes() -> None:
    feats = torch.randn(5, 3)
    found = sample_squared_error(feats, torch.tensor(LABELS), *dense())
    assert found.item() == pytest.approx(oracles.sample_squared_error(feats.tolist(), LABELS, KNOWN), abs=1e-6)


@pytest.mark.parametrize("loss", [class_mean_distance, sample_squared_error, prototype_cross_entropy])
def test_no_prototype_means_no_pull(loss) -> None:  # type: ignore[no-untyped-def]
    feats = torch.randn(5, 3, requires_grad=True)
    value = loss(feats, torch.tensor(LABELS), torch.randn(4, 3), torch.zeros(4, dtype=torch.bool))
    value.backward()
    assert value.item() == 0
    assert feats.grad is not None
    assert not feats.grad.any()


def test_zero_distance_has_a_finite_gradient() -> None:
    protos, known = dense()
    feats = protos[[0, 2]].clone().requires_grad_()
    class_mean_distance(feats, torch.tensor([0, 2]), protos, known).backward()
    assert feats.grad is not None
    assert torch.isfinite(feats.grad).all()


def test_the_term_does_not_depend_on_how_many_samples_a_class_has() -> None:
    protos, known = dense()
    one = class_mean_distance(torch.ones(2, 3), torch.tensor([0, 2]), protos, known)
    many = class_mean_distance(torch.ones(9, 3), torch.tensor([0] * 8 + [2]), protos, known)
    assert one.item() == pytest.approx(many.item())


def test_prototype_cross_entropy_is_the_server_loss_without_margin() -> None:
    feats, protos = torch.randn(6, 3), torch.randn(4, 3)
    labels = [0, 1, 2, 3, 0, 1]
    found = prototype_cross_entropy(feats, torch.tensor(labels), protos, torch.ones(4, dtype=torch.bool))
    assert found.item() == pytest.approx(
        oracles.contrastive_loss(feats.tolist(), labels, protos.tolist(), 0.0), rel=1e-5
    )


def test_prototype_cross_entropy_leaves_unknown_classes_out() -> None:
    protos, known = dense()
    feats = torch.randn(5, 3, requires_grad=True)
    found = prototype_cross_entropy(feats, torch.tensor(LABELS), protos, known)
    kept = [index for index, label in enumerate(LABELS) if label in KNOWN]
    rows, classes = [feats[index].tolist() for index in kept], [sorted(KNOWN).index(LABELS[index]) for index in kept]
    expected = oracles.contrastive_loss(rows, classes, [KNOWN[label] for label in sorted(KNOWN)], 0.0)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    found.backward()
    assert feats.grad is not None
    assert torch.isfinite(feats.grad).all()
    assert not feats.grad[3].any()
