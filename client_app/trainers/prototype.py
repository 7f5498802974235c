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
from task.losses import class_mean_distance, prototype_cross_entropy, sample_squared_error
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
    """Local objective ``CE + weight * distance + contrast_weight * prototype CE``; uploads class means of features.

    Parameters
    ----------
    weight : float
        lambda. It belongs to a distance: 0.1 to ``class_mean_l2`` (papers), 10 to ``sample_mse`` (public code).
    distance : str
        ``class_mean_l2``: mean over the classes of a batch of the Euclidean distance between the class mean and
        its global prototype. ``sample_mse``: mean squared error of every sample's feature, divided by K too.
    contrast_weight : float
        Weight of the cross-entropy over minus the distances to all global prototypes; 0 in the papers. With it the
        clients minimise the same kind of loss as FedTGP's server (``fedtgp_symmetric``).
    share_counts : bool
        Whether the number of samples behind each prototype is sent; FedTGP never does.
    collect : str
        ``after_training``: eval-mode features of the trained model over all local samples. ``during_training``:
        the features of the training passes themselves, as FedProto's public code has it.
    """

    weight: float = 0.1
    distance: Literal["class_mean_l2", "sample_mse"] = "class_mean_l2"
    contrast_weight: float = 0.0
    share_counts: bool = False
    collect: Literal["after_training", "during_training"] = "after_training"

    def __post_init__(self) -> None:
        for name in ("weight", "contrast_weight"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), name, value, "a finite number of at least 0")

    def fit(self, session: Session) -> Upload:
        """Train, then return the prototypes of the classes that the client holds."""
        model, classes = session.model, session.num_classes
        pull = self._pull(session)
        seen = (torch.zeros(classes, session.config.model.feature_dim), torch.zeros(classes, dtype=torch.int64))
        sums_CK, counts_C = (tensor.to(session.device) for tensor in seen)

        def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            feats_BK = model.features(images)
            losses = {"loss": functional.cross_entropy(model.head(feats_BK).float(), labels)}
            losses |= pull(feats_BK.float(), labels)
            if self.collect == "during_training":
                batch_sums, batch_counts = class_sums(feats_BK.detach().float(), labels, classes)
                sums_CK.add_(batch_sums)
                counts_C.add_(batch_counts)
            return losses

        metrics = fit_epochs(session, step)
        if self.collect == "during_training":
            means_CK = sums_CK / counts_C.clamp(min=1).unsqueeze(1)
        else:
            means_CK, counts_C = class_prototypes(model, session.all_train_batches(), classes)
        prototypes = PrototypeSet.of(means_CK, counts_C, share_counts=self.share_counts)
        return Upload(session.node.partition, session.download.round, prototypes, metrics=metrics)

    def _pull(self, session: Session) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
        """Return the terms of the local objective that need global prototypes; none while there are none."""
        received = session.download.prototypes
        if received is None:
            return lambda feats_BK, labels: {}
        protos_CK, known_C = (tensor.to(session.device) for tensor in received.dense(session.num_classes))
        distance = DISTANCES[self.distance]

        def pull(feats_BK: Tensor, labels: Tensor) -> dict[str, Tensor]:
            terms = {"prototype_loss": self.weight * distance(feats_BK, labels, protos_CK, known_C)}
            if self.contrast_weight:
                contrast = prototype_cross_entropy(feats_BK, labels, protos_CK, known_C)
                terms["contrast_loss"] = self.contrast_weight * contrast
            return terms

        return pull
