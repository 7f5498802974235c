"""Client half of FedKD: private teacher and shared student learn from each other; uploads the student compressed."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from client_app.loop import Learner, fit_epochs
from client_app.session import Session
from client_app.trainers.base import Trainer
from task.averaging import labelled, part
from task.messages import Upload
from task.methods.fedkd import (
    CHANGE,
    MODEL,
    Compression,
    apply_change,
    change,
    compress,
    decompress,
    distillation_losses,
)
from task.models.split import weights_of
from task.schema import require
from task.seeding import torch_stream

HELD, ALIGNMENT = "held/", "alignment.weight"


@dataclass
class FedKDTrainer(Compression, Trainer):
    """Local objective ``CE + (KL + MSE) / (sum of both CE)`` of teacher and student, summed.

    Parameters
    ----------
    student_lr : float or None
        Learning rate of the student; None means ``train.lr``, that of the teacher and of W^h.
    kl : str
        ``batchmean`` (the paper) or ``mean`` (public code, weaker by the factor C).
    clip : float or None
        Largest norm of the gradients of teacher, student and W^h, each by itself; None does not clip.
    least_divisor : float
        Least value of the sum of both CE as a divisor.
    detach_divisor : bool
        Whether that sum is taken as given, or lets gradients through as in both public codes. Given, it fits faster,
        and at high learning rates needs ``clip`` and a ``least_divisor`` near 1, else it diverges.
    """

    student_lr: float | None = 0.01
    kl: Literal["batchmean", "mean"] = "batchmean"
    clip: float | None = None
    least_divisor: float = 1e-6
    detach_divisor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("student_lr", "clip"):
            value = getattr(self, name)
            require(value is None or 0 < value < float("inf"), name, value, "null, or a finite number above 0")
        require(0 < self.least_divisor < float("inf"), "least_divisor", self.least_divisor, "finite, above 0")

    def fit(self, session: Session) -> Upload:
        """Train teacher, student and W^h; return the student, or nothing where there was nothing to train on."""
        received = self._receive(session)
        teacher, student, alignment = session.model, session.auxiliary(received), self._alignment(session)

        def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            teacher_BK, student_BK = teacher.features(images), student.features(images)
            teacher_loss, student_loss = distillation_losses(
                teacher.head(teacher_BK).float(),
                student.head(student_BK).float(),
                teacher_BK.float(),
                alignment(student_BK).float(),
                labels,
                kl=self.kl,
                least_divisor=self.least_divisor,
                detach_divisor=self.detach_divisor,
            )
            return {"loss": teacher_loss, "student_loss": student_loss}

        beside = [Learner(student, self.student_lr), Learner(alignment)]
        metrics = fit_epochs(session, step, beside, self.clip)
        session.kept = {ALIGNMENT: alignment.weight.detach().cpu()}
        if self.what == "update":  # what the next change of the global student adds to
            session.kept |= labelled(HELD, received)
        weights = self._pack(session, weights_of(student), received) if metrics else None
        return Upload(session.node.partition, session.download.round, weights=weights, metrics=metrics)

    def _receive(self, session: Session) -> dict[str, Tensor]:
        """Return the global student: as it came, or as the change that came makes it of the one held."""
        sent = session.download.weights or {}
        difference = part(CHANGE, sent)
        if not difference:
            return decompress(part(MODEL, sent), session.auxiliary_shapes(), self.svd, "server")
        held = part(HELD, session.kept)
        if not held:
            raise ValueError(f"client {session.node.partition}: the server sent a change of a model it never had")
        return apply_change(held, decompress(difference, held, self.svd, "server"))

    def _pack(self, session: Session, trained: dict[str, Tensor], received: dict[str, Tensor]) -> dict[str, Tensor]:
        energy = self.energy(session.download.round, session.config.federation.rounds)
        sent = change(trained, received) if self.what == "update" else trained
        return labelled(self.label, compress(sent, energy, self.svd))

    def _alignment(self, session: Session) -> nn.Linear:
        """Return W^h: the client's own, from a stream of its own in its first round."""
        width = session.config.model.feature_dim
        alignment = nn.Linear(width, width, bias=False, device="meta")
        weight = session.kept.get(ALIGNMENT)
        if weight is None:
            bound = width**-0.5  # torch's own default
            rng = torch_stream(session.config.seed, "alignment", session.node.partition)
            weight = torch.empty(width, width).uniform_(-bound, bound, generator=rng)
        alignment.weight = nn.Parameter(weight.to(session.device))
        return alignment
