"""Server half of FedKD: average the students' changes, compressed. Mathematics: ``task/methods/fedkd.py``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Generator, Tensor

from server_app.strategies.base import RoundStrategy, State
from task.averaging import labelled, part, weighted_mean
from task.messages import Shared, Upload, parameters_in
from task.methods.fedkd import CHANGE, MODEL, Compression, apply_change, compress, decompress
from task.models.split import weights_of
from task.schema import Config, require


@dataclass
class FedKD(Compression, RoundStrategy):
    """One global student, the auxiliary model of the model group; its settings are those of ``Compression``.

    The state holds the student as it is sent (``model/``) and, with ``what=update``, its last change (``change/``).
    """

    uploads: ClassVar[frozenset[str]] = frozenset({"weights"})

    def check(self, config: Config) -> None:
        """Refuse halves that compress in two ways, too."""
        super().check(config)
        for name in ("what", "energy_start", "energy_end", "svd"):
            mine, theirs = getattr(self, name), config.algorithm.client.get(name)
            require(mine == theirs, f"algorithm.client.{name}", theirs, f"that of algorithm.server, {mine}")

    def init_state(self, num_classes: int, width: int, rng: Generator) -> State:
        """Return a fresh student."""
        return labelled(MODEL, weights_of(self.run.auxiliary()))

    def downlink(self, state: State) -> Shared:
        """Return the student."""
        return Shared(weights=labelled(MODEL, part(MODEL, state)))

    def evaluation_downlink(self, state: State) -> Shared:
        """Return nothing: a client is tested with its teacher."""
        return Shared()

    def personal(self, state: State, partition: int, shared: Shared) -> Shared:
        """Return the last change of the student alone to a client that trained the student before it."""
        difference = part(CHANGE, state)
        trained_last = self.run.state_rounds.get(partition) == self.run.done
        return (
            Shared(weights=labelled(CHANGE, difference)) if shared.weights and difference and trained_last else shared
        )

    def inspect(self, state: State, upload: Upload) -> None:
        """Refuse tensors or factors that do not make the student."""
        if upload.weights is not None:  # a client that trained nothing sends none
            self._open(upload)

    def meant(self, state: State, upload: Upload) -> Mapping[str, Tensor] | None:
        """Return the student that an upload makes, whether it is sent whole or as factors, or as a change."""
        if upload.weights is None:
            return None
        opened = self._open(upload)
        return opened if self.what == "params" else apply_change(part(MODEL, state), opened)

    def absorb(
        self, state: State, uploads: Sequence[Upload], rng: Generator, device: torch.device
    ) -> tuple[State, dict[str, float]]:
        """Average what came and compress the mean; a round without students changes nothing."""
        senders = [upload for upload in uploads if upload.weights is not None]
        metrics = {"models_received": float(len(senders))}
        if not senders:
            return labelled(MODEL, part(MODEL, state)), metrics
        mean = weighted_mean([self._open(upload) for upload in senders], [1.0] * len(senders))
        energy = self.energy(senders[0].round, self.run.config.federation.rounds)
        packed = compress(mean, energy, self.svd)
        sizes = [parameters_in(upload) for upload in senders]
        dense = parameters_in(Shared(weights=self._shapes))
        metrics |= {
            "energy": energy,
            "ratio_up": sum(sizes) / len(sizes) / dense,
            "ratio_down": parameters_in(Shared(weights=packed)) / dense,
        }
        if self.what == "params":
            return labelled(MODEL, packed), metrics
        # What the clients will add, not the mean itself: everybody must hold the same student.
        difference = decompress(packed, self._shapes, self.svd, "server")
        student = apply_change(part(MODEL, state), difference)
        return labelled(MODEL, student) | labelled(CHANGE, packed), metrics

    def _open(self, upload: Upload) -> dict[str, Tensor]:
        who, weights = f"client {upload.partition}", upload.weights or {}
        foreign = sorted(name for name in weights if not name.startswith(self.label))
        if foreign:
            raise ValueError(f"{who} sent weights.{foreign[0]}: names that begin with {self.label} are needed")
        return decompress(part(self.label, weights), self._shapes, self.svd, who)

    @cached_property
    def _shapes(self) -> dict[str, Tensor]:
        with torch.device("meta"):
            return dict(self.run.auxiliary().state_dict())
