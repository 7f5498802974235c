"""One run as the server sees it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from server_app.privacy import PrivacyLedger
from server_app.recorder import PrototypesByClient, Recorder
from server_app.roster import Roster
from task.messages import PrototypeSet
from task.models.assign import build_auxiliary
from task.models.split import SplitModel
from task.schema import Config
from task.stopping import may_stop_next

State = dict[str, Tensor]
"""What a method's server knows from one round to the next, as named tensors."""


@dataclass
class Run:
    """One run as a strategy sees it: who, where, and how far it is."""

    config: Config
    roster: Roster
    recorder: Recorder
    session: str
    device: torch.device
    done: int = 0
    state: State = field(default_factory=dict)
    state_rounds: dict[int, int] = field(default_factory=dict)
    client_prototypes: PrototypesByClient = field(default_factory=dict)
    privacy: PrivacyLedger | None = None

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.roster.class_names)

    def auxiliary(self) -> SplitModel:
        """Return the extra model that some methods share, with its first weights."""
        shape, seed = self.roster.image_shape, self.config.seed
        return build_auxiliary(self.config.model, num_classes=self.num_classes, image_shape=shape, seed=seed)

    @property
    def judged_rows(self) -> list[dict[str, Any]]:
        """The lines of the rounds that early stopping looks at: those after the warm-up."""
        return [row for row in self.recorder.rows if row["round"] > self.config.labels.warmup_rounds]

    def may_end_with(self, number: int) -> bool:
        """Tell whether the run can end with round ``number``, which has not been evaluated yet."""
        federation = self.config.federation
        return number == federation.rounds or may_stop_next(self.judged_rows, federation.stop_after)

    def note_prototypes(self, number: int, shared: PrototypeSet | None) -> None:
        """Keep the prototypes of round ``number`` for the report, if it is one of ``federation.snapshots``."""
        federation = self.config.federation
        if number < federation.rounds and federation.keeps_prototypes(number):
            self.recorder.write_snapshot(number, shared, self.client_prototypes)
