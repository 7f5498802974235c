"""FD (FedDistill): clients exchange the mean output of each class, and learn from what the others answer.

Jeong, Oh, Kim, Park, Bennis, Kim: "Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data", NeurIPS 2018 workshop, arXiv:1811.11479.

====================  ==========================================================================
here                  paper
====================  ==========================================================================
row of ``sent_NC``    F_{i,l}, the mean output of client i over its samples of class l
``means_CC``          F-bar_l, the mean of F_{i,l} over the clients that hold class l
``holders_C``         how many clients are in that mean; the paper's M, where everyone holds every class
``targets_CC``        F-hat_{i,l}, what the other clients answer for class l
``weight``            gamma
====================  ==========================================================================

Departures from the paper: not every client holds every class, so a mean is over the holders, and a class that nobody
else holds has no target and adds nothing; outputs are those of the trained model over all local samples, not collected
while it trains. With partial participation a class that nobody sent keeps its last mean.

Departures from public code (HtFLlib; FedGen's FedDistill is like it): the target is a probability vector, so that the
cross-entropy is bounded below. Raw mean logits as its target (``raw_logits``, HtFLlib since November 2025) let the loss
fall without limit and end in NaN; its two earlier forms are ``softmax_of_mean_logits`` and ``mse_logits``. A client's
own output is left out of its target; the code keeps it in (``leave_one_out: false``), so that a class with one holder
is distilled into itself.
"""

import torch
from torch import Tensor
from torch.nn import functional

from task.prototypes import class_means

SIMPLEX_TOLERANCE = 1e-3
"""How far the sum of a float32 mean of many probability vectors may be from 1."""


def shared_outputs(logits_BC: Tensor, target: str) -> Tensor:
    """Return the ``(B, C)`` outputs whose class means a client sends: probabilities or logits, as ``target`` asks."""
    return logits_BC.softmax(dim=1) if target == "probabilities" else logits_BC


def average_outputs(sent_NC: Tensor, classes_N: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the mean over clients of what they sent for each class.

    Parameters
    ----------
    sent_NC, classes_N : Tensor
        ``(N, C)`` mean outputs of clients and their ``(N,)`` int64 classes.
    num_classes : int
        C.

    Returns
    -------
    tuple of Tensor
        ``(C, C)`` means, zero where nothing came, and the ``(C,)`` int64 numbers of clients in them.

    References
    ----------
    FD, Algorithm 1: global averaging of the local-average logit vectors.
    """
    means_CC, _ = class_means(sent_NC, classes_N, num_classes)
    return means_CC, torch.bincount(classes_N, minlength=num_classes)


def leave_own_out(means_CC: Tensor, holders_C: Tensor, own_CC: Tensor, included_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the other clients' outputs for each class, ``(n F-bar_l - F_{i,l}) / (n - 1)``.

    Parameters
    ----------
    means_CC, holders_C : Tensor
        ``(C, C)`` means over n clients, and the ``(C,)`` numbers n.
    own_CC, included_C : Tensor
        ``(C, C)`` outputs that the client itself sent, and the ``(C,)`` bool mask of classes whose mean has them.

    Returns
    -------
    tuple of Tensor
        ``(C, C)`` targets and the ``(C,)`` bool mask of classes that another client holds.

    References
    ----------
    FD, Algorithm 1: the subtraction of the device's own vector.
    """
    others_C = holders_C - included_C.long()
    own_CC = own_CC * included_C.unsqueeze(1)
    sums_CC = means_CC * holders_C.unsqueeze(1) - own_CC
    return sums_CC / others_C.clamp(min=1).unsqueeze(1), others_C > 0


def make_targets(means_CC: Tensor, target: str) -> Tensor:
    """Return the ``(C, C)`` targets of the loss from mean outputs: rows of probabilities, or logits as they are."""
    if target == "probabilities":
        # The subtraction of the own vector leaves rounding errors: negative probabilities, sums besides 1.
        positive_CC = means_CC.clamp(min=0)
        return positive_CC / positive_CC.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return means_CC.softmax(dim=1) if target == "softmax_of_mean_logits" else means_CC


def distillation_loss(logits_BC: Tensor, labels_B: Tensor, targets_CC: Tensor, known_C: Tensor, target: str) -> Tensor:
    """Return the loss between each sample's output and the target of its class.

    Parameters
    ----------
    logits_BC, labels_B : Tensor
        ``(B, C)`` logits with gradient and ``(B,)`` int64 labels.
    targets_CC, known_C : Tensor
        ``(C, C)`` result of ``make_targets`` and the ``(C,)`` bool mask of classes that have one. Samples of the
        others add 0 and still count in the mean.
    target : str
        ``mse_logits`` takes the mean squared error over B and C; all others the cross-entropy, whose value is at least
        0 for probabilities and unbounded for ``raw_logits``.

    Returns
    -------
    Tensor
        A scalar.

    References
    ----------
    FD, Algorithm 1: gamma times the cross-entropy between F and F-hat.
    """
    rows_BC = targets_CC[labels_B]
    if target == "mse_logits":
        losses_B = (logits_BC - rows_BC).square().mean(dim=1)
    else:
        losses_B = functional.cross_entropy(logits_BC, rows_BC, reduction="none")
    return (losses_B * known_C[labels_B]).mean()


def require_probabilities(who: str, sent_NC: Tensor) -> None:
    """Refuse rows that are no probability vectors; ``ValueError`` of one line naming ``who`` sent them."""
    off = (sent_NC.sum(dim=1) - 1).abs()
    if len(sent_NC) and (sent_NC.min() < 0 or off.max() > SIMPLEX_TOLERANCE):
        smallest, worst = float(sent_NC.min()), float(off.max())
        raise ValueError(
            f"{who} sent prototypes with values from {smallest:.3g} and sums {worst:.3g} away from 1: "
            f"probabilities are needed, at least 0 and of sum 1 (within {SIMPLEX_TOLERANCE})"
        )
