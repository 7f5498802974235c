"""What every method's client half shares: the protocol, and evaluation by both rules."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from client_app.session import Session
from task.messages import EvaluationReport, Upload
from task.metrics import evaluate
from task.models.heads import read_head, replace_head


class Trainer(ABC):
    """A leaf is a dataclass of settings with ``fit``, whose step reads like the paper's local objective.

    ``keeps_model`` and ``keeps_state`` say whether the client keeps its model, and whether it keeps anything at all,
    from one message to the next.
    """

    keeps_model: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = True

    def shared_width(self, session: Session) -> int:
        """Return the width of the vectors that the method exchanges: K, unless a leaf says otherwise."""
        return session.config.model.feature_dim

    @abstractmethod
    def fit(self, session: Session) -> Upload:
        """Train the session's model on the client's data and return what the server gets."""

    def evaluate(self, session: Session) -> EvaluationReport:
        """Test the session's model by its head, and by nearest prototype where there are global prototypes."""
        prototypes = session.download.prototypes
        dense = prototypes.dense(session.num_classes) if prototypes is not None else (None, None)
        protos_CK, known_C = (None if tensor is None else tensor.to(session.device) for tensor in dense)
        tells_sizes = session.config.federation.report_sizes  # a confusion matrix says how many samples of which class
        tells = session.download.confusion and tells_sizes and session.config.privacy is None
        rule = session.config.algorithm.inference if tells else None
        found = evaluate(session.model, session.test_batches(), protos_CK, known_C, confusion_by=rule)
        metrics, examples = {}, 0
        if found is not None:
            examples = found.examples
            metrics = {"loss": found.loss, "accuracy-head": found.by_head}
            if found.by_prototype is not None:
                metrics["accuracy-prototype"] = found.by_prototype
        shared, confusion = examples if tells_sizes else None, found.confusion if found else None
        return EvaluationReport(session.node.partition, session.download.round, shared, metrics, confusion)


class HeadTrainer(Trainer):
    """What methods share whose clients have one head in common: it replaces the own one before training and tests."""

    def take_up_head(self, session: Session) -> None:
        """Overwrite the head of the session's model with the one that the server sent, if it sent any."""
        if session.download.weights is not None:
            replace_head(session.model, session.download.weights)

    def upload_head(
        self,
        session: Session,
        metrics: Mapping[str, float],
        *,
        tell_size: bool,
        more: Mapping[str, Tensor] | None = None,
    ) -> Upload:
        """Return the trained head, ``more`` weights, and with ``tell_size`` n_i; nothing where nothing was trained."""
        partition, number = session.node.partition, session.download.round
        if not metrics:
            return Upload(partition, number)
        weights = read_head(session.model) | dict(more or {})
        examples = len(session.split.train) if tell_size else None
        return Upload(partition, number, weights=weights, examples=examples, metrics=metrics)

    def evaluate(self, session: Session) -> EvaluationReport:
        """Test the session's model with the newest global head."""
        self.take_up_head(session)
        return super().evaluate(session)
