"""Server half of FML: average the shared models. Mathematics: ``task/methods/fml.py``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator

from server_app.strategies.base import RoundStrategy, State
from task.averaging import client_weight, require_alike, weighted_mean
from task.messages import Shared, Upload
from task.models.split import weights_of
from task.schema import Config, require


@dataclass
class FML(RoundStrategy):
    """One global meme model, the auxiliary model of the model group.

    Parameters
    ----------
    weighting : str
        ``uniform`` (paper) or ``examples``: clients weigh by their training samples n_i.
    """

    weighting: Literal["uniform", "examples"] = "uniform"

    def check(self, config: Config) -> None:
        """Refuse inference by prototypes, of which there are none."""
        rule = config.algorithm.inference
        require(rule == "head", "algorithm.inference", rule, "head: fml has no prototypes")

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
        if upload.weights is not None:  # a client that trained nothing sends none
            who = f"client {upload.partition}"
            require_alike(who, upload.weights, state)
            client_weight(who, upload.examples, self.weighting)

    def absorb(
        self, state: State, uploads: Sequence[Upload], rng: Generator, device: torch.device
    ) -> tuple[State, dict[str, float]]:
        """Average what came; a round without models changes nothing."""
        senders = [upload for upload in uploads if upload.weights is not None]
        models = [upload.weights for upload in uploads if upload.weights is not None]
        metrics = {"models_received": float(len(models))}
        if not models:
            return state, metrics
        weights = [client_weight(f"client {each.partition}", each.examples, self.weighting) for each in senders]
        return weighted_mean(models, weights), metrics
