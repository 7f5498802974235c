import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from client_app.loop import fit_epochs
from client_app.trainers.supervised import SupervisedTrainer
from task.methods.fedprox import proximal_term, trainable_vector
from task.models.split import weights_of
from tests.client_app.test_training import session

torch.set_num_threads(1)


def two_weights() -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    return model


def test_value_and_gradient_of_two_weights() -> None:
    model = two_weights()
    term = proximal_term(model, torch.zeros(2), 0.1)
    assert term.item() == pytest.approx(0.25)
    term.backward()  # type: ignore[no-untyped-call]
    assert model.weight.grad is not None
    assert model.weight.grad.flatten().tolist() == pytest.approx([0.1, 0.2])


def test_buffers_and_frozen_parameters_do_not_enter() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    anchor = trainable_vector(model).detach()
    assert len(anchor) == 6 + 3 + 3
    with torch.no_grad():
        model[0].bias += 5
        model[1].running_mean += 5
        model[1].num_batches_tracked += 5
    assert proximal_term(model, anchor, 1.0).item() == 0


def test_at_the_anchor_term_and_gradient_are_zero_and_the_anchor_stays() -> None:
    model = two_weights()
    anchor = trainable_vector(model).detach()
    term = proximal_term(model, anchor, 3.0)
    term.backward()  # type: ignore[no-untyped-call]
    assert term.item() == 0
    assert not model.weight.grad.any()  # type: ignore[union-attr]
    with torch.no_grad():
        model.weight += 1
    assert anchor.tolist() == [1, 2]
    assert proximal_term(model, anchor, 3.0).item() == pytest.approx(3.0)


def test_it_is_the_sum_over_parameters_in_any_memory_layout() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    first = [parameter.detach().clone() for parameter in model.parameters()]
    anchor = trainable_vector(model).detach()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    expected = 0.0
    for parameter, start in zip(model.parameters(), first, strict=True):
        expected += sum(
            (a - b) ** 2 for a, b in zip(parameter.flatten().tolist(), start.flatten().tolist(), strict=True)
        )
    term = proximal_term(model, anchor, 0.3)
    assert term.item() == pytest.approx(0.15 * expected, rel=1e-5)
    for parameter, start, gradient in zip(
        model.parameters(), first, torch.autograd.grad(term, list(model.parameters())), strict=True
    ):
        assert torch.allclose(gradient, 0.3 * (parameter - start), atol=1e-6)


def trained(strength: float) -> tuple[dict[str, Tensor], float]:
    """Return a client's weights after training with the term, and how far they moved."""
    of = session("algorithm=local train.local_epochs=3 train.lr=0.05")
    anchor = trainable_vector(of.model).detach()

    def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = functional.cross_entropy(of.model(images), labels)
        return {"loss": loss, "proximal_loss": proximal_term(of.model, anchor, strength)}

    fit_epochs(of, step)
    return weights_of(of.model), (trainable_vector(of.model) - anchor).norm().item()


def test_in_the_training_loop_it_holds_the_model_back_and_at_strength_zero_does_nothing() -> None:
    plain = session("algorithm=local train.local_epochs=3 train.lr=0.05")
    SupervisedTrainer().fit(plain)
    free, far = trained(0.0)
    assert all(torch.equal(free[name], tensor) for name, tensor in weights_of(plain.model).items())
    assert trained(10.0)[1] < 0.5 * trained(0.1)[1] < 0.5 * far
