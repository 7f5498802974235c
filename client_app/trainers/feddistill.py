"""Client half of FD (FedDistill): cross-entropy plus the distance to what the other clients answer for the class."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from client_app.loop import fit_epochs
from client_app.session import Session
from client_app.trainers.base import Trainer
from task.messages import PrototypeSet, Upload
from task.methods.feddistill import distillation_loss, leave_own_out, make_targets, shared_outputs
from task.metrics import class_averages
from task.schema import require


@dataclass
class FedDistillTrainer(Trainer):
    """Local objective ``CE + weight * distillation``; uploads the mean output of each class that the client holds.

    Parameters
    ----------
    weight : float
        gamma of the paper.
    target : str
        ``probabilities``: the mean softmax vector. ``softmax_of_mean_logits``: the softmax of the mean logits.
        ``mse_logits``: mean logits under a squared error. ``raw_logits``: mean logits as if they were probabilities,
        which diverges; only to show that.
    leave_one_out : bool
        Whether the client's own output is taken out of its targets, as the paper has it.
    """

    weight: float = 1.0
    target: Literal["probabilities", "softmax_of_mean_logits", "mse_logits", "raw_logits"] = "probabilities"
    leave_one_out: bool = True

    def __post_init__(self) -> None:
        require(0 <= self.weight < float("inf"), "weight", self.weight, "a finite number of at least 0")

    def shared_width(self, session: Session) -> int:
        """Return C, the width of an output."""
        return session.num_classes

    def fit(self, session: Session) -> Upload:
        """Train, then return the mean outputs, which are also kept: the next targets leave them out."""
        model, classes = session.model, session.num_classes
        distil = self._distil(session)

        def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits_BC = model(images).float()
            return {"loss": functional.cross_entropy(logits_BC, labels)} | distil(logits_BC, labels)

        metrics = fit_epochs(session, step)

        def outputs(images: Tensor) -> Tensor:
            return shared_outputs(model(images).float(), self.target)

        means_CC, counts_C = class_averages(model, outputs, session.all_train_batches(), classes, classes)
        ids = counts_C.cpu().nonzero().flatten()
        sent = PrototypeSet(ids, means_CC.cpu()[ids].contiguous()) if len(ids) else None
        session.kept = {} if sent is None else {"class_ids": sent.class_ids, "vectors": sent.vectors}
        return Upload(session.node.partition, session.download.round, sent, metrics=metrics)

    def _distil(self, session: Session) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
        """Return the term of the local objective that needs the others' outputs; none while there are none."""
        received = session.download.prototypes
        if received is None:
            return lambda logits_BC, labels: {}
        means_CC, known_C = received.dense(session.num_classes)
        if self.leave_one_out:
            means_CC, known_C = self._others(session, received, means_CC)
        targets_CC = make_targets(means_CC, self.target).to(session.device)
        known_C = known_C.to(session.device)

        def distil(logits_BC: Tensor, labels: Tensor) -> dict[str, Tensor]:
            loss = distillation_loss(logits_BC, labels, targets_CC, known_C, self.target)
            return {"distillation_loss": self.weight * loss}

        return distil

    def _others(self, session: Session, received: PrototypeSet, means_CC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means without what the client itself sent, and which classes others hold."""
        rounds = (session.download.weights or {}).get("rounds")
        if received.counts is None or rounds is None or rounds.shape != received.class_ids.shape:
            raise ValueError("server sent means without the counts and rounds that leave_one_out=true needs")
        holders_C, rounds_C = (torch.zeros(session.num_classes, dtype=torch.int64) for _ in range(2))
        holders_C[received.class_ids], rounds_C[received.class_ids] = received.counts, rounds
        own_CC, sent_C = torch.zeros_like(means_CC), torch.zeros(session.num_classes, dtype=torch.bool)
        if session.kept:
            own_CC, sent_C = PrototypeSet(session.kept["class_ids"], session.kept["vectors"]).dense(session.num_classes)
        # Whatever was kept was sent in the round of the client's state; a mean of another round does not hold it.
        return leave_own_out(means_CC, holders_C, own_CC, sent_C & (rounds_C == session.download.state_round))
