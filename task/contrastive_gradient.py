"""The gradient of FedTGP's contrastive loss, written out: the server spends its time here.

Autograd would go through N C differences of vectors several times, and pay more for its bookkeeping than for the
arithmetic of a mini-batch of ten.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor
from torch.nn import functional

# Numbers in N C K differences that still fit a processor's cache: up to there they are made, beyond they are avoided.
MOST_DIFFERENCES = 2**17
# Squared distances below this are rounding noise of the float32 vectors.
SMALLEST_SQUARE = 1e-14


@dataclass(frozen=True)
class Targets:
    """Received prototypes as the training uses them.

    Attributes
    ----------
    vectors_NK : Tensor
        ``(N, K)``.
    classes_NC : Tensor
        ``(N, C)`` one-hot classes.
    margins_NC : Tensor
        ``(N, C)``: minus delta(t) at the class, 0 elsewhere.
    """

    vectors_NK: Tensor
    classes_NC: Tensor
    margins_NC: Tensor

    @classmethod
    def of(cls, received_NK: Tensor, classes_N: Tensor, num_classes: int, margin: float) -> "Targets":
        """Return the targets of ``(N, K)`` received prototypes of ``(N,)`` classes, delta(t) being ``margin``."""
        classes_NC = functional.one_hot(classes_N, num_classes).to(received_NK.dtype)
        return cls(received_NK, classes_NC, -margin * classes_NC)

    @cached_property
    def exact(self) -> tuple[Tensor, Tensor]:
        """``(N, K)`` vectors and their ``(N, 1)`` squares in float64, made once where one batch serves every step."""
        vectors_NK = self.vectors_NK.double()
        return vectors_NK, vectors_NK.square().sum(dim=1, keepdim=True)

    def batches(self, size: int, generator: Generator) -> Iterator["Targets"]:
        """Yield all rows once in a new random order, ``size`` at a time; a single batch keeps its order."""
        total = len(self.vectors_NK)
        if size >= total:
            yield self
            return
        order = torch.randperm(total, generator=generator).to(self.vectors_NK.device)
        tensors = self.vectors_NK, self.classes_NC, self.margins_NC
        yield from map(Targets, *(torch.split(tensor[order], size) for tensor in tensors))


def contrastive_gradient(targets: Targets, protos_CK: Tensor) -> Tensor:
    """Return the gradient of ``contrastive_loss`` with respect to the ``(C, K)`` global prototypes.

    With s the softmax of ``-(d + delta [j = c])`` and t the one-hot class, ``dL/dd_nj = (t_nj - s_nj) / N`` and
    ``dd_nj/dP^j = (P^j - P_n) / d_nj``. So with ``w_nj = (t_nj - s_nj) / (N d_nj)`` the gradient of ``P^j`` is
    ``sum_n w_nj (P^j - P_n)``.

    Parameters
    ----------
    targets : Targets
        The N received prototypes.
    protos_CK : Tensor
        ``(C, K)`` global prototypes.

    Returns
    -------
    Tensor
        ``(C, K)``; finite everywhere, also where a distance is 0.

    References
    ----------
    L_P^c of the paper, section "Adaptive-Margin-Enhanced Contrastive Learning".
    """
    if len(targets.vectors_NK) * protos_CK.numel() <= MOST_DIFFERENCES:
        return _by_differences(targets, protos_CK)
    return _by_products(targets, protos_CK)


def _by_differences(targets: Targets, protos_CK: Tensor) -> Tensor:
    differences_NCK = protos_CK - targets.vectors_NK.unsqueeze(1)
    weights_NC = _weights(targets, torch.linalg.vector_norm(differences_NCK, dim=2))
    return differences_NCK.mul_(weights_NC.unsqueeze(2)).sum(dim=0)


def _by_products(targets: Targets, protos_CK: Tensor) -> Tensor:
    """Expand ``|a - b|²`` and the last sum: two matrix products, many times faster than N C K differences.

    In float64, because what the expansion loses near distance zero is then no more than the rounding of the float32
    vectors themselves.
    """
    (vectors, squares_N1), protos = targets.exact, protos_CK.double()
    squares_NC = torch.addmm(squares_N1, vectors, protos.T, alpha=-2).add_(protos.square().sum(dim=1))
    weights_NC = _weights(targets, squares_NC.clamp_(min=SMALLEST_SQUARE).sqrt_())
    own_CK = protos * weights_NC.sum(dim=0).unsqueeze(1)
    return torch.addmm(own_CK, weights_NC.T, vectors, alpha=-1).to(protos_CK.dtype)


def _weights(targets: Targets, distances_NC: Tensor) -> Tensor:
    """Return ``w_nj``; the ``distances_NC`` are used up."""
    shares_NC = torch.sub(targets.margins_NC, distances_NC).softmax(dim=1)
    divisors_NC = distances_NC.clamp_(min=SMALLEST_SQUARE**0.5).mul_(len(distances_NC))
    return torch.sub(targets.classes_NC, shares_NC).div_(divisors_NC)
