"""Client half of FedAvg, FedProx, their forms with FixMatch, and FedConsist."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from client_app.loop import Step, fit_epochs
from client_app.session import Session
from client_app.trainers.global_model import Beliefs, GlobalModelTrainer, supervised_loss
from task.messages import Upload
from task.methods.fixmatch import pseudo_labels, unlabelled_loss
from task.schema import require


@dataclass
class FixMatchTrainer(GlobalModelTrainer):
    """Local objective CE with labels, FixMatch's loss without, both with FedProx's term.

    Parameters
    ----------
    view : str
        What a client with labels trains on: ``plain`` images as they are, or a ``weak`` view of each.
    threshold : float or None
        tau, from which confidence on a pseudo-label is trusted; None for methods that need labels everywhere.
    unlabelled_rate : float
        Factor on the learning rate of clients without labels.
    """

    view: Literal["plain", "weak"] = "weak"
    threshold: float | None = None
    unlabelled_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.threshold is None or self.threshold >= 0, "threshold", self.threshold, "null, or at least 0")
        rate = self.unlabelled_rate
        require(0 < rate < float("inf"), "unlabelled_rate", rate, "a finite number above 0")

    def fit(self, session: Session) -> Upload:
        """Train the global model and return it."""
        self.take_up(session)
        if session.is_labelled:
            metrics = fit_epochs(session, self._supervised(session), raw=self.view == "weak")
            return self.upload(session, metrics)
        if self.threshold is None:
            raise ValueError(f"client {session.node.partition} has no labels: algorithm.client.threshold is needed")
        beliefs = Beliefs()
        rate = self.unlabelled_rate * session.config.train.lr
        metrics = fit_epochs(session, self._fixmatch(session, beliefs, self.threshold), lr=rate, raw=True)
        return self.upload(session, metrics | beliefs.metrics(session.truth()))

    def _supervised(self, session: Session) -> Step:
        views, regularised = self.view_maker(session), self.proximal_regulariser(session)

        def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            seen = views(images, "weak") if self.view == "weak" else images
            return regularised({"loss": supervised_loss(session.model(seen), labels)})

        return step

    def _fixmatch(self, session: Session, beliefs: Beliefs, threshold: float) -> Step:
        views, regularised = self.view_maker(session), self.proximal_regulariser(session)

        def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            weak_BC, strong_BC = session.model(views(images, "weak+strong")).float().chunk(2)
            targets = pseudo_labels(weak_BC, threshold)
            beliefs.note(targets)
            # A constant where nothing is trusted, so that such a batch moves nothing (client_app/loop.py).
            loss = unlabelled_loss(strong_BC, targets) if targets.trusted_B.any() else weak_BC.new_zeros(())
            return regularised({"unlabelled_loss": loss})

        return step
