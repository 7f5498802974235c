"""Server half of DCCFSSL. Mathematics: ``task/methods/dccfssl_aggregation.py``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from server_app.contributions import group_share
from server_app.strategies.base import State
from server_app.strategies.global_model import MODEL, GlobalModel
from task.averaging import labelled, part
from task.messages import PrototypeSet, Shared, Upload
from task.methods.dccfssl_aggregation import (
    aggregate_models,
    aggregate_prototypes,
    expansion_factor,
    fresh,
    model_weights,
)
from task.schema import Config, require


@dataclass
class DCCFSSL(GlobalModel):
    """Authentication-reweighted aggregation of models (AMA) and prototypes (APA).

    The state holds the model, the global prototypes (``protos_CK``, ``known_C``), and of every client the latest
    prototypes (``store_MCK``), their counts (``counts_MC``), the round in which they came (``rounds_M``, 0: never), and
    whether it has labels (``own_M``, of clients that were there once). n and m count the clients that were there.

    Parameters
    ----------
    authenticate : bool
        Whether A_i weighs the models and m / n the prototypes of labelled clients. False is the ablation -ARA:
        models weigh by N_i, and prototypes of all samples by their counts.
    expand_models : bool
        Whether m / n multiplies A_i of labelled clients, too.
    max_age : int or None
        How many rounds old a client's prototypes may be to count; None for any age, 0 for those of the round alone.
    """

    authenticate: bool = True
    expand_models: bool = False
    max_age: int | None = None

    uploads: ClassVar[frozenset[str]] = frozenset({"prototypes", "weights"})

    def __post_init__(self) -> None:
        fits = self.authenticate or not self.expand_models
        require(fits, "expand_models", self.expand_models, "false with authenticate=false, which counts nothing")
        require(self.max_age is None or self.max_age >= 0, "max_age", self.max_age, "null, or at least 0")

    def check(self, config: Config) -> None:
        """Refuse halves that disagree on authentication, too."""
        super().check(config)
        theirs = config.algorithm.client.get("authenticate")
        allowed = f"that of algorithm.server, {self.authenticate}"
        require(self.authenticate == theirs, "algorithm.client.authenticate", theirs, allowed)

    def init_state(self, num_classes: int, width: int, rng: Generator) -> State:
        """Return a fresh model, and no prototype at all."""
        clients = self.run.roster.size
        return super().init_state(num_classes, width, rng) | {
            "protos_CK": torch.zeros(num_classes, width),
            "known_C": torch.zeros(num_classes, dtype=torch.bool),
            "store_MCK": torch.zeros(clients, num_classes, width),
            "counts_MC": torch.zeros(clients, num_classes, dtype=torch.int64),
            "rounds_M": torch.zeros(clients, dtype=torch.int64),
            "own_M": torch.zeros(clients, dtype=torch.bool),
        }

    def downlink(self, state: State) -> Shared:
        """Return the model, and the prototypes that exist where a loss needs them."""
        ids = state["known_C"].nonzero().flatten()
        needed = bool(len(ids)) and self.run.config.algorithm.client.get("lambda_gcc") != 0
        return Shared(PrototypeSet(ids, state["protos_CK"][ids]) if needed else None, part(MODEL, state))

    def inspect(self, state: State, upload: Upload) -> None:
        """Refuse prototypes without counts, and counts that the client's samples do not make, too."""
        super().inspect(state, upload)
        if upload.prototypes is None:
            return
        if upload.prototypes.counts is None:
            raise ValueError(f"client {upload.partition} sent prototypes without counts")
        total, most = int(upload.prototypes.counts.sum()), upload.examples or 0
        if total > most:
            raise ValueError(f"client {upload.partition} sent counts of {total} samples: at most {most}, its samples")

    def absorb(
        self, state: State, uploads: Sequence[Upload], rng: Generator, device: torch.device
    ) -> tuple[State, dict[str, float]]:
        """Store what came, then average the models of the round and the prototypes of all."""
        number, senders = uploads[0].round, [upload for upload in uploads if upload.weights is not None]
        store = self._stored(state, uploads)
        authentic_M, own_M = store["counts_MC"].sum(dim=1), store["own_M"]
        known_M = store["rounds_M"] > 0
        known_M[list(self.run.roster)] = True
        n, total = int(own_M.sum()), int(known_M.sum())
        expansion = expansion_factor(n, total - n) if self.authenticate else 1.0
        weights = model_weights(
            [int(authentic_M[upload.partition]) for upload in senders],
            [upload.examples or 0 for upload in senders],
            self.labelled_of(senders),
            authenticate=self.authenticate,
            expansion=expansion if self.expand_models else 1.0,
        )
        model = aggregate_models([upload.weights or {} for upload in senders], weights, part(MODEL, state))
        counted_M = fresh(store["rounds_M"], number, self.max_age)
        counts_MC = store["counts_MC"] * counted_M.unsqueeze(1)
        protos_CK, known_C = aggregate_prototypes(
            store["store_MCK"], counts_MC, own_M, expansion, state["protos_CK"], state["known_C"]
        )
        metrics = self._metrics(authentic_M, own_M, uploads) | {
            "labelled_weight": group_share(weights, self.labelled_of(senders)),
            "prototypes": float(known_C.sum()),
            "prototype_age": float((number - store["rounds_M"][counted_M]).double().mean()),
        }
        return labelled(MODEL, model) | store | {"protos_CK": protos_CK, "known_C": known_C}, metrics

    def _stored(self, state: State, uploads: Sequence[Upload]) -> dict[str, Tensor]:
        """Return the table of latest prototypes, in which those of the round replace their clients' earlier ones."""
        store = {name: state[name].clone() for name in ("store_MCK", "counts_MC", "rounds_M")}
        own_M = state.get("own_M")  # no checkpoint of earlier versions has it
        store["own_M"] = own_M.clone() if own_M is not None else torch.zeros(self.run.roster.size, dtype=torch.bool)
        for partition in self.run.roster:
            store["own_M"][partition] = partition in self.run.roster.labelled
        for upload in uploads:
            row, sent = upload.partition, upload.prototypes
            for name in ("store_MCK", "counts_MC"):
                store[name][row] = 0
            store["rounds_M"][row] = upload.round
            if sent is not None and sent.counts is not None:
                store["store_MCK"][row, sent.class_ids] = sent.vectors
                store["counts_MC"][row, sent.class_ids] = sent.counts
        return store

    def _metrics(self, authentic_M: Tensor, own_M: Tensor, uploads: Sequence[Upload]) -> dict[str, float]:
        """Return the mean number of authentication samples of the round's clients, by role."""
        here = torch.tensor([upload.partition for upload in uploads])
        groups = {"labelled": here[own_M[here]], "unlabelled": here[~own_M[here]]}
        return {
            f"authentic_{name}": float(authentic_M[rows].double().mean()) for name, rows in groups.items() if len(rows)
        }
