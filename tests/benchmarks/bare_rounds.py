"""A round of each method as plain loops: its forward and backward passes, its steps, and nothing around them.

The batches are made before; nothing is kept, sent, checked, averaged or compressed. Where a method needs vectors of
the trained models, the forward pass over the clients' data is here, the sums by class are not. The server's own
training is here, FedTGP's with the gradient that the app has: autograd's would make the bare side slower.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from client_app.session import Session
from server_app.strategies.base import RoundStrategy
from task.contrastive_gradient import Targets, contrastive_gradient
from task.data.loaders import Batch
from task.losses import class_mean_distance, prototype_cross_entropy
from task.methods.feddistill import distillation_loss
from task.methods.fedgen import Teacher, draw, label_prior, load_generator
from task.methods.fedkd import distillation_losses
from task.methods.fedtgp import PrototypeNetwork
from task.methods.fml import mutual_losses
from task.models.heads import build_head, read_head
from task.models.split import SplitModel


@dataclass(frozen=True)
class Client:
    """A client's own model, what is trained beside it, the batches of an epoch, and those of a pass over all data."""

    model: SplitModel
    beside: list[nn.Module]
    epoch: list[Batch]
    whole: list[Batch]


class BareRound:
    """Cross-entropy alone: ``local`` and LG-FedAvg. Takes what it needs from the app after the app's first round."""

    def __init__(self, strategy: RoundStrategy, sessions: Sequence[Session]) -> None:
        self.config, self.state = strategy.run.config, strategy.run.state
        self.client_settings: Any = self.config.algorithm.client
        self.server_settings: Any = self.config.algorithm.server
        self.num_classes, self.width = strategy.run.num_classes, self.config.model.feature_dim
        self.rng = torch.Generator().manual_seed(0)
        self.clients = [
            Client(
                session.model,
                self.beside(strategy),
                [(images.clone(), labels.clone()) for images, labels in session.train_batches()],
                [(images.clone(), labels.clone()) for images, labels in session.all_train_batches()],
            )
            for session in sessions
        ]

    def __call__(self) -> Iterator[None]:
        """Train one client a step, then the server."""
        for client in self.clients:
            modules = [client.model, *client.beside]
            parameters = [parameter for module in modules for parameter in module.parameters()]
            optimizer = torch.optim.SGD(parameters, lr=self.config.train.lr)
            for module in modules:
                module.train()
            for images, labels in client.epoch:
                loss = self.loss(client, images, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            client.model.eval()
            with torch.no_grad():
                self.afterwards(client)
            yield
        self.serve()

    def beside(self, strategy: RoundStrategy) -> list[nn.Module]:
        return []

    def loss(self, client: Client, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(client.model(images), labels)

    def afterwards(self, client: Client) -> None: ...

    def serve(self) -> None: ...


class BareFedGen(BareRound):
    """Also generated features for the heads, and Adam on the server's generator."""

    def __init__(self, strategy: RoundStrategy, sessions: Sequence[Session]) -> None:
        super().__init__(strategy, sessions)
        received, trained = (load_generator(self.state, self.num_classes, self.width) for _ in range(2))
        assert received is not None
        assert trained is not None
        self.received, self.trained = received.eval(), trained.train()
        heads = [read_head(client.model) for client in self.clients]
        head = build_head(self.config.model, self.num_classes)
        self.teacher = Teacher.of(head, heads, [1.0] * len(heads), None, torch.device("cpu"))
        self.prior = label_prior(None, self.num_classes)

    def loss(self, client: Client, images: Tensor, labels: Tensor) -> Tensor:
        noise, drawn = draw(self.prior, self.config.train.batch_size, self.received.noise_dim, self.rng)
        with torch.no_grad():
            features = self.received(noise, drawn)
        return super().loss(client, images, labels) + functional.cross_entropy(client.model.head(features), drawn)

    def serve(self) -> None:
        optimizer = torch.optim.Adam(self.trained.parameters(), lr=self.server_settings["lr"])
        for _ in range(self.server_settings["steps"]):
            noise, drawn = draw(self.prior, self.server_settings["batch_size"], self.trained.noise_dim, self.rng)
            loss = functional.cross_entropy(self.teacher.logits(self.trained(noise, drawn), drawn), drawn)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class BareFedDistill(BareRound):
    """Also the distance to mean outputs, and a pass for the client's own."""

    def __init__(self, strategy: RoundStrategy, sessions: Sequence[Session]) -> None:
        super().__init__(strategy, sessions)
        shared = strategy.downlink(self.state).prototypes
        assert shared is not None
        self.targets, self.known = shared.dense(self.num_classes)

    def loss(self, client: Client, images: Tensor, labels: Tensor) -> Tensor:
        logits = client.model(images)
        distillation = distillation_loss(logits, labels, self.targets, self.known, "probabilities")
        return functional.cross_entropy(logits, labels) + distillation

    def afterwards(self, client: Client) -> None:
        for images, _ in client.whole:
            client.model(images).softmax(dim=1)


class BareFML(BareRound):
    """Two models that learn from each other."""

    def beside(self, strategy: RoundStrategy) -> list[nn.Module]:
        return [strategy.run.auxiliary()]

    def loss(self, client: Client, images: Tensor, labels: Tensor) -> Tensor:
        outputs = client.model(images), client.beside[0](images)
        losses = mutual_losses(*outputs, labels, alpha=0.5, beta=0.5, kl="batchmean", detach=True)
        return losses[0] + losses[1]


class BareFedKD(BareRound):
    """Two models that learn from each other and from each other's features."""

    def beside(self, strategy: RoundStrategy) -> list[nn.Module]:
        return [strategy.run.auxiliary(), nn.Linear(self.width, self.width, bias=False)]

    def loss(self, client: Client, images: Tensor, labels: Tensor) -> Tensor:
        teacher, (student, alignment) = client.model, client.beside
        assert isinstance(student, SplitModel)
        features, student_features = teacher.features(images), student.features(images)
        outputs = teacher.head(features), student.head(student_features)
        options: Any = {"kl": "batchmean", "least_divisor": 1e-6, "detach_divisor": False}
        losses = distillation_losses(*outputs, features, alignment(student_features), labels, **options)
        return losses[0] + losses[1]


class BareFedProto(BareRound):
    """Also the terms of global prototypes, and a pass for the client's own."""

    def __init__(self, strategy: RoundStrategy, sessions: Sequence[Session]) -> None:
        super().__init__(strategy, sessions)
        shared = strategy.downlink(self.state).prototypes
        assert shared is not None
        self.protos, self.known = shared.dense(self.num_classes)

    def loss(self, client: Client, images: Tensor, labels: Tensor) -> Tensor:
        features = client.model.features(images)
        loss = functional.cross_entropy(client.model.head(features), labels)
        given = features, labels, self.protos, self.known
        loss = loss + self.client_settings["weight"] * class_mean_distance(*given)
        contrast = self.client_settings["contrast_weight"]
        return loss + contrast * prototype_cross_entropy(*given) if contrast else loss

    def afterwards(self, client: Client) -> None:
        for images, _ in client.whole:
            client.model.features(images)


class BareFedTGP(BareFedProto):
    """Also the server's training of global prototypes, at a margin like those of the first rounds."""

    def __init__(self, strategy: RoundStrategy, sessions: Sequence[Session]) -> None:
        super().__init__(strategy, sessions)
        sets = strategy.run.client_prototypes.values()
        vectors, classes = torch.cat([each.vectors for each in sets]), torch.cat([each.class_ids for each in sets])
        self.targets = Targets.of(vectors, classes, self.num_classes, 5.0)
        self.network = PrototypeNetwork(self.num_classes, self.width, True, self.rng)
        self.network.load_state_dict({name: self.state[name] for name in self.network.state_dict()})

    def serve(self) -> None:
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=self.server_settings["lr"], fused=True)
        for _ in range(self.server_settings["epochs"]):
            protos = self.network()
            optimizer.zero_grad()
            protos.backward(contrastive_gradient(self.targets, protos.detach()))
            optimizer.step()


BARE: dict[str, type[BareRound]] = {
    "local": BareRound,
    "lg_fedavg": BareRound,
    "fedgen": BareFedGen,
    "feddistill": BareFedDistill,
    "fml": BareFML,
    "fedkd": BareFedKD,
    "fedproto": BareFedProto,
    "fedtgp": BareFedTGP,
    "fedtgp_symmetric": BareFedTGP,
}
