"""Client half of methods that train with cross-entropy alone."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from client_app.loop import fit_epochs
from client_app.session import Session
from client_app.trainers.base import Trainer
from task.messages import Upload


@dataclass
class SupervisedTrainer(Trainer):
    """Local training on the client's own labels; it has no settings."""

    def fit(self, session: Session) -> Upload:
        """Train and return the mean loss only."""

        def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": functional.cross_entropy(session.model(images), labels)}

        return Upload(session.node.partition, session.download.round, metrics=fit_epochs(session, step))
