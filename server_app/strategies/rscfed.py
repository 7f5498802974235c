"""Server half of RSCFed: means of random subsets, and their mean. Mathematics: ``task/methods/rscfed.py``."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from server_app.contributions import group_share
from server_app.strategies.base import Run, State
from server_app.strategies.global_model import MODEL, GlobalModel
from task.averaging import client_weight, labelled, part, require_alike, weighted_mean
from task.messages import Shared, Upload
from task.methods.rscfed import TRAININGS, draw_subsets, model_label, sub_consensus
from task.schema import require
from task.seeding import stream


@dataclass
class RSCFed(GlobalModel):
    """A client trains once for every subset that it is drawn into, each time from the same global model.

    One message tells a client how often, and one reply brings all its models. A round takes M Q trainings.

    Parameters
    ----------
    subsets : int
        M.
    subset_size : int or None
        Q; None divides the clients of a round (``federation.participation``) by M, so that a round has as many
        trainings as one of the other methods.
    labelled_factor, labelled_scale, unlabelled_scale : float
        lam, and s of subsets with and without a labelled client.
    """

    subsets: int = 2
    subset_size: int | None = None
    labelled_factor: float = 6.0
    labelled_scale: float = 100.0
    unlabelled_scale: float = 10000.0

    def __post_init__(self) -> None:
        require(self.subsets >= 1, "subsets", self.subsets, "at least 1")
        require(
            self.subset_size is None or self.subset_size >= 1, "subset_size", self.subset_size, "null, or at least 1"
        )
        factor = self.labelled_factor
        require(0 < factor < float("inf"), "labelled_factor", factor, "a finite number above 0")
        for name in ("labelled_scale", "unlabelled_scale"):
            require(0 <= getattr(self, name) < float("inf"), name, getattr(self, name), "a finite number of at least 0")

    def bind(self, run: Run) -> None:
        """Take the run; it must have enough clients for a subset."""
        self.size = self.subset_size or max(1, run.config.federation.clients_a_round(len(run.roster)) // self.subsets)
        most = f"at most {len(run.roster)}, all clients"
        require(self.size <= len(run.roster), "algorithm.server.subset_size", self.size, most)
        super().bind(run)

    def _sample(self, number: int) -> list[int]:
        """Draw the subsets of a round, and return everybody in any of them."""
        rng = stream(self.run.config.seed, "sample", number)
        here = self.candidates()
        self.drawn = draw_subsets(here, self.subsets, min(self.size, len(here)), rng) if here else []
        return sorted({partition for subset in self.drawn for partition in subset})

    def downlink(self, state: State) -> Shared:
        """Return the global model, to be trained once."""
        return Shared(weights=part(MODEL, state) | {TRAININGS: torch.ones(1, dtype=torch.int64)})

    def personal(self, state: State, partition: int, shared: Shared) -> Shared:
        """Tell a client that trains how often."""
        if shared.weights is None or TRAININGS not in shared.weights:
            return shared
        return Shared(weights={**shared.weights, TRAININGS: torch.tensor([self._trainings(partition)])})

    def inspect(self, state: State, upload: Upload) -> None:
        """Refuse other models than one for each training, and those without the number of samples."""
        if upload.weights is not None:
            who, model, wanted = f"client {upload.partition}", part(MODEL, state), dict[str, Tensor]()
            for number in range(self._trainings(upload.partition)):
                wanted |= labelled(model_label(number), model)
            require_alike(who, upload.weights, wanted)
            client_weight(who, upload.examples, "examples")

    def absorb(
        self, state: State, uploads: Sequence[Upload], rng: Generator, device: torch.device
    ) -> tuple[State, dict[str, float]]:
        """Average every subset, then the subsets; those without a model are left out."""
        sent = {upload.partition: upload for upload in uploads if upload.weights is not None}
        used = dict.fromkeys(sent, 0)
        means, shares, trainings = [], [], 0
        for subset in self.drawn:
            members = [sent[partition] for partition in subset if partition in sent]
            if not members:
                continue
            own, models = self.labelled_of(members), []
            for member in members:
                models.append(part(model_label(used[member.partition]), member.weights or {}))
                used[member.partition] += 1
            mean, betas = sub_consensus(
                models,
                [member.examples or 0 for member in members],
                own,
                labelled_factor=self.labelled_factor,
                labelled_scale=self.labelled_scale,
                unlabelled_scale=self.unlabelled_scale,
            )
            means.append(mean)
            shares.append(group_share(betas, own))
            trainings += len(members)
        metrics = {"trainings": float(trainings)}
        if not means:
            return state, metrics
        metrics["labelled_weight"] = sum(shares) / len(shares)
        return labelled(MODEL, weighted_mean(means, [1.0] * len(means))), metrics

    def _trainings(self, partition: int) -> int:
        return sum(partition in subset for subset in self.drawn)
