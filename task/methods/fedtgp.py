"""FedTGP: trainable global prototypes with adaptive-margin-enhanced contrastive learning.

Zhang, Liu, Hua, Cao: "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for
Data and Model Heterogeneity in Federated Learning", AAAI 2024, arXiv:2401.03230.

====================  ==========================================================================
here                  paper
====================  ==========================================================================
``latents_CK``        the trainable vectors, one a class, from which F makes the global prototypes
``protos_CK``         P^c = F(latent of c), the global prototypes
``received_NK``       P_i^c, one row for each client and class that sent one
``classes_N``         c, the class of each row
``margin``            delta(t)
``margin_cap``        tau
``epochs``            S
====================  ==========================================================================

Departures from the authors' code: prototypes are those of the model after training, not before; the margin is the
largest distance between two centroids (``max_of_min`` gives the code's rule); distances are computed so that a
prototype on top of another gives no NaN; every class keeps its prototype while nobody shows it.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from task.contrastive_gradient import Targets, contrastive_gradient
from task.descents import DESCENTS
from task.prototypes import pairwise_distance


class PrototypeNetwork(nn.Module):
    """The server's trainable global prototypes: C latent vectors of width K, and F, two linear layers with ReLU.

    Parameters
    ----------
    num_classes, width : int
        C and K.
    use_network : bool
        False trains the vectors themselves (the paper's ablation "w/o F").
    generator : Generator
        Source of the initial values.
    init_norm : float or None
        None: latent vectors from N(0, 1) and torch's default weights, as the authors' code has it; the first
        prototypes then lie close together. A number: F starts as the identity and class c owns a block of about
        K / C coordinates, so that the first prototypes are orthogonal, at least 0 like features behind a ReLU, and
        of this norm. Where K is below C, every class has two coordinates and shares at most one of them with any
        other. The paper leaves the start open.

    Raises
    ------
    ValueError
        There are more classes than pairs of coordinates to give them.
    """

    def __init__(
        self,
        num_classes: int,
        width: int,
        use_network: bool,
        generator: Generator,
        init_norm: float | None = None,
    ) -> None:
        super().__init__()
        self.latents_CK = nn.Parameter(torch.randn(num_classes, width, generator=generator))
        self.network: nn.Module = nn.Identity()
        if use_network:
            self.network = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            bound = 1 / math.sqrt(width)  # torch's own default, from our generator
            for parameter in self.network.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
        if init_norm is not None:
            self._start_in_blocks(init_norm)

    @torch.no_grad()
    def _start_in_blocks(self, norm: float) -> None:
        num_classes, width = self.latents_CK.shape
        if num_classes <= width:
            owners_K = torch.arange(width) * num_classes // width
            blocks_CK = functional.one_hot(owners_K, num_classes).T.float()
        elif num_classes <= width * ((width - 1) // 2):
            first_C, turn_C = torch.arange(num_classes) % width, torch.arange(num_classes) // width
            pairs_C2 = torch.stack([first_C, (first_C + 1 + turn_C) % width], dim=1)
            blocks_CK = functional.one_hot(pairs_C2, width).sum(dim=1).float()
        else:
            raise ValueError(f"init_norm={norm}: {num_classes} classes need a larger model.feature_dim than {width}")
        self.latents_CK.copy_(norm * functional.normalize(blocks_CK, dim=1))
        for layer in self.network.modules():
            if isinstance(layer, nn.Linear):
                nn.init.eye_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self) -> Tensor:
        """Return the ``(C, K)`` global prototypes."""
        protos_CK: Tensor = self.network(self.latents_CK)
        return protos_CK


def centroids(received_NK: Tensor, classes_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the unweighted mean of what was received for each class.

    Parameters
    ----------
    received_NK : Tensor
        ``(N, K)`` prototypes of clients.
    classes_N : Tensor
        ``(N,)`` int64 classes.

    Returns
    -------
    tuple of Tensor
        ``(n, K)`` centroids of the n classes received and their ``(n,)`` ids, ascending.

    References
    ----------
    Q_t^c of the paper.
    """
    ids, positions_N = torch.unique(classes_N, sorted=True, return_inverse=True)
    sums = received_NK.new_zeros(len(ids), received_NK.shape[1]).index_add_(0, positions_N, received_NK)
    return sums / torch.bincount(positions_N, minlength=len(ids)).unsqueeze(1), ids


def adaptive_margin(centroids_NK: Tensor, rule: str, cap: float) -> float:
    """Return delta(t), the gap between class centroids, at most ``cap`` (tau).

    Parameters
    ----------
    centroids_NK : Tensor
        ``(n, K)`` centroids of the classes received.
    rule : str
        ``max_pair``: the largest distance between two centroids (paper). ``max_of_min``: the largest over classes
        of the distance to the nearest other centroid (the authors' code).
    cap : float
        tau.

    Returns
    -------
    float
        The margin; 0 with fewer than two centroids.
    """
    if len(centroids_NK) < 2:
        return 0.0
    distances = pairwise_distance(centroids_NK, centroids_NK)
    if rule == "max_pair":
        gap = distances.max()
    else:
        assert rule == "max_of_min"
        gap = distances.fill_diagonal_(float("inf")).min(dim=1).values.max()
    return min(float(gap), cap)


def contrastive_loss(received_NK: Tensor, classes_N: Tensor, protos_CK: Tensor, margin: float) -> Tensor:
    """Return the adaptive-margin contrastive loss (ACL), a mean over the received prototypes.

    ``-log( e^-(d_c + margin) / (e^-(d_c + margin) + sum over c' != c of e^-d_c') )`` with ``d_j`` the distance
    between a received prototype of class c and the global prototype of class j.

    Parameters
    ----------
    received_NK, classes_N : Tensor
        ``(N, K)`` prototypes of clients and their ``(N,)`` int64 classes.
    protos_CK : Tensor
        ``(C, K)`` global prototypes, with gradient.
    margin : float
        delta(t); 0 gives the plain contrastive loss.

    Returns
    -------
    Tensor
        A scalar.

    References
    ----------
    L_P^c of the paper, section "Adaptive-Margin-Enhanced Contrastive Learning".
    """
    distances_NC = pairwise_distance(received_NK, protos_CK)
    shift_NC = margin * functional.one_hot(classes_N, len(protos_CK))
    return functional.cross_entropy(-(distances_NC + shift_NC), classes_N)


@dataclass(frozen=True)
class ServerTraining:
    """How the server minimises the contrastive loss in a round; the paper fixes only ``epochs`` (S).

    ``batch_size`` null is one batch with every received prototype. ``optimizer`` is ``sgd`` or ``adamw``, whose
    decoupled ``weight_decay`` multiplies every parameter by ``1 - lr weight_decay`` a step. ``schedule`` is
    ``constant`` or ``cosine`` (from ``lr`` to 0 over the steps of the round). The optimiser starts afresh every round.
    """

    epochs: int
    batch_size: int | None
    optimizer: str
    lr: float
    schedule: str
    weight_decay: float = 0.0


def train_prototypes(
    network: PrototypeNetwork,
    received_NK: Tensor,
    classes_N: Tensor,
    margin: float,
    training: ServerTraining,
    generator: Generator,
) -> float:
    """Minimise the contrastive loss over the received prototypes, in place.

    Parameters
    ----------
    network : PrototypeNetwork
        The server's prototypes, updated.
    received_NK, classes_N : Tensor
        ``(N, K)`` prototypes and ``(N,)`` int64 classes, on the device of ``network``; N at least 1.
    margin : float
        delta(t).
    training : ServerTraining
        Optimiser, batch size, number of epochs.
    generator : Generator
        CPU generator of the order of mini-batches.

    Returns
    -------
    float
        The loss over all received prototypes after the last step.
    """
    targets = Targets.of(received_NK, classes_N, len(network.latents_CK), margin)
    size = min(training.batch_size or len(received_NK), len(received_NK))
    steps = training.epochs * math.ceil(len(received_NK) / size)
    step = 0
    with DESCENTS[training.optimizer](network, network.latents_CK, training.weight_decay) as descend:
        for _ in range(training.epochs):
            for batch in targets.batches(size, generator):
                descend(partial(contrastive_gradient, batch), training.lr * _factor(training.schedule, step / steps))
                step += 1
    with torch.no_grad():
        return float(contrastive_loss(received_NK, classes_N, network(), margin))


def _factor(schedule: str, progress: float) -> float:
    """Return the factor on the learning rate when this share of the steps is done."""
    if schedule == "constant":
        return 1.0
    assert schedule == "cosine"
    return 0.5 * (1 + math.cos(math.pi * progress))
