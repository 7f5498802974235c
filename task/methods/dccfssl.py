"""DCCFSSL, the client's half: dual class-aware contrastive losses, and the samples that make its prototypes.

Guo and others: "Dual Class-Aware Contrastive Federated Semi-Supervised Learning", IEEE Transactions on Mobile
Computing 2024, arXiv:2211.08914. The server's half is ``task/methods/dccfssl_aggregation.py``.

======================  ==========================================================================
here                    paper
======================  ==========================================================================
``z_VBK``               z = F(Aug(x)) of length 1; V views: weak, and two strong ones
``labels_B``            y on a labelled client, else the pseudo-label of the weak view
``confidence_B``        1 on a labelled client, else the probability of the pseudo-label
``trusted_B``           true on a labelled client, else whether the confidence reaches ``threshold``
``protos_CK``           O, the global class prototypes
``known_C``             which classes have one
``threshold``           tau
``lambda_lcc/gcc``      lambda_lcc, lambda_gcc
======================  ==========================================================================

The basic loss is cross-entropy of the weak view on a labelled client, and FixMatch's (``task/methods/fixmatch.py``)
on one without labels. The two contrastive losses are this reading of the paper's words:

local class-aware (lcc)
    Representations of the same category in the batch attract, others repel. Read as the supervised contrastive loss
    (Khosla et al., NeurIPS 2020) over the two strong views; pseudo-labels enter as in CCSSL (Yang et al., CVPR 2022):
    a pair of images of one class weighs the product of their confidences, the two views of one image weigh 1.
global class-aware (gcc)
    The prototype of the own class attracts, the others repel. Read as cross-entropy over the classes that have a
    prototype, with cosine similarity divided by the temperature as logits; images that are not trusted, or whose
    class has no prototype, add 0 and still count in the mean.

What else the words leave open are settings: ``lcc_unlabelled``, ``gcc_views``, ``normalise``. There is no projection
head, and no factor T / T_0 on the losses as in public code of supervised contrast.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

LccUnlabelled = Literal["ccssl_push", "ccssl", "hard", "drop"]
GccViews = Literal["strong", "weak", "all"]
VIEWS = {"strong": slice(1, 3), "weak": slice(0, 1), "all": slice(0, 3)}
SMALLEST_NORM = 1e-12
FAR = -1e9
"""The logit of a class without prototype: its exponential is 0, and it makes no NaN where all classes have it."""


def representations(feats_BK: Tensor) -> Tensor:
    """Return features divided by their Euclidean length.

    A feature of length 0 stays as it is and gets the gradient of the identity; division by a small constant would
    multiply its gradient by the inverse of that constant.
    """
    norms_B1 = torch.linalg.vector_norm(feats_BK, dim=-1, keepdim=True)
    scaled_BK: Tensor = feats_BK / norms_B1.masked_fill(norms_B1 < SMALLEST_NORM, 1.0)
    return scaled_BK


def dual_contrast(
    z_VBK: Tensor,
    labels_B: Tensor,
    confidence_B: Tensor,
    trusted_B: Tensor,
    protos_CK: Tensor | None,
    known_C: Tensor | None,
    *,
    lambda_lcc: float,
    lambda_gcc: float,
    temperature: float,
    lcc_unlabelled: LccUnlabelled,
    gcc_views: GccViews,
) -> dict[str, Tensor]:
    """Return the weighted contrastive terms of a batch by name; the local objective is the basic loss plus these.

    A term of weight 0 is left out, and so is the global one while there are no prototypes (None).

    Parameters
    ----------
    z_VBK : Tensor
        ``(3, B, K)`` representations of the weak view and the two strong ones, with gradient.
    labels_B, confidence_B, trusted_B : Tensor
        ``(B,)`` int64 classes, confidences in [0, 1] and bool, without gradient.
    protos_CK, known_C : Tensor or None
        ``(C, K)`` global prototypes and the ``(C,)`` bool mask of those that exist.
    lambda_lcc, lambda_gcc : float
        Weights, at least 0.
    temperature, lcc_unlabelled, gcc_views
        As in ``local_contrast`` and ``global_contrast``; the latter gets the views that ``gcc_views`` names.
    """
    terms = {}
    if lambda_lcc:
        local = local_contrast(z_VBK[VIEWS["strong"]], labels_B, confidence_B, trusted_B, temperature, lcc_unlabelled)
        terms["lcc_loss"] = lambda_lcc * local
    if lambda_gcc and protos_CK is not None and known_C is not None:
        views_VBK = z_VBK[VIEWS[gcc_views]]
        spread = global_contrast(views_VBK, labels_B, trusted_B, protos_CK, known_C, temperature)
        terms["gcc_loss"] = lambda_gcc * spread
    return terms


def local_contrast(
    z_VBK: Tensor,
    labels_B: Tensor,
    confidence_B: Tensor,
    trusted_B: Tensor,
    temperature: float,
    lcc_unlabelled: LccUnlabelled,
) -> Tensor:
    """Return L_lcc: every view of every image is an anchor, the other views of the batch its positives or negatives.

    Parameters
    ----------
    z_VBK : Tensor
        ``(V, B, K)`` representations, V at least 2.
    labels_B, confidence_B, trusted_B : Tensor
        As in ``dual_contrast``.
    temperature : float
        T, above 0.
    lcc_unlabelled : str
        The weight of a pair of images of one class. ``ccssl_push``: the product of their confidences where both are
        trusted, else 0. ``ccssl``: that product, trusted or not. ``hard``: 1 where both are trusted, else 0.
        ``drop``: as ``hard``, and images that are not trusted are no anchors; they stay in the denominators.
        With true labels all four are the same.

    Returns
    -------
    Tensor
        A scalar, the mean over the anchors; 0 without anchors.
    """
    views, batch = z_VBK.shape[:2]
    weights_BB = _pair_weights(labels_B, confidence_B, trusted_B, lcc_unlabelled)
    weights_AA = weights_BB.repeat(views, views).fill_diagonal_(0)
    z_AK = z_VBK.flatten(0, 1)
    logits_AA = _similarities(z_AK, z_AK, temperature)
    self_AA = torch.eye(views * batch, dtype=torch.bool, device=z_AK.device)
    denominators_A = logits_AA.masked_fill(self_AA, float("-inf")).logsumexp(dim=1)
    losses_A = denominators_A - (weights_AA * logits_AA).sum(dim=1) / weights_AA.sum(dim=1)
    if lcc_unlabelled != "drop":
        return losses_A.mean()
    anchors_A = trusted_B.repeat(views)
    return (losses_A * anchors_A).sum() / anchors_A.sum().clamp(min=1)


def _pair_weights(labels_B: Tensor, confidence_B: Tensor, trusted_B: Tensor, rule: LccUnlabelled) -> Tensor:
    """Return the ``(B, B)`` weights of pairs of images, 1 for an image with itself."""
    weight_B = confidence_B if rule.startswith("ccssl") else torch.ones_like(confidence_B)
    weight_B = weight_B if rule == "ccssl" else weight_B * trusted_B
    same_BB = labels_B.unsqueeze(1) == labels_B
    return (same_BB * weight_B.unsqueeze(1) * weight_B).fill_diagonal_(1)


def global_contrast(
    z_VBK: Tensor, labels_B: Tensor, trusted_B: Tensor, protos_CK: Tensor, known_C: Tensor, temperature: float
) -> Tensor:
    """Return L_gcc: every view of every image is drawn to the prototype of its class, away from the others.

    Parameters
    ----------
    z_VBK : Tensor
        ``(V, B, K)`` representations.
    labels_B, trusted_B : Tensor
        As in ``dual_contrast``.
    protos_CK, known_C : Tensor
        ``(C, K)`` global prototypes of any length, taken as given, and the ``(C,)`` bool mask of those that exist.
    temperature : float
        T, above 0.

    Returns
    -------
    Tensor
        A scalar, the sum over the images that count divided by V B; 0 with gradient 0 where fewer than two classes
        have a prototype.
    """
    views = len(z_VBK)
    logits_AC = _similarities(z_VBK.flatten(0, 1), representations(protos_CK.detach()), temperature)
    logits_AC = logits_AC.masked_fill(~known_C, FAR)
    losses_A = functional.cross_entropy(logits_AC, labels_B.repeat(views), reduction="none")
    return (losses_A * (trusted_B & known_C[labels_B]).repeat(views)).mean()


def _similarities(z_AK: Tensor, others_NK: Tensor, temperature: float) -> Tensor:
    # At T = 0.07 a product in 16 bits would be off by up to 0.06.
    with torch.autocast(z_AK.device.type, enabled=False):
        return z_AK @ others_NK.T / temperature


def prototype_samples(
    feats_BK: Tensor,
    logits_BC: Tensor,
    labels_B: Tensor | None,
    *,
    threshold: float,
    authenticate: bool = True,
    normalise: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the vectors and classes of the samples of a batch that enter the client's prototypes.

    ``task.prototypes.means_over`` makes o^i and v^i of what this returns for every batch of the client's data, seen
    by the model after training, in eval mode and without augmentation.

    Parameters
    ----------
    feats_BK, logits_BC : Tensor
        Features ``(B, K)`` and logits ``(B, C)``.
    labels_B : Tensor or None
        ``(B,)`` true classes on a labelled client, None on one without labels.
    threshold : float
        tau, for clients without labels; a confidence equal to it counts.
    authenticate : bool
        True: only authentication samples, that is those classified correctly, or with a confidence of at least
        ``threshold``. False: all samples, with their true or predicted class (the paper's ablation -ARA).
    normalise : bool
        Whether the vectors are representations or the features as they are.

    Returns
    -------
    tuple of Tensor
        ``(n, K)`` vectors and ``(n,)`` int64 classes, n from 0 to B.

    References
    ----------
    DCCFSSL, definition of authentication samples and E_j^i.
    """
    confidence_B, predicted_B = logits_BC.softmax(dim=1).max(dim=1)
    classes_B = predicted_B if labels_B is None else labels_B
    vectors_BK = representations(feats_BK) if normalise else feats_BK
    if not authenticate:
        return vectors_BK, classes_B
    authentic_B = confidence_B >= threshold if labels_B is None else predicted_B == labels_B
    return vectors_BK[authentic_B], classes_B[authentic_B]
