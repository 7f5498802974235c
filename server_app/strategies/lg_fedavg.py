"""Server half of LG-FedAvg: average the clients' heads. Mathematics: ``task/methods/lg_fedavg.py``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator

from server_app.contributions import gather_weights, inspect_weights
from server_app.strategies.base import RoundStrategy, State
from task.messages import Shared, Upload
from task.methods.lg_fedavg import average_heads
from task.models.heads import first_head, require_equal_heads
from task.schema import Config


@dataclass
class LgFedAvg(RoundStrategy):
    """One global head.

    Parameters
    ----------
    weighting : str
        ``examples``: clients weigh by their training samples n_i. ``uniform``: all alike, as in the authors' code.
    """

    weighting: Literal["examples", "uniform"] = "examples"

    uploads: ClassVar[frozenset[str]] = frozenset({"weights"})

    def check(self, config: Config) -> None:
        """Refuse unequal heads, too."""
        super().check(config)
        require_equal_heads(config.model, config.algorithm.name)

    def init_state(self, num_classes: int, width: int, rng: Generator) -> State:
        """Return a fresh head, the state being the head itself."""
        return first_head(self.run.config.model, num_classes, rng)

    def downlink(self, state: State) -> Shared:
        """Return the global head."""
        return Shared(weights=state)

    def inspect(self, state: State, upload: Upload) -> None:
        """Refuse another head than the global one's kind, and one without the number of samples that weighs it."""
        inspect_weights(upload, state, self.weighting)

    def absorb(
        self, state: State, uploads: Sequence[Upload], rng: Generator, device: torch.device
    ) -> tuple[State, dict[str, float]]:
        """Average what came; a round without heads changes nothing."""
        heads, weights = gather_weights(uploads, self.weighting)
        return average_heads(heads, weights) if heads else state, {"heads_received": float(len(heads))}
