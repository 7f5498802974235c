"""What the methods share whose clients all train one global model, which is what is sent, averaged and tested."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Generator, Tensor

from server_app.central import CentralTest, require_unseen
from server_app.contributions import inspect_weights
from server_app.demands import labelled_alone
from server_app.strategies.base import RoundStrategy, Run, State
from task.averaging import labelled, part
from task.messages import EvaluationReport, Shared, Upload
from task.models.split import weights_of
from task.schema import Config, require

MODEL = "model/"
TAIL = 250
"""The number of last rounds over which the summary tells how much the accuracy varies."""


@dataclass
class GlobalModel(RoundStrategy):
    """One model for everybody; its tensors are the part ``model/`` of the state. Clients keep no model of their own.

    With ``algorithm.evaluation=server`` it is tested on the source's own test split by the server, and else on every
    client's test split. A round has as many clients as ``federation.participation`` says; where clients without labels
    are left out, or wait (``labels.warmup_rounds``), at most all that have labels.
    """

    has_global_model: ClassVar[bool] = True
    uploads: ClassVar[frozenset[str]] = frozenset({"weights"})

    def check(self, config: Config) -> None:
        """Refuse several architectures, and a server's test on images that clients train on, too."""
        super().check(config)
        one = f"{config.algorithm.name} has one global model: a group with one entry and one head, such as model=cnn4"
        require(len(config.model.entries) == 1, "model", config.model.name, one)
        require(len(config.model.heads) == 1, "model.heads", config.model.heads, one)
        require(config.model.auxiliary is None, "model.auxiliary", config.model.auxiliary, f"null, since {one}")
        if config.algorithm.evaluation == "server":
            require_unseen(config)

    def bind(self, run: Run) -> None:
        """Take the run, and the server's test images where it is the server that tests."""
        super().bind(run)
        self._central_confusion: Tensor | None = None
        central = run.config.algorithm.evaluation == "server"
        self.central = CentralTest(run.config, run.roster.class_names, run.device) if central else None

    def init_state(self, num_classes: int, width: int, rng: Generator) -> State:
        """Return the weights of a fresh model."""
        return labelled(MODEL, weights_of(self.run.auxiliary()))

    def downlink(self, state: State) -> Shared:
        """Return the global model."""
        return Shared(weights=part(MODEL, state))

    def evaluation_downlink(self, state: State) -> Shared:
        """Return the global model, all that a test needs."""
        return Shared(weights=part(MODEL, state))

    def inspect(self, state: State, upload: Upload) -> None:
        """Refuse another model than the global one, and one without the number of samples that trained it."""
        inspect_weights(upload, part(MODEL, state), "examples")

    def candidates(self) -> list[int]:
        """Return the clients that can be sampled: those with labels alone where the others are left out, or wait."""
        everybody = super().candidates()
        if not labelled_alone(self.run.config, self.run.done + 1):
            return everybody
        return [partition for partition in everybody if partition in self.run.roster.labelled]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nobody when it is the server that tests."""
        return super().configure_evaluate(server_round, arrays, config, grid) if self.central is None else []

    def scores(self, reports: Sequence[EvaluationReport]) -> dict[str, Any]:
        """Return the accuracy of the global model on the server's test images, where it is the server that tests."""
        fields = super().scores(reports)
        if self.central is None or not self.run.config.federation.evaluates(self._row["round"]):
            return fields
        model = self.run.auxiliary()
        model.load_state_dict(part(MODEL, self.run.state))
        found = self.central.accuracy(model)
        if self.run.may_end_with(self._row["round"]):
            self._central_confusion = found.confusion
        return fields | {"accuracy": found.by_head, "accuracy_head": found.by_head, "loss": found.loss}

    def confusion(self, reports: Sequence[EvaluationReport]) -> Tensor | None:
        """Return the server's own confusion matrix, where it is the server that tests."""
        return self._central_confusion if self.central is not None else super().confusion(reports)

    def facts(self) -> dict[str, Any]:
        """Return whose accuracy it is, how it varied over the last rounds, and how many clients have labels."""
        found = [row["accuracy"] for row in self.run.recorder.rows[-TAIL:] if row["accuracy"] is not None]
        n, total = len(self.run.roster.labelled), len(self.run.roster)
        averaging = {"accuracy_averaging": "test samples"} if self.central else {}
        return averaging | {
            "accuracy_model": "global",
            "tail_rounds": len(found),
            "tail_accuracy_mean": float(np.mean(found)) if found else None,
            "tail_accuracy_std": float(np.std(found)) if found else None,
            "labelled_clients": n,
            "unlabelled_clients": total - n,
        }

    def labelled_of(self, uploads: Sequence[Upload]) -> list[bool]:
        """Tell of each upload whether its client has labels."""
        return [upload.partition in self.run.roster.labelled for upload in uploads]
