"""Losses that two or more methods use."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from task.prototypes import class_means, pairwise_distance


def class_mean_distance(feats_BK: Tensor, labels_B: Tensor, protos_CK: Tensor, known_C: Tensor) -> Tensor:
    """Return the mean over the classes of a batch of the distance between class mean and global prototype.

    This is the mini-batch form of ``E_c |P_i^c - P^c|_2``: every class counts alike, however many of the
    samples it has. Classes without a global prototype are left out.

    Parameters
    ----------
    feats_BK : Tensor
        ``(B, K)`` features with gradient.
    labels_B : Tensor
        ``(B,)`` int64 labels.
    protos_CK : Tensor
        ``(C, K)`` global prototypes, without gradient.
    known_C : Tensor
        ``(C,)`` bool: classes that have a global prototype.

    Returns
    -------
    Tensor
        A scalar; 0 when no class of the batch has a prototype.

    References
    ----------
    FedTGP, local objective; FedProto, local objective.
    """
    means_CK, present_C = class_means(feats_BK, labels_B, len(protos_CK))
    counted_C = present_C & known_C
    # vector_norm has gradient 0 at distance 0, where a square root has none.
    distances_C = torch.linalg.vector_norm(means_CK - protos_CK, dim=1)
    total: Tensor = (distances_C * counted_C).sum()
    return total / counted_C.sum().clamp(min=1)


def sample_squared_error(feats_BK: Tensor, labels_B: Tensor, protos_CK: Tensor, known_C: Tensor) -> Tensor:
    """Return the mean squared difference between each sample's feature and the prototype of its class.

    The form of the authors' public code: a mean over B and K, so its scale shrinks as 1/K. Samples whose class
    has no global prototype add 0 and still count in the mean.

    Parameters and return value are those of ``class_mean_distance``.
    """
    targets_BK = torch.where(known_C[labels_B].unsqueeze(1), protos_CK[labels_B], feats_BK.detach())
    return (feats_BK - targets_BK).square().mean()


def prototype_cross_entropy(feats_BK: Tensor, labels_B: Tensor, protos_CK: Tensor, known_C: Tensor) -> Tensor:
    """Return the cross-entropy of the classifier whose logits are minus the distances to the global prototypes.

    It is what inference by nearest prototype decides on, and FedTGP's server loss with margin 0 for single samples:
    features learn to lie nearer to the prototype of their class than to any other, wherever the prototypes are.

    Parameters and return value are those of ``class_mean_distance``; samples whose class has no prototype add 0, and
    the mean is over the others.
    """
    counted_B = known_C[labels_B]
    # Far, but finite: with no prototype at all, infinities would turn the dropped losses into NaN.
    logits_BC = -pairwise_distance(feats_BK, protos_CK).masked_fill(~known_C, 1e9)
    # A sample that does not count gets its nearest class, so that the loss that is dropped is a small number.
    classes_B = torch.where(counted_B, labels_B, logits_BC.detach().argmax(dim=1))
    losses_B = functional.cross_entropy(logits_BC, classes_B, reduction="none") * counted_B
    return losses_B.sum() / counted_B.sum().clamp(min=1)


def divergence(logits_BC: Tensor, target_logits_BC: Tensor, reduction: Literal["batchmean", "mean"]) -> Tensor:
    """Return the Kullback-Leibler divergence KL(target || prediction) of two classifiers on one batch, in nats.

    Parameters
    ----------
    logits_BC : Tensor
        ``(B, C)`` logits of the classifier that learns.
    target_logits_BC : Tensor
        ``(B, C)`` logits of the classifier that it learns from; detach them to keep that one out of it.
    reduction : str
        ``batchmean``: the mean over the samples, which is what the papers write. ``mean``: divided by C once more,
        which is what torch's default does and public code therefore has.
    """
    target = functional.log_softmax(target_logits_BC, dim=1)
    found = functional.kl_div(functional.log_softmax(logits_BC, dim=1), target, reduction="batchmean", log_target=True)
    return found if reduction == "batchmean" else found / logits_BC.shape[1]
