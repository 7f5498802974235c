"""Client half of LG-FedAvg: cross-entropy from the global head on; uploads the head."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional

from client_app.loop import fit_epochs
from client_app.session import Session
from client_app.trainers.base import HeadTrainer
from task.messages import Upload


@dataclass
class LgFedAvgTrainer(HeadTrainer):
    """Local objective ``CE``, both parts of the model trained together.

    Parameters
    ----------
    weighting : str
        As on the server; with ``examples`` the number of training samples is sent.
    """

    weighting: Literal["examples", "uniform"] = "examples"

    def fit(self, session: Session) -> Upload:
        """Take up the global head, train, and return the head."""
        self.take_up_head(session)

        def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": functional.cross_entropy(session.model(images), labels)}

        return self.upload_head(session, fit_epochs(session, step), tell_size=self.weighting == "examples")
