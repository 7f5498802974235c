"""What every method's server half shares: sampling, decoding, failures, evaluation, records, checkpoints.

A leaf is a dataclass of settings with three methods: ``init_state``, ``downlink``, ``absorb``. A method's state is a
plain ``dict`` of named tensors, so a leaf is tested without Flower and its checkpoint is one safetensors file.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING, getLogger
from typing import Any, ClassVar, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Generator, Tensor

from server_app.checkpoint import Checkpoint, save_checkpoint
from server_app.demands import require_capable
from server_app.recorder import CHECKPOINT, PrototypesByClient, Recorder
from server_app.roster import Roster, reason_of
from server_app.round_fields import Traffic, metric_means, summarise, traffic_fields
from task.messages import Download, EvaluationReport, Expected, Shared, Upload, parameters_in, prototype_parameters_in
from task.models.assign import build_auxiliary
from task.models.split import SplitModel
from task.payload import decode_evaluation, decode_upload, encode_download, nbytes
from task.schema import Config
from task.seeding import stream, torch_stream

LOG = getLogger("flwr")
State = dict[str, Tensor]
Reply = TypeVar("Reply", Upload, EvaluationReport)


@dataclass
class Run:
    """One run as a strategy sees it: who, where, and how far it is."""

    config: Config
    roster: Roster
    recorder: Recorder
    session: str
    device: torch.device
    done: int = 0
    state: State = field(default_factory=dict)
    state_rounds: dict[int, int] = field(default_factory=dict)
    client_prototypes: PrototypesByClient = field(default_factory=dict)

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.roster.class_names)

    def auxiliary(self) -> SplitModel:
        """Return the extra model that some methods share, with its first weights."""
        shape, seed = self.roster.image_shape, self.config.seed
        return build_auxiliary(self.config.model, num_classes=self.num_classes, image_shape=shape, seed=seed)


class RoundStrategy(Strategy):
    """Flower's ``Strategy`` for methods whose server does three things: begin, send, absorb."""

    run: Run
    has_prototypes: ClassVar[bool] = False
    has_global_model: ClassVar[bool] = False
    """Whether clients receive prototypes of features, by which they can classify; and whether all have one model."""

    def check(self, config: Config) -> None:
        """Refuse a configuration that the method cannot run, with a ``ValueError`` of one line; called at load."""
        require_capable(config, self.has_prototypes, self.has_global_model)

    def shared_width(self, num_classes: int, feature_dim: int) -> int:
        """Return the width of the vectors that the method exchanges: K, unless a leaf says otherwise."""
        return feature_dim

    def inspect(self, state: State, upload: Upload) -> None:
        """Refuse an upload that does not fit the method, with a ``ValueError`` naming the client: it is dropped."""

    def personal(self, state: State, partition: int, shared: Shared) -> Shared:
        """Return what one client receives: the same as everybody, unless a leaf says otherwise."""
        return shared

    @abstractmethod
    def init_state(self, num_classes: int, width: int, rng: Generator) -> State:
        """Return the method's state before round 1 for C classes and features of width K."""

    @abstractmethod
    def downlink(self, state: State) -> Shared:
        """Return what clients receive, an empty ``Shared`` when there is nothing (yet)."""

    def evaluation_downlink(self, state: State) -> Shared:
        """Return what clients need to be tested: what they need to be trained, unless a leaf says otherwise."""
        return self.downlink(state)

    @abstractmethod
    def absorb(
        self, state: State, uploads: Sequence[Upload], rng: Generator, device: torch.device
    ) -> tuple[State, dict[str, float]]:
        """Return the state after a round's ``uploads`` (ascending by partition), and metrics of the method."""

    def bind(self, run: Run) -> None:
        """Take the run; must come before ``start``. Gives the run its first state unless it is resumed."""
        self.run, self._durable = run, dict(run.state_rounds)
        if not run.done:
            rng = torch_stream(run.config.seed, "server", "init")
            run.state = self.init_state(run.num_classes, run.config.model.feature_dim, rng)
        self._row: dict[str, Any] = {}
        self._clock = time.monotonic()
        self._sent: dict[int, int] = {}  # the partition of each node that has yet to answer

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the round's clients and address the method's download to each."""
        number = self.run.done + 1
        sampled = self._sample(number)
        self._row = {"round": number, "sampled": sampled, "failures": [], "seconds": {}, "metrics": {}}
        self._traffic: dict[str, dict[int, Traffic]] = {"train": {}, "evaluate": {}}
        self._began = self._clock = time.monotonic()
        return self._address(sampled, number, "train")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the replies in order of partition and let the method absorb them."""
        self._lap("train")
        uploads = self._collect(replies, "train", decode_upload)
        self._stop_if_needed(uploads)
        number = self._row["round"]
        for upload in uploads:
            self.run.state_rounds[upload.partition] = number
            if upload.prototypes is not None:
                self.run.client_prototypes[upload.partition] = upload.prototypes
        rng = torch_stream(self.run.config.seed, "server", number)
        state, metrics = self.absorb(self.run.state, uploads, rng, self.run.device)
        if all(bool(torch.isfinite(tensor).all()) for tensor in state.values()):
            self.run.state = state
        else:
            LOG.log(WARNING, "round %d: the new global state is not finite; the old one is kept", number)
            metrics = {"state_kept": 1.0}
        self._row["metrics"] = metrics | metric_means([upload.metrics for upload in uploads], "train_")
        self._row["clients_without_train"] = untrained = sum(not upload.metrics for upload in uploads)
        if uploads and untrained == len(uploads):
            LOG.log(WARNING, "round %d: no client had an image to train on; the global state stays", number)
        self._lap("server")
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the newest download to every client, in the rounds in which evaluation is due."""
        due = self.run.config.federation.evaluates(self._row["round"])
        return self._address(list(self.run.roster), self._row["round"], "evaluate") if due else []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' accuracies and write the line of the round."""
        due = bool(self._sent)
        reports = self._collect(replies, "evaluate", decode_evaluation) if due else []
        self._row |= self.scores(reports)
        self._lap("evaluate")
        self._row |= traffic_fields(self._traffic["train"], self._traffic["evaluate"])
        self._row["seconds"]["round"] = round(time.monotonic() - self._began, 4)
        self.run.recorder.append(self._row)
        self.run.done = self._row["round"]
        accuracy = "not evaluated" if self._row["accuracy"] is None else f"{self._row['accuracy']:.4f}"
        if due:
            self._stop_if_needed(reports)
        LOG.log(INFO, "round %d/%d accuracy %s", self.run.done, self.run.config.federation.rounds, accuracy)
        if self.run.done % self.run.config.federation.checkpoint_every == 0:
            self.checkpoint()
        return None

    def scores(self, reports: Sequence[EvaluationReport]) -> dict[str, Any]:
        """Return the accuracy fields of the round's line."""
        return summarise(reports, self.run.config.algorithm.inference, self.run.config.federation.report_sizes)

    def candidates(self) -> list[int]:
        """Return the clients that can be sampled: all, unless a leaf says otherwise."""
        return list(self.run.roster)

    def facts(self) -> dict[str, Any]:
        """Return what the run's summary says of the method beyond what it says of all."""
        return {}

    def checkpoint(self) -> None:
        """Make the run resumable from the round just done."""
        run = self.run
        run.recorder.write_prototypes(self.downlink(run.state).prototypes, run.client_prototypes)
        run.recorder.write_clients(run.roster)
        durable = Checkpoint(run.done, run.session, dict(sorted(run.state_rounds.items())), len(run.roster))
        save_checkpoint(run.recorder.folder / CHECKPOINT, run.state, durable)
        self._durable = dict(run.state_rounds)

    def summary(self) -> None:
        """Log who takes part."""
        LOG.log(INFO, "%s with %d clients", self.run.config.algorithm.name, len(self.run.roster))

    def _sample(self, number: int) -> list[int]:
        """Draw the partitions of a round: a named stream over partition ids, never over Flower's random node ids."""
        partitions = self.candidates()
        size = min(len(partitions), self.run.config.federation.clients_a_round(len(self.run.roster)))
        drawn = stream(self.run.config.seed, "sample", number).choice(partitions, size, replace=False)
        return sorted(int(partition) for partition in drawn)

    def _address(self, partitions: list[int], number: int, phase: str) -> list[Message]:
        run, messages = self.run, []
        shared = self.downlink(run.state) if phase == "train" else self.evaluation_downlink(run.state)
        self._sent = {}
        for partition in partitions:
            own = self.personal(run.state, partition, shared)
            download = Download(
                own.prototypes,
                own.weights,
                round=number,
                session=run.session,
                state_round=run.state_rounds.get(partition, 0),
                durable_round=self._durable.get(partition, 0),
            )
            content = encode_download(download)
            kind = MessageType.TRAIN if phase == "train" else MessageType.EVALUATE
            node = run.roster.node_ids[partition]
            messages.append(Message(content, dst_node_id=node, message_type=kind, group_id=str(number)))
            self._sent[node] = partition
            self._traffic[phase][partition] = Traffic(
                bytes_down=nbytes(content),
                parameters_down=parameters_in(download),
                prototypes_down=prototype_parameters_in(download),
            )
        return messages

    def _collect(
        self, replies: Iterable[Message], phase: str, decode: Callable[[RecordDict, Expected], Reply]
    ) -> list[Reply]:
        """Return the good replies, ascending by partition; note the reason of every other."""
        good, waiting = [], dict(self._sent)
        for reply in replies:
            partition = waiting.pop(reply.metadata.src_node_id, None)
            if partition is None:
                continue  # nobody asked this node, or it answered already
            try:
                if reply.has_error():
                    raise ValueError(reason_of(reply))
                traffic = self._traffic[phase][partition]
                traffic.bytes_up = nbytes(reply.content)
                width = self.shared_width(self.run.num_classes, self.run.config.model.feature_dim)
                decoded = decode(reply.content, Expected(partition, self._row["round"], self.run.num_classes, width))
                if isinstance(decoded, Upload):
                    self.inspect(self.run.state, decoded)
                    traffic.parameters_up = parameters_in(decoded)
                    traffic.prototypes_up = prototype_parameters_in(decoded)
                good.append(decoded)
            except ValueError as error:
                self._fail(partition, phase, str(error))
        for partition in waiting.values():
            self._fail(partition, phase, "no reply within federation.round_timeout")
        self._sent = {}
        self._row["failures"].sort(key=lambda failure: (failure["phase"], failure["partition"]))
        return sorted(good, key=lambda reply: reply.partition)

    def _fail(self, partition: int, phase: str, reason: str) -> None:
        LOG.log(WARNING, "round %d: client %d failed to %s: %s", self._row["round"], partition, phase, reason)
        self._row["failures"].append({"partition": partition, "phase": phase, "reason": reason})

    def _stop_if_needed(self, replies: Sequence[Upload] | Sequence[EvaluationReport]) -> None:
        federation, failures = self.run.config.federation, self._row["failures"]
        reason = f"; client {failures[0]['partition']}: {failures[0]['reason']}" if failures else ""
        place = f"round {self._row['round']}: "
        if failures and federation.on_failure == "stop":
            raise RuntimeError(f"{place}{len(failures)} clients failed and federation.on_failure=stop{reason}")
        if len(replies) < federation.min_replies:
            wanted = f"federation.min_replies={federation.min_replies}"
            raise RuntimeError(f"{place}{len(replies)} good replies, {wanted} are needed{reason}")

    def _lap(self, phase: str) -> None:
        now = time.monotonic()
        self._row["seconds"][phase], self._clock = round(now - self._clock, 4), now
