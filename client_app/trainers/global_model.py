"""What the client halves share whose clients all train one global model: they take it up, train it, and return it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from client_app.session import Session
from client_app.trainers.base import Trainer
from task.config import build
from task.data.augment import Augmentation, require_8bit, strong_views, three_views, weak_views
from task.messages import EvaluationReport, PrototypeSet, Upload
from task.methods.fedprox import proximal_term, trainable_vector
from task.methods.fixmatch import Targets
from task.models.split import weights_of
from task.schema import require
from task.seeding import torch_stream

Regulariser = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Views = Callable[[Tensor, str], Tensor]
MAKERS = {"weak": weak_views, "strong": strong_views, "all": three_views}


class Beliefs:
    """What a client without labels took its images for in training, to measure it where the truth is known."""

    def __init__(self) -> None:
        self.labels: list[Tensor] = []
        self.trusted: list[Tensor] = []

    def note(self, targets: Targets) -> None:
        """Keep the targets of the next batch."""
        self.labels.append(targets.labels_B)
        self.trusted.append(targets.trusted_B)

    def metrics(self, truth: Tensor | None) -> dict[str, float]:
        """Return the share of trusted images, and of these the share of right ones if the ``truth`` is known."""
        if not self.labels:
            return {}
        labels, trusted = torch.cat(self.labels).cpu(), torch.cat(self.trusted).cpu()
        found = {"confident": float(trusted.float().mean())}
        if truth is not None and trusted.any():
            found["pseudo_label_accuracy"] = float((labels == truth)[trusted].float().mean())
        return found


@dataclass
class GlobalModelTrainer(Trainer):
    """Training of the downloaded model; nothing of it stays on the client.

    Parameters
    ----------
    proximal : float
        FedProx's mu, the strength with which the model is held near the global one; 0 for none.
    views : mapping
        Settings of the augmentation that differ from the defaults of ``task.data.augment.Augmentation``.
    """

    proximal: float = 0.0
    views: Mapping[str, Any] = field(default_factory=dict)

    keeps_model: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(0 <= self.proximal < float("inf"), "proximal", self.proximal, "a finite number of at least 0")
        self.augmentation: Augmentation = build(
            {"_target_": "task.data.augment.Augmentation", **self.views}, "algorithm.client.views"
        )

    def take_up(self, session: Session) -> None:
        """Make the session's model the one that the server sent."""
        session.model = session.auxiliary(session.download.weights)

    def evaluate(self, session: Session) -> EvaluationReport:
        """Test the global model on the client's test split."""
        self.take_up(session)
        return super().evaluate(session)

    def proximal_regulariser(self, session: Session) -> Regulariser:
        """Return what adds FedProx's term, anchored at the model as it is now, to losses by name; none without mu.

        As long as no loss has had a gradient the model is where it was: the term is 0, and left out, since a step down
        it would be one of weight decay alone. Source: ``task/methods/fedprox.py``.
        """
        if not self.proximal:
            return lambda losses: losses
        anchor_P, moved = trainable_vector(session.model).detach(), False

        def regularised(losses: dict[str, Tensor]) -> dict[str, Tensor]:
            nonlocal moved
            moved = moved or any(loss.requires_grad for loss in losses.values())
            term = {"proximal_loss": proximal_term(session.model, anchor_P, self.proximal)} if moved else {}
            return losses | term

        return regularised

    def view_maker(self, session: Session) -> Views:
        """Return what makes views of raw images, as the model wants them.

        It takes the images and the kinds, joined by ``+``: ``weak``, ``strong``, or ``all`` for a weak and two strong
        ones. The views of one kind come after those of another; the random numbers are those of the round.
        """
        seed, who, number = session.config.seed, session.node.partition, session.download.round
        rng = torch_stream(seed, "views", who, number)

        def views(images: Tensor, kinds: str) -> Tensor:
            require_8bit(images, f"client {who}")
            return session.prepared(
                torch.cat([MAKERS[kind](images, rng, self.augmentation) for kind in kinds.split("+")])
            )

        return views

    def upload(self, session: Session, metrics: Mapping[str, float], prototypes: PrototypeSet | None = None) -> Upload:
        """Return the trained model and N_i; nothing where there was nothing to train on."""
        partition, number, examples = session.node.partition, session.download.round, len(session.split.train)
        if not examples:
            return Upload(partition, number)
        weights = weights_of(session.model)
        return Upload(partition, number, prototypes, weights, examples, metrics)


def supervised_loss(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits in any precision."""
    return functional.cross_entropy(logits_BC.float(), labels_B)
