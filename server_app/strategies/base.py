"""What every method's server half shares: sampling, decoding, failures, evaluation, records, checkpoints.

A leaf is a dataclass of settings with three methods: ``init_state``, ``downlink``, ``absorb``. A method's state is a
plain ``dict`` of named tensors, so a leaf is tested without Flower and its checkpoint is one safetensors file.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING, getLogger
from typing import Any, ClassVar, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, Metadata, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Generator, Tensor

from server_app.attendance import GONE, absent, attend, connected
from server_app.checkpoint import Checkpoint, save_checkpoint
from server_app.demands import require_capable, require_enough, require_private
from server_app.recorder import CHECKPOINT
from server_app.roster import reason_of
from server_app.round_fields import Traffic, confusion_sum, metric_means, summarise, traffic_fields
from server_app.run import Run as Run
from server_app.run import State as State
from server_app.scrutiny import expected, far_out, inspect_reply
from task.foreign import one_line
from task.messages import Download, EvaluationReport, Expected, Shared, Upload, parameters_in, prototype_parameters_in
from task.payload import decode_evaluation, decode_upload, encode_download, nbytes
from task.schema import Config
from task.seeding import stream, torch_stream
from task.stopping import StoppedEarly, reason_to_stop

LOG = getLogger("flwr")
# Seconds that a message outlives its round: Flower throws away what comes later, and asks no node for it any more.
GRACE = 10.0
Reply = TypeVar("Reply", Upload, EvaluationReport)


class RoundStrategy(Strategy):
    """Flower's ``Strategy`` for methods whose server does three things: begin, send, absorb."""

    run: Run
    has_prototypes: ClassVar[bool] = False
    has_global_model: ClassVar[bool] = False
    """Whether clients receive prototypes of features, by which they can classify; and whether all have one model."""
    uploads: ClassVar[frozenset[str]] = frozenset()
    """What clients upload: ``prototypes``, ``weights``, or both; anything else is refused."""

    def check(self, config: Config) -> None:
        """Refuse a configuration that the method cannot run, with a ``ValueError`` of one line; called at load."""
        require_capable(config, self.has_prototypes, self.has_global_model)
        require_private(config, self.has_prototypes, self.uploads)

    def shared_width(self, num_classes: int, feature_dim: int) -> int:
        """Return the width of the vectors that the method exchanges: K, unless a leaf says otherwise."""
        return feature_dim

    def inspect(self, state: State, upload: Upload) -> None:
        """Refuse an upload that does not fit the method, with a ``ValueError`` naming the client: it is dropped."""

    def meant(self, state: State, upload: Upload) -> Mapping[str, Tensor] | None:
        """Return the weights that an upload stands for, by whose norm it is judged: those that it holds, or None."""
        return upload.weights

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
        self._here, self._due = list(run.roster), False
        self._sent: list[tuple[int, Metadata]] = []  # by partition; Flower fills in the message ids when it sends

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the round's clients and address the method's download to each."""
        number, roster = self.run.done + 1, self.run.roster
        self._began = self._clock = time.monotonic()
        self._here = attend(grid, roster, self.run.config, number)
        sampled = self._sample(number)
        if self.run.privacy is not None:
            self.run.privacy.charge(sampled)
        self._row = {"round": number, "sampled": sampled, "absent": absent(roster, self._here)}
        self._row |= {"failures": [], "seconds": {}, "metrics": {}}
        self._traffic: dict[str, dict[int, Traffic]] = {"train": {}, "evaluate": {}}
        self._note_the_gone("train")
        return self._address(sampled, number, "train")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the replies in order of partition and let the method absorb them."""
        self._lap("train")
        uploads = self._without_giants(self._collect(replies, "train", decode_upload))
        require_enough(self.run.config.federation, self._row, len(uploads))
        number = self._row["round"]
        for upload in uploads:
            self.run.state_rounds[upload.partition] = number
            self._traffic["train"][upload.partition].parameters_up = parameters_in(upload)
            self._traffic["train"][upload.partition].prototypes_up = prototype_parameters_in(upload)
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
        self.run.note_prototypes(number, self.downlink(self.run.state).prototypes)
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the newest download to every client, in the rounds in which evaluation is due."""
        own, number = self.run.config, self._row["round"]
        if (own.privacy and not own.privacy.report_accuracy) or not own.federation.evaluates(number):
            return []
        self._here = connected(grid, self.run.roster)
        self._note_the_gone("evaluate")
        return self._address(self._here, self._row["round"], "evaluate")

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' accuracies and write the line of the round."""
        due, self._due = self._due, False
        reports = self._collect(replies, "evaluate", decode_evaluation) if due else []
        self._row |= self.scores(reports)
        confusion = self.confusion(reports)
        if confusion is not None:
            self.run.recorder.write_confusion(confusion)
        self._lap("evaluate")
        self._row |= traffic_fields(self._traffic["train"], self._traffic["evaluate"])
        self._row |= {"privacy": self.run.privacy.fields()} if self.run.privacy is not None else {}
        self._row["seconds"]["round"] = round(time.monotonic() - self._began, 4)
        self.run.recorder.append(self._row)
        self.run.done = self._row["round"]
        accuracy = "not evaluated" if self._row["accuracy"] is None else f"{self._row['accuracy']:.4f}"
        if due:
            require_enough(self.run.config.federation, self._row, len(reports))
        LOG.log(INFO, "round %d/%d accuracy %s", self.run.done, self.run.config.federation.rounds, accuracy)
        if self.run.done % self.run.config.federation.checkpoint_every == 0:
            self.checkpoint()
        stopped = reason_to_stop(self.run.judged_rows, self.run.config.federation.stop_after)
        if stopped and self.run.done < self.run.config.federation.rounds:
            raise StoppedEarly(stopped)
        return None

    def scores(self, reports: Sequence[EvaluationReport]) -> dict[str, Any]:
        """Return the accuracy fields of the round's line."""
        return summarise(reports, self.run.config.algorithm.inference, self.run.config.federation.report_sizes)

    def confusion(self, reports: Sequence[EvaluationReport]) -> Tensor | None:
        """Return how often each true class was taken for which, over all clients that told; None where none did."""
        return confusion_sum(reports)

    def candidates(self) -> list[int]:
        """Return the clients that can be sampled: all that are there, unless a leaf says otherwise."""
        return self._here

    def facts(self) -> dict[str, Any]:
        """Return what the run's summary says of the method beyond what it says of all."""
        return {}

    def checkpoint(self) -> None:
        """Make the run resumable from the round just done."""
        run = self.run
        run.recorder.write_prototypes(self.downlink(run.state).prototypes, run.client_prototypes)
        run.recorder.write_clients(run.roster)
        rounds, roster = dict(sorted(run.state_rounds.items())), run.roster
        durable = Checkpoint(run.done, run.session, rounds, roster.size, roster.names)
        save_checkpoint(run.recorder.folder / CHECKPOINT, run.state, durable)
        self._durable = dict(run.state_rounds)

    def summary(self) -> None:
        """Log who takes part."""
        LOG.log(INFO, "%s with %d clients", self.run.config.algorithm.name, len(self.run.roster))

    def _sample(self, number: int) -> list[int]:
        """Draw the partitions of a round: a named stream over partition ids, never over Flower's random node ids."""
        partitions = self.candidates()
        size = min(len(partitions), self.run.config.federation.clients_a_round(len(self.run.roster)))
        if not partitions:
            return []
        drawn = stream(self.run.config.seed, "sample", number).choice(partitions, size, replace=False)
        return sorted(int(partition) for partition in drawn)

    def _address(self, partitions: list[int], number: int, phase: str) -> list[Message]:
        run, messages = self.run, []
        shared = self.downlink(run.state) if phase == "train" else self.evaluation_downlink(run.state)
        self._sent, self._due, ttl = [], phase == "evaluate", run.config.federation.round_timeout + GRACE
        for partition in partitions:
            own = self.personal(run.state, partition, shared)
            download = Download(
                own.prototypes,
                own.weights,
                round=number,
                session=run.session,
                state_round=run.state_rounds.get(partition, 0),
                durable_round=self._durable.get(partition, 0),
                placement=run.roster.placements.get(partition),
                confusion=phase == "evaluate" and run.may_end_with(number),
            )
            content = encode_download(download)
            kind = MessageType.TRAIN if phase == "train" else MessageType.EVALUATE
            node = run.roster.node_ids[partition]
            messages.append(Message(content, dst_node_id=node, message_type=kind, ttl=ttl, group_id=str(number)))
            self._sent.append((partition, messages[-1].metadata))
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
        width = self.shared_width(self.run.num_classes, self.run.config.model.feature_dim)
        good, waiting = [], {sent.message_id: (partition, sent.dst_node_id) for partition, sent in self._sent}
        for reply in replies:
            partition, node = waiting.get(reply.metadata.reply_to_message_id, (None, 0))
            # Flower itself answers, with an error, for a node that is gone.
            if partition is None or not (reply.has_error() or reply.metadata.src_node_id == node):
                continue  # to another message, or to one that was answered already, or not from the node that was asked
            del waiting[reply.metadata.reply_to_message_id]
            try:
                if reply.has_error():
                    raise ValueError(reason_of(reply))
                self._traffic[phase][partition].bytes_up = nbytes(reply.content)
                decoded = decode(reply.content, expected(self.run, partition, self._row["round"], width))
                told = self._traffic[phase][partition].prototypes_down > 0
                inspect_reply(decoded, self.run.roster.reports[partition], self.run.config, self.uploads, told)
                if isinstance(decoded, Upload):
                    self.inspect(self.run.state, decoded)
                good.append(decoded)
            except ValueError as error:
                self._fail(partition, phase, str(error))
            except Exception as error:  # whatever a foreign reply manages to raise must not end the run
                LOG.exception("client %d sent what nobody foresaw", partition)
                self._fail(partition, phase, f"client {partition} sent what cannot be read: {type(error).__name__}")
        for partition, _ in waiting.values():
            self._fail(partition, phase, "no reply within federation.round_timeout")
        self._sent = []
        return sorted(good, key=lambda reply: reply.partition)

    def _without_giants(self, uploads: list[Upload]) -> list[Upload]:
        ratio = self.run.config.federation.max_norm_ratio
        judged = [(upload, self.meant(self.run.state, upload)) for upload in uploads]
        reasons = dict(far_out(judged, ratio)) if ratio is not None else {}
        for partition, reason in reasons.items():
            self._fail(partition, "train", reason)
        return [upload for upload in uploads if upload.partition not in reasons]

    def _note_the_gone(self, phase: str) -> None:
        for partition in set(self.run.roster) - set(self._here):
            self._fail(partition, phase, GONE)

    def _fail(self, partition: int, phase: str, reason: str) -> None:
        reason, who = one_line(reason), self.run.roster.who(partition)
        LOG.log(WARNING, "round %d: %s failed to %s: %s", self._row["round"], who, phase, reason)
        self._row["failures"].append({"partition": partition, "phase": phase, "reason": reason})
        self._row["failures"].sort(key=lambda failure: (failure["phase"], failure["partition"]))

    def _lap(self, phase: str) -> None:
        now = time.monotonic()
        self._row["seconds"][phase], self._clock = round(now - self._clock, 4), now
