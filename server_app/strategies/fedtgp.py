"""Server half of FedTGP: train the global prototypes on what came. Mathematics: ``task/methods/fedtgp.py``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator

from server_app.strategies.base import RoundStrategy, State
from task.messages import PrototypeSet, Shared, Upload
from task.methods.fedtgp import PrototypeNetwork, ServerTraining, adaptive_margin, centroids, train_prototypes
from task.prototypes import smallest_gap
from task.schema import require


@dataclass
class FedTGP(RoundStrategy):
    """Trainable global prototypes with an adaptive margin.

    Parameters
    ----------
    margin : str
        ``max_pair`` (paper), ``max_of_min`` (the authors' code), ``fixed`` (ablation FM: always ``margin_cap``) or
        ``none`` (ablation SCL: 0).
    margin_cap : float
        tau; for ``fixed`` the margin itself.
    use_network : bool
        False drops F (ablation "w/o F").
    init_norm : float or None
        Start of the global prototypes: blocks of this norm, orthogonal where K >= C, or None for the authors' N(0, 1).
    epochs : int
        S, server epochs a round.
    batch_size : int or None
        Received prototypes a step; None takes all at once.
    optimizer, lr, weight_decay, schedule
        How the loss is minimised; the paper leaves it open. AdamW's decay is ``weight_decay / C``. It bounds the
        prototypes: the margin grows with them, and without a bound both grow until tau. It is divided by C because
        with more classes F has to hold more prototypes apart, and the same decay would keep them together.
    send_untrained : bool
        Whether round 1 gets the untrained prototypes (paper) or none (the authors' code).
    """

    margin: Literal["max_pair", "max_of_min", "fixed", "none"] = "max_pair"
    margin_cap: float = 100.0
    use_network: bool = True
    init_norm: float | None = 8.0
    epochs: int = 100
    batch_size: int | None = None
    optimizer: Literal["sgd", "adamw"] = "adamw"
    lr: float = 0.001
    weight_decay: float = 100.0
    schedule: Literal["constant", "cosine"] = "constant"
    send_untrained: bool = True

    def __post_init__(self) -> None:
        require(self.margin_cap >= 0, "margin_cap", self.margin_cap, "at least 0")
        require(self.epochs >= 0, "epochs", self.epochs, "at least 0")
        require(self.batch_size is None or self.batch_size >= 1, "batch_size", self.batch_size, "null, or at least 1")
        require(0 < self.lr < float("inf"), "lr", self.lr, "a finite number above 0")
        decay = self.weight_decay
        require(0 <= decay * self.lr < 1, "weight_decay", decay, "at least 0, and times lr below 1")
        require(self.optimizer == "adamw" or decay == 0, "weight_decay", decay, "0 with optimizer=sgd")
        require(self.init_norm is None or self.init_norm > 0, "init_norm", self.init_norm, "null, or above 0")

    has_prototypes: ClassVar[bool] = True
    uploads: ClassVar[frozenset[str]] = frozenset({"prototypes"})

    def init_state(self, num_classes: int, width: int, rng: Generator) -> State:
        """Return fresh latent vectors, F, and a counter of rounds trained."""
        network = PrototypeNetwork(num_classes, width, self.use_network, rng, self.init_norm)
        return {**network.state_dict(), "trained_rounds": torch.zeros((), dtype=torch.int64)}

    def downlink(self, state: State) -> Shared:
        """Return the global prototypes of all C classes, also those that nobody has shown yet."""
        if not self.send_untrained and not int(state["trained_rounds"]):
            return Shared()
        with torch.no_grad():
            # Without F the output is the parameter itself: detached, so that nobody can train or change it.
            vectors_CK = self._network(state, torch.device("cpu"))().detach().clone()
        return Shared(PrototypeSet(torch.arange(len(vectors_CK)), vectors_CK))

    def absorb(
        self, state: State, uploads: Sequence[Upload], rng: Generator, device: torch.device
    ) -> tuple[State, dict[str, float]]:
        """Take one round of server training; a round without prototypes changes nothing."""
        sets = [upload.prototypes for upload in uploads if upload.prototypes is not None]
        received_NK = torch.cat([each.vectors for each in sets]).to(device) if sets else torch.zeros(0, 1)
        if not len(received_NK):
            return state, {"prototypes_received": 0.0}
        classes_N = torch.cat([each.class_ids for each in sets]).to(device)
        margin = self._margin(received_NK, classes_N)
        network = self._network(state, device)
        decay = self.weight_decay / len(network.latents_CK)
        training = ServerTraining(self.epochs, self.batch_size, self.optimizer, self.lr, self.schedule, decay)
        loss = train_prototypes(network, received_NK, classes_N, margin, training, rng)
        trained = {name: value.detach().cpu() for name, value in network.state_dict().items()}
        with torch.no_grad():
            gap = smallest_gap(network().cpu())
        metrics = {
            "prototypes_received": float(len(received_NK)),
            "margin": margin,
            "server_loss": loss,
            "smallest_gap": gap,
        }
        return {**trained, "trained_rounds": state["trained_rounds"] + 1}, metrics

    def _margin(self, received_NK: torch.Tensor, classes_N: torch.Tensor) -> float:
        if self.margin == "none":
            return 0.0
        if self.margin == "fixed":
            return self.margin_cap
        return adaptive_margin(centroids(received_NK, classes_N)[0], self.margin, self.margin_cap)

    def _network(self, state: State, device: torch.device) -> PrototypeNetwork:
        num_classes, width = state["latents_CK"].shape
        network = PrototypeNetwork(num_classes, width, self.use_network, torch.Generator())
        network.load_state_dict({name: value for name, value in state.items() if name != "trained_rounds"})
        return network.to(device)
