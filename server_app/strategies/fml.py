"""Server half of FML: average the shared models. Mathematics: ``task/methods/fml.py``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator

from server_app.contributions import gather_weights, inspect_weights
from server_app.strategies.base import RoundStrategy, State
from task.averaging import weighted_mean
from task.messages import Shared, Upload
from task.models.split import weights_of


@dataclass
class FML(RoundStrategy):
    """One global meme model, the auxiliary model of the model group.

    Parameters
    ----------
    weighting : str
        ``uniform`` (paper) or ``examples``: clients weigh by their training samples n_i.
    """

    weighting: Literal["uniform", "examples"] = "uniform"

    uploads: ClassVar[frozenset[str]] = frozenset({"weights"})

    def init_state(self, num_classes: int, width: int, rng: Generator) -> State:
        """Return the weights of a fresh shared model, the state being nothing else."""
        return weights_of(self.run.auxiliary())

    def downlink(self, state: State) -> Shared:
        """Return the shared model."""
        return Shared(weights=state)

    def evaluation_downlink(self, state: State) -> Shared:
        """Return nothing: a client is tested with its private model."""
        return Shared()

    def inspect(self, state: State, upload: Upload) -> None:
        """Refuse another model than the shared one, and one without the number of samples that weighs it."""
        inspect_weights(upload, state, self.weighting)

    def absorb(
        self, state: State, uploads: Sequence[Upload], rng: Generator, device: torch.device
    ) -> tuple[State, dict[str, float]]:
        """Average what came; a round without models changes nothing."""
        models, counts = gather_weights(uploads, self.weighting)
        return weighted_mean(models, counts) if models else state, {"models_received": float(len(models))}
