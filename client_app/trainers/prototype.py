"""Client half of FedTGP and FedProto: cross-entropy plus a pull towards the global prototypes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from client_app.loop import fit_epochs
from client_app.session import Session
from client_app.trainers.base import Trainer
from task.losses import class_mean_distance, sample_squared_error
from task.messages import PrototypeSet, Upload
from task.metrics import class_prototypes
from task.prototypes import class_sums
from task.schema import require

PrototypeLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
DISTANCES: dict[str, PrototypeLoss] = {
    "class_mean_l2": class_mean_distance,
    "sample_mse": sample_squared_error,
}


@dataclass
class PrototypeTrainer(Trainer):
    """Local objective ``CE + weight * distance to the global prototypes``; uploads class means of features.

    Parameters
    ----------
    weight : float
        lambda. It belongs to a distance: 0.1 to ``class_mean_l2`` (papers), 10 to ``sample_mse`` (public code).
    distance : str
        ``class_mean_l2``: mean over the classes of a batch of the Euclidean distance between the class mean and
        its global prototype. ``sample_mse``: mean squared error of every sample's feature, divided by K too.
    share_counts : bool
        Whether the number of samples behind each prototype is sent; FedTGP never does.
    collect : str
        ``after_training``: eval-mode features of the trained model over all local samples. ``during_training``:
        the features of the training passes themselves, as FedProto's public code has it.
    """

    weight: float = 0.1
    distance: Literal["class_mean_l2", "sample_mse"] = "class_mean_l2"
    share_counts: bool = False
    collect: Literal["after_training", "during_training"] = "after_training"

    def __post_init__(self) -> None:
        require(0 <= self.weight < float("inf"), "weight", self.weight, "a finite number of at least 0")

    def fit(self, session: Session) -> Upload:
        """Train, then return the prototypes of the classes that the client holds."""
        model, classes = session.model, session.num_classes
        loss = DISTANCES[self.distance]
        received = session.download.prototypes
        seen = [torch.zeros(classes, session.config.model.feature_dim), torch.zeros(classes, dtype=torch.int64)]
        collected = [tensor.to(session.device) for tensor in seen]
        if received is not None:
            protos_CK, known_C = (tensor.to(session.device) for tensor in received.dense(classes))

        def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            feats_BK = model.features(images)
            losses = {"loss": functional.cross_entropy(model.head(feats_BK).float(), labels)}
            if received is not None:
                losses["prototype_loss"] = self.weight * loss(feats_BK.float(), labels, protos_CK, known_C)
            if self.collect == "during_training":
                for total, batch in zip(collected, class_sums(feats_BK.detach().float(), labels, classes), strict=True):
                    total += batch
            return losses

        metrics = fit_epochs(session, step)
        if self.collect == "during_training":
            means_CK, counts_C = collected[0] / collected[1].clamp(min=1).unsqueeze(1), collected[1]
        else:
            means_CK, counts_C = class_prototypes(model, session.all_train_batches(), classes)
        prototypes = self._pack(means_CK.cpu(), counts_C.cpu())
        return Upload(session.node.partition, session.download.round, prototypes, metrics)

    def _pack(self, means_CK: Tensor, counts_C: Tensor) -> PrototypeSet | None:
        """Return the prototypes of the classes with samples; None for a client without any."""
        ids = counts_C.nonzero().flatten()
        if not len(ids):
            return None
        return PrototypeSet(ids, means_CK[ids].contiguous(), counts_C[ids] if self.share_counts else None)
