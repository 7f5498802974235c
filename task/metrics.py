"""The only evaluation loop: accuracy by head and by nearest prototype, and loss, in one pass."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from task.models.split import SplitModel
from task.prototypes import means_over, nearest_prototype


@dataclass(frozen=True)
class Accuracy:
    """What an evaluation found: shares of right answers in [0, 1] and the mean cross-entropy (nats).

    ``by_prototype`` is None when there were no global prototypes; ``examples`` is the number of samples.
    ``confusion`` ``(C, C)`` int64, on the CPU, is how often each true class (row) was taken for which (column), where
    it was asked for.
    """

    examples: int
    by_head: float
    by_prototype: float | None
    loss: float
    confusion: Tensor | None = None


@torch.no_grad()
def evaluate(
    model: SplitModel,
    batches: Iterable[tuple[Tensor, Tensor]],
    protos_CK: Tensor | None = None,
    known_C: Tensor | None = None,
    *,
    confusion_by: str | None = None,
) -> Accuracy | None:
    """Run ``model`` in eval mode over ``batches`` of images and labels.

    Parameters
    ----------
    model : SplitModel
        The model; left in eval mode.
    batches : iterable of (Tensor, Tensor)
        Images ``(B, channels, height, width)`` and int64 labels ``(B,)``, on the device of the model.
    protos_CK, known_C : Tensor, optional
        ``(C, K)`` global prototypes and the ``(C,)`` mask of those that exist.
    confusion_by : str or None
        The rule, ``head`` or ``prototype``, whose confusion matrix is wanted.

    Returns
    -------
    Accuracy or None
        None when there is no sample.
    """
    model.eval()
    examples, rows = 0, []
    confused: list[Tensor] = []
    if known_C is not None and not known_C.any():
        protos_CK = None
    for images, labels in batches:
        feats_BK = model.features(images).float()
        logits_BC = model.head(feats_BK).float()
        answers = {"head": logits_BC.argmax(dim=1)}
        if protos_CK is not None:
            answers["prototype"] = nearest_prototype(feats_BK, protos_CK, known_C)
        found = [functional.cross_entropy(logits_BC, labels, reduction="sum")]
        found += [(predicted == labels).sum() for predicted in answers.values()]
        if confusion_by in answers:
            classes = logits_BC.shape[1]
            cells = (labels * classes + answers[confusion_by])[labels >= 0]
            cells = torch.bincount(cells, minlength=classes**2)
            confused.append(cells.view(classes, classes))
        rows.append(torch.stack([value.double() for value in found]))
        examples += len(labels)
    if not examples:
        return None
    # Read once, at the end: every read waits for the device.
    loss, head, *prototype = (torch.stack(rows).sum(dim=0) / examples).tolist()
    confusion = torch.stack(confused).sum(dim=0).cpu() if confused else None
    return Accuracy(examples, head, prototype[0] if prototype else None, loss, confusion)


@torch.no_grad()
def class_prototypes(
    model: SplitModel, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return the mean eval-mode feature of each class over ``batches``, and how many samples each has.

    Parameters
    ----------
    model : SplitModel
        The trained model; left in eval mode.
    batches : iterable of (Tensor, Tensor)
        Images and int64 labels on the device of the model.
    num_classes : int
        C.

    Returns
    -------
    tuple of Tensor
        Float32 ``(C, K)`` means (zero where a class has no sample) and int64 ``(C,)`` counts, on the device.
    """
    return class_averages(model, model.features, batches, num_classes, feature_width(model))


@torch.no_grad()
def class_averages(
    model: SplitModel,
    vectors_of: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    num_classes: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Return the mean of any vector of each class over ``batches``, and how many samples each has.

    Parameters
    ----------
    model, batches, num_classes
        As in ``class_prototypes``.
    vectors_of : callable
        Takes images and returns ``(B, width)`` vectors, with the model in eval mode.
    width : int
        The width of the vectors.

    Returns
    -------
    tuple of Tensor
        Float32 ``(C, width)`` means (zero where a class has no sample) and int64 ``(C,)`` counts, on the device.
    """
    model.eval()
    return means_over(((vectors_of(images), labels) for images, labels in batches), num_classes, width)


def feature_width(model: SplitModel) -> int:
    """Return K, the number of inputs of the model's head."""
    first = next(layer for layer in model.head.modules() if isinstance(layer, nn.Linear))
    return first.in_features
