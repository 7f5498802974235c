"""What every method's client half shares: the protocol, and evaluation by both rules."""

from abc import ABC, abstractmethod

from client_app.session import Session
from task.messages import EvaluationReport, Upload
from task.metrics import evaluate


class Trainer(ABC):
    """A leaf is a dataclass of settings with ``fit``, whose step reads like the paper's local objective."""

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
        found = evaluate(session.model, session.test_batches(), protos_CK, known_C)
        metrics, examples = {}, 0
        if found is not None:
            examples = found.examples
            metrics = {"loss": found.loss, "accuracy-head": found.by_head}
            if found.by_prototype is not None:
                metrics["accuracy-prototype"] = found.by_prototype
        shared = examples if session.config.federation.report_sizes else None
        return EvaluationReport(session.node.partition, session.download.round, shared, metrics)
