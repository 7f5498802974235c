"""The messages between server and clients as plain dataclasses; ``task/payload.py`` puts them on the wire."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from task.foreign import LARGEST_NORM

UNPLACED = -1
"""The partition of a node that is known by name and has not been told its place in the run."""
NO_PARAMETERS = ("running_mean", "running_var", "num_batches_tracked")
"""How the names of weights end that are BatchNorm's statistics."""


@dataclass(frozen=True)
class PrototypeSet:
    """Prototypes of some classes: ``class_ids`` ``(n,)`` int64, ``vectors`` ``(n, K)`` float32.

    ``counts`` ``(n,)`` int64 is the number of samples behind each, for methods that weight by it; FedTGP leaves it
    empty, so that no sample count leaves a client.
    """

    class_ids: Tensor
    vectors: Tensor
    counts: Tensor | None = None

    @classmethod
    def of(cls, means_CK: Tensor, counts_C: Tensor, *, share_counts: bool) -> "PrototypeSet | None":
        """Return the prototypes of the classes with samples, on the CPU; None where no class has any."""
        means_CK, counts_C = means_CK.cpu(), counts_C.cpu()
        ids = counts_C.nonzero().flatten()
        if not len(ids):
            return None
        return cls(ids, means_CK[ids].contiguous(), counts_C[ids] if share_counts else None)

    def dense(self, num_classes: int) -> tuple[Tensor, Tensor]:
        """Return ``(C, K)`` vectors, zero where a class has none, and the ``(C,)`` bool mask of those that do."""
        vectors_CK = self.vectors.new_zeros(num_classes, self.vectors.shape[1])
        known_C = torch.zeros(num_classes, dtype=torch.bool)
        vectors_CK[self.class_ids] = self.vectors
        known_C[self.class_ids] = True
        return vectors_CK, known_C


@dataclass(frozen=True)
class Placement:
    """What a node cannot know by itself, and is told with every message: its place in the run, and the C classes.

    Only for nodes that are known by name, or whose own data has other classes or another order of them.
    """

    partition: int
    num_partitions: int
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class Shared:
    """What a method's server sends: global prototypes, named weights, both, or nothing (yet)."""

    prototypes: PrototypeSet | None = None
    weights: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Download(Shared):
    """What a client receives: what the server shares, the round (from 1) and the run's ``session``.

    ``state_round`` is the round whose training made the client's current private state, 0 for none: a client that
    cannot find exactly that state must say so instead of starting anew. ``durable_round`` is
    what ``state_round`` would be if the server went on from its last checkpoint: that state must be kept, too.
    ``confusion`` asks for the confusion matrix of an evaluation.
    """

    round: int = 0
    session: str = ""
    state_round: int = 0
    durable_round: int = 0
    placement: Placement | None = None
    confusion: bool = False


@dataclass(frozen=True)
class Upload:
    """What a client returns from training: what its method shares, and the mean losses it saw.

    ``examples`` is the number of training samples, only for methods that weight clients by it.
    """

    partition: int
    round: int
    prototypes: PrototypeSet | None = None
    weights: Mapping[str, Tensor] | None = None
    examples: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationReport:
    """What a client returns from evaluation: accuracies in [0, 1] by rule, and the loss; empty without test data.

    ``examples`` is the number of test samples, None when the client keeps its sizes to itself. ``confusion`` ``(C, C)``
    int64 is how often each true class (row) was taken for which (column); None unless the server asked for it.
    """

    partition: int
    round: int
    examples: int | None
    metrics: Mapping[str, float]
    confusion: Tensor | None = None


@dataclass(frozen=True)
class NodeReport:
    """Facts of one client, asked once before round 1. Sizes are None when the client keeps them to itself.

    ``class_names`` has C entries, as does ``class_counts`` (training and test samples together). ``image_shape`` is
    (channels, height, width); a server that trains no model of its own never asks for it. ``role`` is ``labelled`` or
    ``unlabelled``; a client without labels has no classes to report. ``name`` is empty where the node has none;
    ``own_data`` tells that its images are its own and no part of the run's ``data``.
    """

    partition: int
    num_partitions: int
    model: str
    parameters: int
    feature_dim: int
    class_names: tuple[str, ...]
    device: str
    class_ids: tuple[int, ...]
    train_size: int | None = None
    test_size: int | None = None
    class_counts: tuple[int, ...] | None = None
    image_shape: tuple[int, ...] = ()
    role: str = "labelled"
    name: str = ""
    own_data: bool = False

    @property
    def who(self) -> str:
        """What messages call the client."""
        name = f" ({self.name})" if self.name else ""
        return f"client {self.partition}{name}" if self.partition != UNPLACED else f"node {self.name!r}"


@dataclass(frozen=True)
class Expected:
    """What the server expects of a reply: who sent it, in which round, C and K, and how long a prototype may be."""

    partition: int
    round: int
    num_classes: int
    feature_dim: int
    largest_norm: float = LARGEST_NORM


def prototype_parameters_in(message: Shared | Upload) -> int:
    """Return how many of a message's parameters are scalars of prototype vectors."""
    return message.prototypes.vectors.numel() if message.prototypes is not None else 0


def parameters_in(message: Shared | Upload) -> int:
    """Return how many parameters a message shares: what the papers count, and call MB where it is millions.

    These are the scalars of the prototype vectors and of the floating-point weights. Whole numbers (class ids, counts)
    and BatchNorm's running statistics are none; they only count in the bytes.
    """
    return prototype_parameters_in(message) + sum(
        tensor.numel()
        for name, tensor in (message.weights or {}).items()
        if tensor.is_floating_point() and not name.endswith(NO_PARAMETERS)
    )
