"""Server half of FedProto: average the clients' prototypes. Mathematics: ``task/methods/fedproto.py``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator

from server_app.strategies.base import RoundStrategy, State
from task.messages import PrototypeSet, Shared, Upload
from task.methods.fedproto import average_prototypes
from task.prototypes import smallest_gap
from task.schema import Config, require


@dataclass
class FedProto(RoundStrategy):
    """Averaged global prototypes.

    Parameters
    ----------
    aggregation : str
        ``weighted`` by sample counts, ``uniform``, or ``literal`` (the printed formula with its slip).
    forget : bool
        Whether classes that nobody sent this round lose their prototype (the public code) or keep the last one.
    """

    aggregation: Literal["weighted", "uniform", "literal"] = "weighted"
    forget: bool = False

    has_prototypes: ClassVar[bool] = True
    uploads: ClassVar[frozenset[str]] = frozenset({"prototypes"})

    def check(self, config: Config) -> None:
        """Refuse weighting by counts that the clients do not send."""
        super().check(config)
        counted = self.aggregation == "uniform" or bool(config.algorithm.client.get("share_counts"))
        allowed = "true, unless algorithm.server.aggregation=uniform"
        require(counted, "algorithm.client.share_counts", config.algorithm.client.get("share_counts"), allowed)

    def inspect(self, state: State, upload: Upload) -> None:
        """Refuse prototypes without the counts that weigh them."""
        if self.aggregation != "uniform" and upload.prototypes is not None and upload.prototypes.counts is None:
            raise ValueError(f"client {upload.partition} sent prototypes without counts")

    def init_state(self, num_classes: int, width: int, rng: Generator) -> State:
        """Return a state in which no class has a prototype."""
        return {"vectors": torch.zeros(num_classes, width), "known": torch.zeros(num_classes, dtype=torch.bool)}

    def downlink(self, state: State) -> Shared:
        """Return the prototypes that exist; nothing before the first."""
        ids = state["known"].nonzero().flatten()
        return Shared(PrototypeSet(ids, state["vectors"][ids])) if len(ids) else Shared()

    def absorb(
        self, state: State, uploads: Sequence[Upload], rng: Generator, device: torch.device
    ) -> tuple[State, dict[str, float]]:
        """Average what came, class by class; a round without prototypes changes nothing."""
        sets = [upload.prototypes for upload in uploads if upload.prototypes is not None]
        sets = [each for each in sets if len(each.class_ids)]
        if not sets:
            return state, {"prototypes_received": 0.0}
        vectors_NK = torch.cat([each.vectors for each in sets])
        classes_N = torch.cat([each.class_ids for each in sets])
        counts = [each.counts for each in sets if each.counts is not None]
        counts_N = torch.cat(counts) if len(counts) == len(sets) else None
        num_classes = len(state["known"])
        averages_CK, came_C = average_prototypes(vectors_NK, classes_N, counts_N, self.aggregation, num_classes)
        if not self.forget:
            averages_CK = torch.where(came_C.unsqueeze(1), averages_CK, state["vectors"])
            came_C = came_C | state["known"]
        gap = smallest_gap(averages_CK[came_C])
        metrics = {"prototypes_received": float(len(vectors_NK)), "smallest_gap": gap}
        return {"vectors": averages_CK, "known": came_C}, metrics
