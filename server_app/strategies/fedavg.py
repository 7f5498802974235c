"""Server half of FedAvg and of all methods that differ from it on the clients: a weighted mean of their models.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, arXiv:1602.05629, algorithm 1. FedConsist's weights: ``task/methods/fedconsist.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator

from server_app.contributions import gather_weights, group_share
from server_app.strategies.base import State
from server_app.strategies.global_model import MODEL, GlobalModel
from task.averaging import labelled, weighted_mean
from task.messages import Upload
from task.methods.fedconsist import group_weights
from task.schema import Config, require


@dataclass
class FedAvg(GlobalModel):
    """Clients weigh by their training samples N_i.

    Parameters
    ----------
    labelled_share : float or None
        The share of the new model that the round's labelled clients make up together (FedConsist); None is FedAvg,
        in which they have no share of their own.
    """

    labelled_share: float | None = None

    def __post_init__(self) -> None:
        share = self.labelled_share
        require(share is None or 0 <= share <= 1, "labelled_share", share, "null, or from 0 to 1")

    def check(self, config: Config) -> None:
        """Refuse to train clients without labels by no rule, too."""
        super().check(config)
        rule = config.algorithm.client.get("threshold")
        needed = config.algorithm.unlabelled == "trained"
        require(rule is not None or not needed, "algorithm.client.threshold", rule, "a number, to train without labels")

    def absorb(
        self, state: State, uploads: Sequence[Upload], rng: Generator, device: torch.device
    ) -> tuple[State, dict[str, float]]:
        """Average what came; a round without models changes nothing."""
        senders = [upload for upload in uploads if upload.weights is not None]
        metrics = {"models_received": float(len(senders))}
        if not senders:
            return state, metrics
        models, weights = gather_weights(senders, "examples")
        own = self.labelled_of(senders)
        if self.labelled_share is not None:
            weights = group_weights([upload.examples or 0 for upload in senders], own, self.labelled_share)
        metrics["labelled_weight"] = group_share(weights, own)
        return labelled(MODEL, weighted_mean(models, weights, counters="heaviest")), metrics
