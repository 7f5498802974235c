"""FML: on every client a private model and a shared one, the "meme", learn from the labels and from each other.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu: "Federated Mutual Learning", arXiv:2006.16765.

====================  ==========================================================================
here                  paper
====================  ==========================================================================
``private_BC``        logits of the local, private model
``shared_BC``         logits of the meme model, which the server averages
``alpha``             alpha, weight of the labels in the loss of the private model
``beta``              beta, weight of the labels in the loss of the meme
====================  ==========================================================================

Departures from the paper: its images are trained with momentum 0.9, weight decay and a falling learning rate; here
all methods have the run's optimiser. What is averaged is the whole state of the meme: parameters and BatchNorm's
running statistics, as their mean; its counters of batches take the largest value. A client that trained nothing sends
nothing, in place of the meme as it received it.

Departures from HtFLlib, the FedTGP authors' code: its KL divergence is divided by the number of classes too, which
makes the models teach each other C times less (``kl=mean``); its losses run backward into both models, so that each
model minimises the sum of both losses (``detach=false``); gradients are clipped to norm 10 (``clip=10``); BatchNorm
buffers are not averaged.
"""

from typing import Literal

from torch import Tensor
from torch.nn import functional

from task.losses import divergence


def mutual_losses(
    private_BC: Tensor,
    shared_BC: Tensor,
    labels_B: Tensor,
    *,
    alpha: float,
    beta: float,
    kl: Literal["batchmean", "mean"],
    detach: bool,
) -> tuple[Tensor, Tensor]:
    """Return the losses of the private and of the shared model on one batch.

    ``alpha CE(private) + (1 - alpha) KL(shared || private)`` and
    ``beta CE(shared) + (1 - beta) KL(private || shared)``.

    Parameters
    ----------
    private_BC, shared_BC : Tensor
        ``(B, C)`` logits of the two models.
    labels_B : Tensor
        ``(B,)`` int64 labels.
    alpha, beta : float
        Weights of the labels, in [0, 1].
    kl : str
        ``batchmean`` or ``mean``, as in ``task.losses.divergence``.
    detach : bool
        Whether each model takes the other's output as given.

    References
    ----------
    FML, section "Deep mutual learning", the losses L_local and L_meme.
    """
    private_target, shared_target = (private_BC.detach(), shared_BC.detach()) if detach else (private_BC, shared_BC)
    private_loss = alpha * functional.cross_entropy(private_BC, labels_B)
    private_loss = private_loss + (1 - alpha) * divergence(private_BC, shared_target, kl)
    shared_loss = beta * functional.cross_entropy(shared_BC, labels_B)
    shared_loss = shared_loss + (1 - beta) * divergence(shared_BC, private_target, kl)
    return private_loss, shared_loss
