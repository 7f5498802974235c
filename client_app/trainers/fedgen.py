"""Client half of FedGen: cross-entropy on the client's data and on generated features; uploads the head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from client_app.loop import fit_epochs
from client_app.session import Session
from client_app.trainers.base import HeadTrainer
from task.losses import divergence
from task.messages import Upload
from task.methods.fedgen import LABEL_COUNTS, draw, label_prior, load_generator
from task.schema import require
from task.seeding import torch_stream


@dataclass
class FedGenTrainer(HeadTrainer):
    """Local objective ``CE + alpha * CE(head(G(drawn labels)), drawn labels) + beta * KL``.

    Parameters
    ----------
    weighting : str
        As on the server; with ``examples`` the number of training samples is sent.
    label_prior : str
        As on the server; with ``empirical`` the numbers of samples of each label are sent, once.
    alpha : float
        Weight of the cross-entropy on generated features, which trains the head alone.
    beta : float
        Weight of the divergence of the model's output from what its head answers to a feature generated for the
        same label; 0 leaves it out.
    generator_mode : str
        ``eval``: the generator's BatchNorm normalises by what it saw on the server; ``train``: by the batch.
    """

    weighting: Literal["examples", "uniform"] = "examples"
    label_prior: Literal["empirical", "uniform"] = "empirical"
    alpha: float = 1.0
    beta: float = 0.0
    generator_mode: Literal["eval", "train"] = "eval"

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), name, value, "a finite number of at least 0")

    def fit(self, session: Session) -> Upload:
        """Take up the global head, train, and return the head; the first time also the label counts."""
        self.take_up_head(session)
        model = session.model
        extra = self._extra(session)

        def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits_BC = model(images).float()
            return {"loss": functional.cross_entropy(logits_BC, labels)} | extra(logits_BC, labels)

        metrics, more = fit_epochs(session, step), {}
        if self.label_prior == "empirical" and not session.download.state_round:
            labels = torch.from_numpy(session.dataset.labels[session.split.train])
            more = {LABEL_COUNTS: torch.bincount(labels, minlength=session.num_classes)}
        return self.upload_head(session, metrics, tell_size=self.weighting == "examples", more=more)

    def _extra(self, session: Session) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
        """Return the terms of the local objective that need the generator; none while there is none."""
        received, config = session.download.weights or {}, session.config
        generator = load_generator(received, session.num_classes, config.model.feature_dim)
        if generator is None:
            return lambda logits_BC, labels: {}
        generator.to(session.device).train(self.generator_mode == "train")
        prior_C = label_prior(received.get(LABEL_COUNTS), session.num_classes)
        rng = torch_stream(config.seed, "client", session.node.partition, session.download.round, "generated")
        head, size = session.model.head, max(2, config.train.batch_size)  # BatchNorm needs two in train mode

        def generated(labels: Tensor | None) -> tuple[Tensor, Tensor]:
            """Return what the head answers to features made for ``labels``, or drawn ones, and those labels."""
            noise_BZ, drawn = draw(prior_C, size if labels is None else len(labels), generator.noise_dim, rng)
            wanted = drawn.to(session.device) if labels is None else labels
            with torch.no_grad():
                feats_BK = generator(noise_BZ.to(session.device), wanted)
            return head(feats_BK).float(), wanted

        def extra(logits_BC: Tensor, labels: Tensor) -> dict[str, Tensor]:
            terms = {"generated_loss": self.alpha * functional.cross_entropy(*generated(None))}
            if self.beta:
                enough = labels if len(labels) > 1 else labels.repeat(2)
                target_BC = generated(enough)[0][: len(labels)].detach()
                terms["latent_loss"] = self.beta * divergence(logits_BC, target_BC, "batchmean")
            return terms

        return extra
