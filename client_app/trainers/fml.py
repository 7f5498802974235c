"""Client half of FML: the private and the shared model learn from each other; uploads the shared one."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from client_app.loop import Learner, fit_epochs
from client_app.session import Session
from client_app.trainers.base import Trainer
from task.messages import Upload
from task.methods.fml import mutual_losses
from task.models.split import weights_of
from task.schema import require


@dataclass
class FMLTrainer(Trainer):
    """Two local objectives, each ``weight * CE + (1 - weight) * KL`` to the other model's output.

    Parameters
    ----------
    alpha, beta : float
        Weights of the labels for the private and for the shared model.
    kl : str
        ``batchmean`` (the paper) or ``mean`` (public code, weaker by the factor C).
    detach : bool
        Whether each model takes the other's output as given.
    clip : float or None
        Largest norm of each model's gradient; None does not clip.
    weighting : str
        As on the server; with ``examples`` the number of training samples is sent.
    """

    alpha: float = 0.5
    beta: float = 0.5
    kl: Literal["batchmean", "mean"] = "batchmean"
    detach: bool = True
    clip: float | None = None
    weighting: Literal["uniform", "examples"] = "uniform"

    def __post_init__(self) -> None:
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "from 0 to 1")
        require(0 <= self.beta <= 1, "beta", self.beta, "from 0 to 1")
        require(self.clip is None or self.clip > 0, "clip", self.clip, "null, or above 0")

    def fit(self, session: Session) -> Upload:
        """Train both models and return the shared one; nothing where there was nothing to train on."""
        private, shared = session.model, session.auxiliary(session.download.weights)

        def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            loss, shared_loss = mutual_losses(
                private(images).float(),
                shared(images).float(),
                labels,
                alpha=self.alpha,
                beta=self.beta,
                kl=self.kl,
                detach=self.detach,
            )
            return {"loss": loss, "shared_loss": shared_loss}

        metrics = fit_epochs(session, step, [Learner(shared)], self.clip)
        partition, number = session.node.partition, session.download.round
        if not metrics:
            return Upload(partition, number)
        examples = len(session.split.train) if self.weighting == "examples" else None
        return Upload(partition, number, weights=weights_of(shared), examples=examples, metrics=metrics)
