"""Optimisers of trainable prototypes: a network that makes ``(C, K)`` vectors, moved down a loss by its gradient.

The caller knows the gradient of the loss with respect to the vectors; a descent carries it back to the parameters.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

Gradient = Callable[[Tensor], Tensor]
"""The gradient of a loss at ``(C, K)`` global prototypes, of the same shape."""
Descent = Callable[[Gradient, float], object]
"""Takes one step down a loss, given its gradient and the learning rate."""


@contextmanager
def _adamw(network: nn.Module, latents_CK: nn.Parameter, weight_decay: float) -> Iterator[Descent]:
    """Give AdamW, with torch's own betas; without decay it is Adam."""
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=weight_decay, fused=True)

    def descend(gradient: Gradient, lr: float) -> None:
        protos_CK = network()
        optimizer.zero_grad(set_to_none=True)
        protos_CK.backward(gradient(protos_CK.detach()))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()

    yield descend


@contextmanager
def _plain_descent(network: nn.Module, latents_CK: nn.Parameter, weight_decay: float) -> Iterator[Descent]:
    """Give plain gradient descent, written out: a fraction of the time of autograd and ``torch.optim.SGD``.

    The gradient of a weight matrix, a product of two ``(C, K)`` matrices, goes straight into the matrix, and each
    matrix is used and changed in one go, while it is in the processor's cache.
    """
    assert not weight_decay
    inputs_CK = latents_CK.detach()
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    if not linear:
        yield lambda gradient, lr: inputs_CK.sub_(gradient(inputs_CK), alpha=lr)
        return
    first, second = layers = [(_apart(layer.weight.detach()), layer.bias.detach()) for layer in linear]

    def descend(gradient: Gradient, lr: float) -> None:
        hidden_CK = torch.addmm(first[1], inputs_CK, first[0].T).relu_()
        slope_CK = gradient(torch.addmm(second[1], hidden_CK, second[0].T))
        slope_CK = through(second, hidden_CK, slope_CK, lr).mul_(hidden_CK.sign())  # the sign is the slope of ReLU
        inputs_CK.sub_(through(first, inputs_CK, slope_CK, lr), alpha=lr)

    def through(layer: tuple[Tensor, Tensor], given_CK: Tensor, slope_CK: Tensor, lr: float) -> Tensor:
        """Step ``layer`` against the gradient of its output; return the gradient of its input before the step."""
        weight, bias = layer
        slope_of_given_CK = slope_CK @ weight
        weight.addmm_(slope_CK.T, given_CK, alpha=-lr)
        bias.sub_(slope_CK.sum(dim=0), alpha=lr)
        return slope_of_given_CK

    yield descend
    for module, (weight, _) in zip(linear, layers, strict=True):
        module.weight.detach().copy_(weight)


def _apart(weight: Tensor) -> Tensor:
    """Return a copy with gaps between its rows: rows a power of two apart get in each other's way in the cache."""
    return functional.pad(weight, (0, 16))[:, : weight.shape[1]]


DESCENTS = {"adamw": _adamw, "sgd": _plain_descent}
