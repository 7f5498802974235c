"""A round of the semi-supervised methods as plain loops: augmentation, forward and backward passes, steps, no more.

Views, losses and the pass for prototypes are the app's own functions on the app's own images; nothing is kept, sent,
checked, averaged or measured.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Generator, Tensor, nn

from client_app.session import Session
from client_app.trainers.global_model import supervised_loss
from server_app.strategies.base import RoundStrategy
from task.data.augment import Augmentation, strong_views, three_views, weak_views
from task.data.loaders import Batch, normalise
from task.methods.dccfssl import dual_contrast, representations
from task.methods.fedprox import proximal_term, trainable_vector
from task.methods.fixmatch import pseudo_labels, true_labels, unlabelled_loss
from task.methods.rscfed import consistency_loss, update_teacher
from task.models.split import SplitModel


@dataclass(frozen=True)
class Client:
    """A client's model, its raw batches of an epoch, and the prepared ones of a pass over all its data."""

    model: SplitModel
    teacher: SplitModel
    is_labelled: bool
    epoch: list[Batch]
    whole: list[Batch]


class BareGlobalModel:
    """FedAvg, alone or with FixMatch, and FedProx's term where the method has it."""

    def __init__(self, strategy: RoundStrategy, sessions: Sequence[Session]) -> None:
        config, sampled = strategy.run.config, set(strategy.candidates())
        self.train, self.num_classes = config.train, strategy.run.num_classes
        self.settings: Mapping[str, Any] = config.algorithm.client
        self.views = Augmentation(**self.settings["views"])
        self.rng = torch.Generator().manual_seed(0)
        shared = strategy.downlink(strategy.run.state).prototypes
        self.known = (None, None) if shared is None else shared.dense(self.num_classes)
        self.clients = [
            Client(
                session.model,
                session.auxiliary(session.model.state_dict()).eval(),
                session.is_labelled,
                [(images.clone(), labels.clone()) for images, labels in session.train_batches(raw=True)],
                [(images.clone(), labels.clone()) for images, labels in session.all_train_batches()],
            )
            for session in sessions
            if session.node.partition in sampled
        ]

    def __call__(self) -> Iterator[None]:
        """Train one client a step."""
        for client in self.clients:
            optimizer = torch.optim.SGD(
                client.model.parameters(),
                lr=self.train.lr,
                momentum=self.train.momentum,
                weight_decay=self.train.weight_decay,
            )
            client.model.train()
            anchor = trainable_vector(client.model).detach()
            for images, labels in client.epoch:
                terms = self.terms(client, images, labels)
                if self.settings.get("proximal"):
                    terms.append(proximal_term(client.model, anchor, self.settings["proximal"]))
                loss = reduce(torch.add, terms)
                if loss.requires_grad:
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(client.model.parameters(), self.train.clip or float("inf"))
                    optimizer.step()
                    self.after_step(client)
            client.model.eval()
            with torch.no_grad():
                self.afterwards(client)
            yield

    def terms(self, client: Client, images: Tensor, labels: Tensor) -> list[Tensor]:
        if client.is_labelled:
            return [supervised_loss(client.model(self.seen(weak_views, images)), labels)]
        weak, strong = client.model(self.seen(weak_and_strong, images)).chunk(2)
        targets = pseudo_labels(weak, self.settings["threshold"])
        return [unlabelled_loss(strong, targets) if targets.trusted_B.any() else weak.new_zeros(())]

    def seen(self, maker: Any, images: Tensor) -> Tensor:
        return normalise(maker(images, self.rng, self.views))

    def after_step(self, client: Client) -> None: ...

    def afterwards(self, client: Client) -> None: ...


class BareDCCFSSL(BareGlobalModel):
    """Also the contrastive losses on three views, and a pass for the client's own prototypes."""

    def terms(self, client: Client, images: Tensor, labels: Tensor) -> list[Tensor]:
        weights = {name: self.settings[name] for name in ("lambda_lcc", "lambda_gcc")}
        if not any(weights.values()):
            return super().terms(client, images, labels)
        feats = client.model.features(self.seen(three_views, images))
        logits = client.model.head(feats).view(3, len(images), -1)
        targets = true_labels(labels) if client.is_labelled else pseudo_labels(logits[0], self.settings["threshold"])
        basic = supervised_loss(logits[0], labels) if client.is_labelled else unlabelled_loss(logits[1], targets)
        contrast = dual_contrast(
            representations(feats).view(3, len(images), -1),
            *targets,
            *self.known,
            **weights,
            **{name: self.settings[name] for name in ("temperature", "lcc_unlabelled", "gcc_views")},
        )
        return [basic, *contrast.values()]

    def afterwards(self, client: Client) -> None:
        for images, _ in client.whole:
            client.model(images)


class BareRSCFed(BareGlobalModel):
    """A mean teacher on the clients without labels."""

    steps = 0

    def terms(self, client: Client, images: Tensor, labels: Tensor) -> list[Tensor]:
        if client.is_labelled:
            return super().terms(client, images, labels)
        one, two = self.seen(two_weak, images).chunk(2)
        with torch.no_grad():
            taught = client.teacher(one)
        loss = consistency_loss(client.model(two), taught, self.train.batch_size)
        return [self.settings["consistency"] * loss]

    def after_step(self, client: Client) -> None:
        if not client.is_labelled:
            update_teacher(client.teacher, client.model, self.steps, limit=self.settings["limit"])
            self.steps += 1


def weak_and_strong(images: Tensor, rng: Generator, views: Augmentation) -> Tensor:
    return torch.cat([weak_views(images, rng, views), strong_views(images, rng, views)])


def two_weak(images: Tensor, rng: Generator, views: Augmentation) -> Tensor:
    return torch.cat([weak_views(images, rng, views), weak_views(images, rng, views)])


BARE: dict[str, type[BareGlobalModel]] = {
    "fedavg_sl_lower": BareGlobalModel,
    "fedavg_sl_upper": BareGlobalModel,
    "fedavg_fixmatch": BareGlobalModel,
    "fedprox_fixmatch": BareGlobalModel,
    "fedconsist": BareGlobalModel,
    "rscfed": BareRSCFed,
    "dccfssl": BareDCCFSSL,
    "dccfssl_no_lcc": BareDCCFSSL,
    "dccfssl_no_gcc": BareDCCFSSL,
    "dccfssl_no_dcc": BareDCCFSSL,
    "dccfssl_no_ara": BareDCCFSSL,
}
