"""Local training: the server sends and absorbs nothing. The lower line of every comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator

from server_app.strategies.base import RoundStrategy, State
from task.messages import Shared, Upload


@dataclass
class Local(RoundStrategy):
    """Server half of ``local``: it has no settings."""

    def init_state(self, num_classes: int, width: int, rng: Generator) -> State:
        """Return an empty state."""
        return {}

    def downlink(self, state: State) -> Shared:
        """Return nothing."""
        return Shared()

    def absorb(
        self, state: State, uploads: Sequence[Upload], rng: Generator, device: torch.device
    ) -> tuple[State, dict[str, float]]:
        """Return the state as it was."""
        return state, {}
