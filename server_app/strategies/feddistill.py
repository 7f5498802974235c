"""Server half of FD (FedDistill): average outputs by class. Mathematics: ``task/methods/feddistill.py``."""

from collections.abc import Sequence
from dataclasses import dataclass
from logging import WARNING, getLogger
from typing import ClassVar, Literal

import torch
from torch import Generator

from server_app.strategies.base import RoundStrategy, State
from task.messages import PrototypeSet, Shared, Upload
from task.methods.feddistill import average_outputs, require_probabilities

LOG = getLogger("flwr")


@dataclass
class FedDistill(RoundStrategy):
    """Mean outputs of each class, with the number of clients in each mean and the round in which it was made.

    Parameters
    ----------
    target : str
        As on the client. With ``probabilities`` a client that sends anything else is refused.
    forget : bool
        Whether classes that nobody sent this round lose their mean (the public code) or keep the last one.
    """

    target: Literal["probabilities", "softmax_of_mean_logits", "mse_logits", "raw_logits"] = "probabilities"
    forget: bool = False

    uploads: ClassVar[frozenset[str]] = frozenset({"prototypes"})

    def shared_width(self, num_classes: int, feature_dim: int) -> int:
        """Return C, the width of an output."""
        return num_classes

    def init_state(self, num_classes: int, width: int, rng: Generator) -> State:
        """Return a state in which no class has a mean."""
        none = torch.zeros(num_classes, dtype=torch.int64)
        return {"means_CC": torch.zeros(num_classes, num_classes), "holders_C": none, "rounds_C": none.clone()}

    def downlink(self, state: State) -> Shared:
        """Return the means that exist with their numbers of clients and rounds; nothing before the first.

        The round tells a client whether its own outputs are in the mean: they are if that is when it last sent any.
        """
        ids = state["holders_C"].nonzero().flatten()
        if not len(ids):
            return Shared()
        means = PrototypeSet(ids, state["means_CC"][ids], state["holders_C"][ids])
        return Shared(means, {"rounds": state["rounds_C"][ids]})

    def evaluation_downlink(self, state: State) -> Shared:
        """Return nothing: a client is tested with its own head."""
        return Shared()

    def inspect(self, state: State, upload: Upload) -> None:
        """Refuse rows that are no probabilities where the targets are made of them."""
        if upload.prototypes is not None and self.target == "probabilities":
            require_probabilities(f"client {upload.partition}", upload.prototypes.vectors)

    def absorb(
        self, state: State, uploads: Sequence[Upload], rng: Generator, device: torch.device
    ) -> tuple[State, dict[str, float]]:
        """Average what came, class by class; a round without outputs changes nothing."""
        sets = [upload.prototypes for upload in uploads if upload.prototypes is not None]
        sent_NC = torch.cat([each.vectors for each in sets]) if sets else torch.zeros(0, 1)
        if not len(sent_NC):
            return state, {"outputs_received": 0.0}
        classes_N = torch.cat([each.class_ids for each in sets])
        means_CC, holders_C = average_outputs(sent_NC, classes_N, len(state["holders_C"]))
        came_C = holders_C > 0
        rounds_C = torch.where(came_C, uploads[0].round, 0)
        if not self.forget:
            means_CC = torch.where(came_C.unsqueeze(1), means_CC, state["means_CC"])
            holders_C = torch.where(came_C, holders_C, state["holders_C"])
            rounds_C = torch.where(came_C, rounds_C, state["rounds_C"])
        new = {"means_CC": means_CC, "holders_C": holders_C, "rounds_C": rounds_C}
        return new, {"outputs_received": float(len(sent_NC))}

    def summary(self) -> None:
        """Log who takes part, and a warning where the loss has no lower bound."""
        super().summary()
        if self.target == "raw_logits":
            LOG.log(WARNING, "algorithm.client.target=raw_logits: the loss is unbounded below, training will diverge")
