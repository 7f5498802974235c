"""What clients contribute to a mean of weights, and how much each counts."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from task.averaging import client_weight, require_alike
from task.messages import Upload


def inspect_weights(upload: Upload, wanted: Mapping[str, Tensor], rule: str) -> None:
    """Refuse an upload whose weights are not of the ``wanted`` kind, or cannot be weighed by ``rule``.

    Raises
    ------
    ValueError
        One line naming the client. An upload without weights passes: its client had nothing to train on.
    """
    if upload.weights is not None:
        who = f"client {upload.partition}"
        require_alike(who, upload.weights, wanted)
        client_weight(who, upload.examples, rule)


def gather_weights(uploads: Sequence[Upload], rule: str) -> tuple[list[Mapping[str, Tensor]], list[float]]:
    """Return the weights of each upload that has any, and by how much it counts under ``rule``."""
    sent, counts = [], []
    for upload in uploads:
        if upload.weights is not None:
            sent.append(upload.weights)
            counts.append(client_weight(f"client {upload.partition}", upload.examples, rule))
    return sent, counts


def group_share(weights: Sequence[float], inside: Sequence[bool]) -> float:
    """Return the share of the sum of ``weights`` that belongs to the clients ``inside`` a group; 0 of nothing."""
    total = sum(weights)
    return sum(weight for weight, own in zip(weights, inside, strict=True) if own) / total if total else 0.0
