"""Server half of FedGen: average the heads, train the generator on them. Mathematics: ``task/methods/fedgen.py``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from server_app.contributions import gather_weights, inspect_weights
from server_app.scrutiny import inspect_counts
from server_app.strategies.base import RoundStrategy, State
from task.averaging import labelled, part, weighted_mean
from task.messages import Shared, Upload
from task.methods.fedgen import (
    ADAM,
    GENERATOR,
    LABEL_COUNTS,
    GeneratorTraining,
    Teacher,
    first_generator,
    label_prior,
    load_generator,
    require_label_counts,
    train_generator,
)
from task.models.heads import build_head, first_head, head_part, require_equal_heads
from task.models.split import weights_of
from task.schema import Config, require

TABLE = "label_counts_MC"


@dataclass
class FedGen(RoundStrategy):
    """One global head, and a generator of features that the clients' heads recognise.

    Parameters
    ----------
    weighting : str
        ``examples``: clients weigh by their training samples n_i, in the head and in the teacher. ``uniform``: alike.
    teacher : str
        ``clients``: heads weigh as ``weighting`` says. ``labels``: for each label by how often a client holds it.
    label_prior : str
        ``empirical``: labels are drawn as often as all clients hold them; each tells its counts once. ``uniform``.
    noise_dim, hidden_dim : int
        Widths of the generator's noise Z and hidden layer.
    steps, batch_size, lr, diversity
        Adam steps a round, drawn labels a step, learning rate, weight of the diversity term.
    persist_generator : bool
        False is the public code's slip: clients get the untrained generator for ever.
    """

    weighting: Literal["examples", "uniform"] = "examples"
    teacher: Literal["clients", "labels"] = "clients"
    label_prior: Literal["empirical", "uniform"] = "empirical"
    noise_dim: int = 32
    hidden_dim: int = 512
    steps: int = 100
    batch_size: int = 10
    lr: float = 0.005
    diversity: float = 0.0
    persist_generator: bool = True

    uploads: ClassVar[frozenset[str]] = frozenset({"weights"})

    def __post_init__(self) -> None:
        for name, least in (("noise_dim", 1), ("hidden_dim", 1), ("steps", 1), ("batch_size", 2)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"at least {least}")
        require(0 < self.lr < float("inf"), "lr", self.lr, "a finite number above 0")
        require(0 <= self.diversity < float("inf"), "diversity", self.diversity, "a finite number of at least 0")
        counted = self.teacher == "clients" or self.label_prior == "empirical"
        require(counted, "teacher", self.teacher, "clients, unless label_prior=empirical, with which label counts come")
        self._training = GeneratorTraining(self.steps, self.batch_size, self.lr, self.diversity)

    def check(self, config: Config) -> None:
        """Refuse unequal heads, too."""
        super().check(config)
        require_equal_heads(config.model, config.algorithm.name)

    def init_state(self, num_classes: int, width: int, rng: Generator) -> State:
        """Return a fresh head and generator, and an empty table of label counts, one row a client."""
        state = first_head(self.run.config.model, num_classes, rng)
        state |= first_generator(self.noise_dim, self.hidden_dim, num_classes, width, rng)
        if self.label_prior == "empirical":
            state[TABLE] = torch.zeros(self.run.roster.size, num_classes, dtype=torch.int64)
        return {**state, "trained_rounds": torch.zeros((), dtype=torch.int64)}

    def downlink(self, state: State) -> Shared:
        """Return the global head; once the generator is trained, that and the label counts of all clients too."""
        shared: dict[str, Tensor] = head_part(state)
        if int(state["trained_rounds"]) or not self.persist_generator:
            shared |= {name: tensor for name, tensor in state.items() if name.startswith(GENERATOR)}
            if TABLE in state:
                shared[LABEL_COUNTS] = state[TABLE].sum(dim=0)
        return Shared(weights=shared)

    def evaluation_downlink(self, state: State) -> Shared:
        """Return the global head, with which clients are tested."""
        return Shared(weights=head_part(state))

    def inspect(self, state: State, upload: Upload) -> None:
        """Refuse another head than the global one's kind, a missing weight, and missing or malformed label counts."""
        if upload.weights is None:  # its client had nothing to train on
            return
        head = dict(upload.weights)
        if TABLE in state:
            counts_C, row_C = head.pop(LABEL_COUNTS, None), state[TABLE][upload.partition]
            require_label_counts(f"client {upload.partition}", counts_C, row_C)
            if counts_C is not None:
                inspect_counts(upload.partition, counts_C, self.run.roster.reports[upload.partition])
        inspect_weights(replace(upload, weights=head), head_part(state), self.weighting)

    def absorb(
        self, state: State, uploads: Sequence[Upload], rng: Generator, device: torch.device
    ) -> tuple[State, dict[str, float]]:
        """Average the heads and train the generator on them; a round without heads changes nothing."""
        sent, weights = gather_weights(uploads, self.weighting)
        metrics = {"heads_received": float(len(sent))}
        if not sent:
            return state, metrics
        heads = [head_part(tensors) for tensors in sent]
        new, counts_MC = {**state, **weighted_mean(heads, weights)}, None
        if TABLE in state:
            senders = [upload.partition for upload in uploads if upload.weights is not None]
            new[TABLE] = state[TABLE].clone()
            for partition, tensors in zip(senders, sent, strict=True):
                new[TABLE][partition] = tensors.get(LABEL_COUNTS, new[TABLE][partition])
            counts_MC = new[TABLE][senders]
        if self.persist_generator:  # training one that nobody gets would be a waste
            head = build_head(self.run.config.model, self.run.num_classes)
            by_label_MC = counts_MC if self.teacher == "labels" else None
            teacher = Teacher.of(head, heads, weights, by_label_MC, device)
            metrics["generator_loss"] = self._train(new, teacher, rng)
        return new, metrics

    def _train(self, state: State, teacher: Teacher, rng: Generator) -> float:
        """Put the generator of this round, and its optimiser, into ``state``; return the mean loss."""
        num_classes, width = self.run.num_classes, self.run.config.model.feature_dim
        generator = load_generator(state, num_classes, width)
        assert generator is not None
        prior_C = label_prior(state[TABLE].sum(dim=0) if TABLE in state else None, num_classes)
        moments, loss = train_generator(generator, part(ADAM, state), teacher, prior_C, self._training, rng)
        state |= labelled(GENERATOR, weights_of(generator)) | labelled(ADAM, moments)
        state["trained_rounds"] = state["trained_rounds"] + 1
        return loss
