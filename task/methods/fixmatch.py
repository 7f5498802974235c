"""FixMatch: what a model is sure of on a weakly augmented image is its target on a strongly augmented one.

Sohn, Berthelot, Li, Zhang, Carlini, Cubuk, Kurakin, Zhang, Raffel: "FixMatch: Simplifying Semi-Supervised Learning
with Consistency and Confidence", NeurIPS 2020, arXiv:2001.07685.

====================  ==========================================================================
here                  paper
====================  ==========================================================================
``weak_BC``           logits of alpha(u), the weak views
``strong_BC``         logits of A(u), the strong views
``labels_B``          q-hat, the class of the largest probability of the weak view
``confidence_B``      max(q), that probability
``trusted_B``         1[max(q) >= tau]
``threshold``         tau
====================  ==========================================================================

The loss is a mean over all B images, those that are not trusted included, so that it grows with the number of those
that are. Weak logits come from the model that is trained, in training mode and in the same forward pass, and are
detached. FedAvg-FixMatch and FedProx-FixMatch are this loss on clients without labels, cross-entropy of the weak view
on the others, and a mean of models by their numbers of samples.

Departures from the paper: a client has labelled or unlabelled images, never both, so there is no ratio of the two and
no weight lambda_u; no Nesterov momentum, no cosine schedule and no averaged copy of the model for tests. Images are
scaled to -1..1 (``task/data/loaders.py``) instead of by the mean and deviation of their data set.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Targets(NamedTuple):
    """What the images of a batch are trained towards, without gradient.

    ``labels_B`` int64 classes, ``confidence_B`` float in [0, 1], ``trusted_B`` bool.
    """

    labels_B: Tensor
    confidence_B: Tensor
    trusted_B: Tensor


def pseudo_labels(weak_BC: Tensor, threshold: float) -> Targets:
    """Return the targets that the ``(B, C)`` logits of weak views give; a confidence equal to ``threshold`` counts."""
    confidence_B, labels_B = weak_BC.detach().softmax(dim=1).max(dim=1)
    return Targets(labels_B, confidence_B, confidence_B >= threshold)


def true_labels(labels_B: Tensor) -> Targets:
    """Return the targets of images whose ``(B,)`` classes are known: confidence 1, all trusted."""
    certain_B = torch.ones(len(labels_B), device=labels_B.device)
    return Targets(labels_B, certain_B, certain_B.bool())


def unlabelled_loss(strong_BC: Tensor, targets: Targets) -> Tensor:
    """Return L_u, the sum over trusted images of the cross-entropy, divided by B.

    Parameters
    ----------
    strong_BC : Tensor
        ``(B, C)`` logits of the strong views, with gradient.
    targets : Targets
        Of ``pseudo_labels``.

    Returns
    -------
    Tensor
        A scalar; 0 with gradient 0 when no image is trusted.

    References
    ----------
    FixMatch, eq. (4).
    """
    losses_B = functional.cross_entropy(strong_BC, targets.labels_B, reduction="none")
    return (losses_B * targets.trusted_B).mean()
