"""Prototypes: class means of features, centroids of what clients sent, distances, nearest prototype."""

from collections.abc import Iterable

import torch
from torch import Tensor


def pairwise_distance(rows_NK: Tensor, others_CK: Tensor) -> Tensor:
    """Return the Euclidean distances between two sets of vectors, with finite gradients everywhere.

    The expanded form ``|a|² - 2ab + |b|²`` loses all digits near zero and turns into NaN under the square
    root; the direct form does not, and its gradient at distance zero is zero.

    Parameters
    ----------
    rows_NK : Tensor
        ``(N, K)`` vectors.
    others_CK : Tensor
        ``(C, K)`` vectors.

    Returns
    -------
    Tensor
        ``(N, C)`` distances, at least 0.
    """
    return torch.cdist(rows_NK, others_CK, compute_mode="donot_use_mm_for_euclid_dist")


def class_sums(feats_BK: Tensor, labels_B: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the ``(C, K)`` sums of the features of each class and the ``(C,)`` numbers of samples."""
    sums_CK = feats_BK.new_zeros(num_classes, feats_BK.shape[1]).index_add_(0, labels_B, feats_BK)
    return sums_CK, torch.bincount(labels_B, minlength=num_classes)


def class_means(feats_BK: Tensor, labels_B: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the mean feature of each class, and which classes occur.

    Parameters
    ----------
    feats_BK : Tensor
        ``(B, K)`` features.
    labels_B : Tensor
        ``(B,)`` int64 labels in ``[0, num_classes)``.
    num_classes : int
        C.

    Returns
    -------
    tuple of Tensor
        ``(C, K)`` means, zero where a class does not occur, and a ``(C,)`` bool mask of those that do.
    """
    sums_CK, counts_C = class_sums(feats_BK, labels_B, num_classes)
    return sums_CK / counts_C.clamp(min=1).unsqueeze(1), counts_C > 0


def means_over(batches: Iterable[tuple[Tensor, Tensor]], num_classes: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the mean vector of each class over many batches, and how many samples each has.

    Parameters
    ----------
    batches : iterable of (Tensor, Tensor)
        ``(n, K)`` vectors and ``(n,)`` int64 classes; n may be 0 and differ from batch to batch.
    num_classes, width : int
        C and K.

    Returns
    -------
    tuple of Tensor
        Float32 ``(C, K)`` means (zero where a class has no sample) and int64 ``(C,)`` counts, on the device.
    """
    sums_CK, counts_C = torch.zeros(num_classes, width), torch.zeros(num_classes, dtype=torch.int64)
    for vectors_BK, classes_B in batches:
        batch_CK, batch_C = class_sums(vectors_BK.float(), classes_B, num_classes)
        sums_CK, counts_C = sums_CK.to(batch_CK.device) + batch_CK, counts_C.to(batch_C.device) + batch_C
    return sums_CK / counts_C.clamp(min=1).unsqueeze(1), counts_C


def nearest_prototype(feats_BK: Tensor, protos_CK: Tensor, known_C: Tensor | None = None) -> Tensor:
    """Return the class whose prototype is nearest to each feature.

    Parameters
    ----------
    feats_BK : Tensor
        ``(B, K)`` features.
    protos_CK : Tensor
        ``(C, K)`` prototypes.
    known_C : Tensor, optional
        ``(C,)`` bool: classes that have a prototype; the others are never predicted.

    Returns
    -------
    Tensor
        ``(B,)`` int64 classes.

    References
    ----------
    FedTGP, section "FedTGP Framework": arg min over c of ``|f(x) - P^c|``.
    """
    # The order of squared distances is the order of distances, and |f|² is the same for every class.
    scores_BC = feats_BK @ protos_CK.T - 0.5 * protos_CK.square().sum(dim=1)
    if known_C is not None:
        scores_BC = scores_BC.masked_fill(~known_C, float("-inf"))
    return scores_BC.argmax(dim=1)


def smallest_gap(protos_CK: Tensor) -> float:
    """Return the smallest distance between two of the ``(C, K)`` prototypes; 0 for fewer than two."""
    if len(protos_CK) < 2:
        return 0.0
    return float(torch.pdist(protos_CK).min())
