"""Client half of RSCFed: cross-entropy with labels, a mean teacher without; the teacher stays on the client."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from client_app.loop import fit_epochs
from client_app.session import Session
from client_app.trainers.global_model import Beliefs, GlobalModelTrainer, Views, supervised_loss
from task.averaging import labelled, part
from task.messages import Upload
from task.methods.fixmatch import pseudo_labels
from task.methods.rscfed import TRAININGS, consistency_loss, model_label, update_teacher
from task.models.split import SplitModel, weights_of
from task.schema import require

TEACHER, MOMENTUM, STEPS = "teacher/", "momentum/", "steps"


@dataclass
class RSCFedTrainer(GlobalModelTrainer):
    """Local objective CE of a weak view, or the teacher's sharpened answer to one weak view as target of another.

    Parameters
    ----------
    consistency : float
        Weight of the loss of clients without labels.
    unlabelled_rate : float
        Factor on their learning rate.
    limit : float
        The largest alpha of the teacher's moving average.
    carry_momentum : bool
        Whether a client's optimiser goes on with its momentum from training to training.
    threshold : float
        Confidence from which the teacher's answers count as sure; it is only recorded.
    """

    consistency: float = 0.02
    unlabelled_rate: float = 0.7
    limit: float = 0.999
    carry_momentum: bool = True
    threshold: float = 0.9

    keeps_state: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("consistency", "threshold"):
            require(0 <= getattr(self, name) < float("inf"), name, getattr(self, name), "a finite number of at least 0")
        rate = self.unlabelled_rate
        require(0 < rate < float("inf"), "unlabelled_rate", rate, "a finite number above 0")
        require(0 <= self.limit < 1, "limit", self.limit, "from 0 to below 1")

    def fit(self, session: Session) -> Upload:
        """Train the global model as often as the server says, each time from the start; return all results."""
        received = dict(session.download.weights or {})
        trainings = received.pop(TRAININGS, None)
        if trainings is None or trainings.numel() != 1 or int(trainings) < 1:
            raise ValueError(f"server sent {TRAININGS}={trainings}: one number of at least 1 is needed")
        views, beliefs = self.view_maker(session), Beliefs()
        found, models = list[dict[str, float]](), dict[str, Tensor]()
        train = self._supervised if session.is_labelled else self._consistent
        for number in range(int(trainings)):
            session.model = session.auxiliary(received)
            found.append(train(session, views, beliefs))
            models |= labelled(model_label(number), weights_of(session.model))
        metrics = {name: sum(each[name] for each in found) / len(found) for name in found[0]}
        metrics |= beliefs.metrics(session.truth())
        examples = len(session.split.train)
        sent: dict[str, Any] = {"weights": models, "examples": examples, "metrics": metrics} if examples else {}
        return Upload(session.node.partition, session.download.round, **sent)

    def _supervised(self, session: Session, views: Views, beliefs: Beliefs) -> dict[str, float]:
        """Train the session's model with labels."""
        momentum, regularised = part(MOMENTUM, session.kept), self.proximal_regulariser(session)

        def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return regularised({"loss": supervised_loss(session.model(views(images, "weak")), labels)})

        metrics = fit_epochs(session, step, raw=True, momentum=momentum if self.carry_momentum else None)
        session.kept = labelled(MOMENTUM, momentum)
        return metrics

    def _consistent(self, session: Session, views: Views, beliefs: Beliefs) -> dict[str, float]:
        """Train the session's model towards the client's teacher, which follows it."""
        momentum, regularised = part(MOMENTUM, session.kept), self.proximal_regulariser(session)
        teacher, student, steps = self._teacher(session), session.model, int(session.kept.get(STEPS, torch.tensor(0)))

        def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            one, two = views(images, "weak+weak").chunk(2)
            with torch.no_grad():
                teacher_BC = teacher(one).float()
            beliefs.note(pseudo_labels(teacher_BC, self.threshold))
            loss = consistency_loss(student(two).float(), teacher_BC, session.config.train.batch_size)
            return regularised({"unlabelled_loss": self.consistency * loss})

        def follow() -> None:
            nonlocal steps
            update_teacher(teacher, student, steps, limit=self.limit)
            steps += 1

        metrics = fit_epochs(
            session,
            step,
            lr=self.unlabelled_rate * session.config.train.lr,
            raw=True,
            after_step=follow,
            momentum=momentum if self.carry_momentum else None,
        )
        session.kept = labelled(TEACHER, weights_of(teacher)) | labelled(MOMENTUM, momentum)
        session.kept[STEPS] = torch.tensor(steps)
        return metrics

    def _teacher(self, session: Session) -> SplitModel:
        """Return the client's teacher, in eval mode; the first time it is the global model."""
        held = part(TEACHER, session.kept)
        return session.auxiliary(held or weights_of(session.model)).eval()
