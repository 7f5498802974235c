"""FedProx: local training that stays near the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020,
arXiv:1812.06127.

====================  ==========================================================================
here                  paper
====================  ==========================================================================
``anchor_P``          w^t, the global model at the begin of the round, as one vector
``strength``          mu
====================  ==========================================================================

P is the number of trainable scalars. Only these enter: buffers such as BatchNorm's running statistics have no
gradient. With ``strength`` 0 the method is FedAvg.

Departures from the paper: every client trains the same number of epochs; there is no gamma-inexactness.
"""

import torch
from torch import Tensor, nn


def trainable_vector(model: nn.Module) -> Tensor:
    """Return copies of all trainable parameters of a model as one ``(P,)`` vector, with gradient.

    Detached before training, it is the anchor of ``proximal_term``.
    """
    return torch.cat([parameter.flatten() for parameter in model.parameters() if parameter.requires_grad])


def proximal_term(model: nn.Module, anchor_P: Tensor, strength: float) -> Tensor:
    """Return ``strength / 2 * |theta - anchor|²``, a scalar whose gradient is ``strength * (theta - anchor)``.

    Parameters
    ----------
    model : nn.Module
        The model that is trained.
    anchor_P : Tensor
        ``trainable_vector(model).detach()`` at the begin of the round.
    strength : float
        mu, at least 0.

    References
    ----------
    FedProx, eq. (2).
    """
    return 0.5 * strength * (trainable_vector(model) - anchor_P).square().sum()
