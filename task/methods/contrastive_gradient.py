"""The gradient of FedTGP's contrastive loss, written out: the server spends its time here.

Autograd would go through N C vector differences, and pay more for its bookkeeping than for the arithmetic of a
mini-batch of ten. Written out, the gradient is three small matrix products.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional

# Squared distances below this are rounding noise of the float32 vectors.
SMALLEST_SQUARE = 1e-14


@dataclass(frozen=True)
class Targets:
    """Received prototypes in float64: vectors ``(N, K)``, their squares ``(N, 1)``, one-hot classes ``(N, C)``.

    In float64, because ``|a|² - 2ab + |b|²`` is one matrix product, many times faster than differences, and what
    it loses near distance zero is then no more than the rounding of the float32 vectors themselves.
    """

    vectors_NK: Tensor
    squares_N1: Tensor
    classes_NC: Tensor

    @classmethod
    def of(cls, received_NK: Tensor, classes_N: Tensor, num_classes: int) -> "Targets":
        """Return the targets of ``(N, K)`` received prototypes of ``(N,)`` classes."""
        vectors_NK = received_NK.double()
        squares_N1 = vectors_NK.square().sum(dim=1, keepdim=True)
        return cls(vectors_NK, squares_N1, functional.one_hot(classes_N, num_classes).double())

    def batches(self, size: int, generator: Generator) -> Iterator["Targets"]:
        """Yield all rows once in a new random order, ``size`` at a time; a single batch keeps its order."""
        total = len(self.vectors_NK)
        if size >= total:
            yield self
            return
        order = torch.randperm(total, generator=generator).to(self.vectors_NK.device)
        tensors = self.vectors_NK, self.squares_N1, self.classes_NC
        parts = (torch.split(tensor[order], size) for tensor in tensors)
        yield from map(Targets, *parts)


def contrastive_gradient(targets: Targets, protos_CK: Tensor, margin: float) -> Tensor:
    """Return the gradient of ``contrastive_loss`` with respect to the ``(C, K)`` global prototypes.

    With s the softmax of ``-(d + margin [j = c])`` and t the one-hot class, ``dL/dd_nj = (t_nj - s_nj) / N`` and
    ``dd_nj/dP^j = (P^j - P_n) / d_nj``. Hence, with ``w_nj = (t_nj - s_nj) / (N d_nj)``, the gradient of ``P^j``
    is ``P^j sum_n w_nj - sum_n w_nj P_n``.

    Parameters
    ----------
    targets : Targets
        The N received prototypes.
    protos_CK : Tensor
        ``(C, K)`` global prototypes.
    margin : float
        delta(t).

    Returns
    -------
    Tensor
        ``(C, K)``, of the type of ``protos_CK``; finite everywhere.

    References
    ----------
    L_P^c of the paper, section "Adaptive-Margin-Enhanced Contrastive Learning".
    """
    protos = protos_CK.double()
    products_NC = torch.addmm(targets.squares_N1, targets.vectors_NK, protos.T, alpha=-2)
    distances_NC = products_NC.add_(protos.square().sum(dim=1)).clamp_(min=SMALLEST_SQUARE).sqrt_()
    shares_NC = torch.add(distances_NC, targets.classes_NC, alpha=margin).neg_().softmax(dim=1)
    weights_NC = targets.classes_NC.sub(shares_NC).div_(distances_NC.mul_(len(distances_NC)))
    own_CK = protos * weights_NC.sum(dim=0).unsqueeze(1)
    return torch.addmm(own_CK, weights_NC.T, targets.vectors_NK, alpha=-1).to(protos_CK.dtype)
