"""The settings of a run as dataclasses: types, defaults and allowed ranges. ``conf/`` fills them in."""

import math
from dataclasses import dataclass, field
from typing import Any

from task.privacy import PrivacyConfig
from task.published import ExperimentConfig as ExperimentConfig
from task.requirements import require as require
from task.requirements import require_choice as require_choice
from task.stopping import StopConfig as StopConfig

Node = dict[str, Any]
"""A mapping with a ``_target_`` and the keyword settings of that target."""


@dataclass
class AlgorithmConfig:
    """A method: its server half, its client half, and the rule by which its accuracy is reported.

    ``inference`` is ``prototype`` (nearest global prototype) or ``head`` (the client's own classifier).
    ``evaluation`` says on what: ``clients`` (each client's test split), or ``server`` (the source's own test split,
    with the global model). ``unlabelled`` says what becomes of clients without labels: ``refused`` (the method needs
    labels everywhere), ``trained``, ``left_out`` (never sampled), or ``revealed`` (in a simulation they get theirs).
    """

    name: str
    inference: str
    server: Node
    client: Node
    evaluation: str = "clients"
    unlabelled: str = "refused"

    def __post_init__(self) -> None:
        require_choice("algorithm.inference", self.inference, ("head", "prototype"))
        require_choice("algorithm.evaluation", self.evaluation, ("clients", "server"))
        choices = ("refused", "trained", "left_out", "revealed")
        require_choice("algorithm.unlabelled", self.unlabelled, choices)


@dataclass
class LabelsConfig:
    """Whose images have labels: all clients', or those of the first n clients of a run.

    n is ``count``, or where that is null the ``share`` of the clients, rounded down but at least 1; where both are
    null, everybody has labels. A deployed node may say otherwise for itself (node-config ``role``). In the first
    ``warmup_rounds`` only clients with labels train.
    """

    name: str = "all"
    count: int | None = None
    share: float | None = None
    warmup_rounds: int = 0

    def __post_init__(self) -> None:
        require(self.warmup_rounds >= 0, "labels.warmup_rounds", self.warmup_rounds, "at least 0")
        if self.count is not None:
            require(self.count >= 1, "labels.count", self.count, "at least 1: without any label nothing can be learnt")
        if self.share is not None:
            require(0 < self.share <= 1, "labels.share", self.share, "above 0, at most 1")

    def labelled_clients(self, num_clients: int) -> int:
        """Return n, the number of clients with labels among ``num_clients``."""
        if self.count is not None:
            return self.count
        if self.share is not None:
            return max(1, math.floor(self.share * num_clients + 1e-9))
        return num_clients


@dataclass
class DataConfig:
    """Where the images come from, and the folder in which they are prepared once (null: the user's cache).

    With ``stand_in`` a source that must be downloaded gives way to noise of its shape, and ``name`` then says so.
    ``classes`` names all classes in the order of their ids; null: as the images have them, or all nodes together.
    """

    name: str
    source: Node
    classes: list[str] | None = None
    cache_dir: str | None = field(default=None, metadata={"path": True})
    stand_in: bool = False

    def __post_init__(self) -> None:
        good = self.classes is None or 1 <= len(set(self.classes)) == len(self.classes)
        require(good, "data.classes", self.classes, "null, or names that all differ")


@dataclass
class ModelConfig:
    """Who trains which architecture: client i takes entry i mod n and head i mod (number of heads).

    ``heads`` lists the hidden widths of each head, ``[]`` being one linear layer. ``feature_dim`` is K.
    ``auxiliary`` is the model that FML and FedKD share, with head 0; null takes the first entry.
    With ``same_init`` clients of one architecture start from the same weights. ``pretrained`` maps the name
    of an entry to a safetensors file with the weights of its body.
    """

    name: str
    entries: list[Node]
    feature_dim: int = 512
    heads: list[list[int]] = field(default_factory=lambda: [[]])
    final_relu: bool = False
    same_init: bool = False
    auxiliary: Node | None = None
    pretrained: dict[str, str] = field(default_factory=dict, metadata={"path": True})

    def __post_init__(self) -> None:
        require(self.feature_dim >= 1, "model.feature_dim", self.feature_dim, "at least 1")
        require(len(self.entries) >= 1, "model.entries", self.entries, "at least one entry")
        require(len(self.heads) >= 1, "model.heads", self.heads, "at least one head, [] being one linear layer")
        widths = [width for head in self.heads for width in head]
        require(all(width >= 1 for width in widths), "model.heads", self.heads, "hidden widths of at least 1")
        names = {str(entry.get("name")) for entry in self.entries}
        unknown = sorted(set(self.pretrained) - names)
        require(not unknown, "model.pretrained", unknown, "names of model.entries only")


@dataclass
class TrainConfig:
    """Local training: plain SGD with a new optimiser every round, and how it runs on the machine.

    ``lr_schedule`` is ``constant``, or ``linear``: the rate falls to 0 within each round's local training, so that
    the last few batches do not decide with which model a round ends. ``clip`` is the largest norm of the gradient of a
    model in one step, where the method has no such setting of its own; null leaves gradients as they are.
    ``threads`` is the number of CPU threads of a client: one, because several clients train side by side.
    """

    local_epochs: int = 1
    batch_size: int = 10
    lr: float = 0.01
    lr_schedule: str = "constant"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    shuffle: bool = True
    drop_last: bool = False
    eval_batch_size: int = 256
    device: str = "auto"
    precision: str = "fp32"
    channels_last: bool = False
    threads: int = 1

    def __post_init__(self) -> None:
        require(self.local_epochs >= 1, "train.local_epochs", self.local_epochs, "at least 1")
        require(self.batch_size >= 1, "train.batch_size", self.batch_size, "at least 1")
        require(self.eval_batch_size >= 1, "train.eval_batch_size", self.eval_batch_size, "at least 1")
        require(0 < self.lr < float("inf"), "train.lr", self.lr, "a finite number above 0")
        require(0 <= self.momentum < 1, "train.momentum", self.momentum, "from 0 to below 1")
        require(0 <= self.weight_decay < float("inf"), "train.weight_decay", self.weight_decay, "finite, at least 0")
        if self.clip is not None:
            require(0 < self.clip < float("inf"), "train.clip", self.clip, "null, or a finite number above 0")
        require(self.threads >= 1, "train.threads", self.threads, "at least 1")
        require_choice("train.lr_schedule", self.lr_schedule, ("constant", "linear"))
        require_choice("train.device", self.device, ("auto", "cpu", "cuda"))
        require_choice("train.precision", self.precision, ("fp32", "bf16", "fp16"))


@dataclass
class FederationConfig:
    """Rounds, clients, resources, and what happens when clients fail.

    ``num_clients`` null means all connected nodes. ``participation`` is the share of clients that train in a
    round. Evaluation happens every ``evaluate_every`` rounds and always after the last. ``node_timeout`` and
    ``round_timeout`` are seconds. ``report_sizes`` lets clients tell how many samples they hold, for the tables
    and the sample-weighted mean; without it the accuracy is averaged over clients. ``state`` says where a
    client's private model waits between rounds: ``disk`` or Flower's ``context``. The server computes on
    ``server_threads`` CPU threads: one by default, since the last bits of a result depend on their number. With at
    least ``min_clients`` a run starts and goes on; null: all at the start, ``min_replies`` later. A reply is
    dropped when its longest prototype exceeds ``max_prototype_norm``, or this or the norm of its weights exceeds
    ``max_norm_ratio`` times the median, at least 1, of three or more clients of the round (null: no such check).
    The prototypes of ``snapshots`` rounds, evenly from the first to the last, are kept for the report.
    """

    rounds: int = 20
    num_clients: int | None = None
    min_clients: int | None = None
    participation: float = 1.0
    evaluate_every: int = 1
    cpus_per_client: int = 1
    gpus_per_client: float = 0.0
    node_timeout: float = 30.0
    round_timeout: float = 3600.0
    on_failure: str = "tolerate"
    min_replies: int = 1
    max_prototype_norm: float = 1e4
    max_norm_ratio: float | None = 100.0
    report_sizes: bool = True
    checkpoint_every: int = 5
    state: str = "disk"
    state_dir: str | None = field(default=None, metadata={"path": True})
    server_device: str = "auto"
    server_threads: int = 1
    snapshots: int = 5
    stop_after: StopConfig = field(default_factory=StopConfig)

    def __post_init__(self) -> None:
        def least(name: str, bound: float) -> None:
            value = getattr(self, name)
            require(bound <= value < float("inf"), f"federation.{name}", value, f"at least {bound}")

        for name in ("rounds", "evaluate_every", "cpus_per_client", "min_replies", "checkpoint_every"):
            least(name, 1)
        least("server_threads", 1)
        for name in ("num_clients", "min_clients"):
            if getattr(self, name) is not None:
                least(name, 1)
        most = self.num_clients or self.min_clients
        allowed = f"at most federation.num_clients={most}"
        require((self.min_clients or 0) <= (most or 0), "federation.min_clients", self.min_clients, allowed)
        for name in ("gpus_per_client", "snapshots"):
            least(name, 0)
        for name in ("node_timeout", "round_timeout", "max_prototype_norm"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"federation.{name}", value, "a finite number above 0")
        ratio = self.max_norm_ratio
        require(ratio is None or 1 < ratio < float("inf"), "federation.max_norm_ratio", ratio, "null, or above 1")
        require(0 < self.participation <= 1, "federation.participation", self.participation, "above 0, at most 1")
        require_choice("federation.on_failure", self.on_failure, ("tolerate", "stop"))
        require_choice("federation.state", self.state, ("disk", "context"))
        require_choice("federation.server_device", self.server_device, ("auto", "cpu", "cuda"))
        if self.num_clients is not None:
            sampled = self.clients_a_round(self.num_clients)
            allowed = f"at most {sampled}, the clients of a round"
            require(self.min_replies <= sampled, "federation.min_replies", self.min_replies, allowed)

    def clients_a_round(self, num_clients: int) -> int:
        """Return how many of ``num_clients`` train in a round: their share, rounded down, but at least 1."""
        return max(1, math.floor(self.participation * num_clients + 1e-9))

    def evaluates(self, number: int) -> bool:
        """Tell whether round ``number`` ends with an evaluation."""
        return number % self.evaluate_every == 0 or number == self.rounds

    def keeps_prototypes(self, number: int) -> bool:
        """Tell whether the prototypes of round ``number`` are kept; those of the last round always are."""
        steps = max(1, self.snapshots - 1)
        return self.snapshots > 0 and number in {1 + (self.rounds - 1) * i // steps for i in range(self.snapshots)}


@dataclass
class Config:
    """One run. ``resume`` is the folder of an earlier run to go on with; ``overwrite`` may empty a used one.

    ``listeners`` are what else hears of each round, by a name of your choice.
    """

    algorithm: AlgorithmConfig
    data: DataConfig
    partition: Node
    labels: LabelsConfig
    model: ModelConfig
    train: TrainConfig
    federation: FederationConfig
    privacy: PrivacyConfig | None = None
    experiment: ExperimentConfig | None = None
    listeners: dict[str, Node] = field(default_factory=dict)
    seed: int = 0
    name: str | None = None
    resume: str | None = field(default=None, metadata={"path": True})
    overwrite: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**31, "seed", self.seed, "from 0 to 2147483647")
        if self.name is not None:
            plain = bool(self.name) and all(c.isalnum() or c in "-_." for c in self.name)
            require(plain, "name", self.name, "letters, digits, '-', '_' and '.' only")
        require(self.resume != "", "resume", self.resume, "the folder of an earlier run, or null")
        most, clients = self.partition.get("max_samples"), self.federation.num_clients
        enough = not isinstance(most, int) or clients is None or most >= clients
        require(enough, "partition.max_samples", most, f"at least federation.num_clients={clients}")
        n = self.labels.count
        fits = n is None or clients is None or n <= clients
        require(fits, "labels.count", n, f"at most federation.num_clients={clients}")
        warmup, rounds = self.labels.warmup_rounds, self.federation.rounds
        leaves_some = warmup == 0 or warmup < rounds
        require(leaves_some, "labels.warmup_rounds", warmup, f"below federation.rounds={rounds}, or 0")
        keeps_state = self.federation.state == "disk" or self.resume is None
        require(keeps_state, "resume", self.resume, "only with federation.state=disk")

    @property
    def label(self) -> str:
        """What names the results folder: ``name``, or the experiment, if it is one, and the algorithm."""
        algorithm = self.algorithm.name
        return self.name or (f"{self.experiment.name}-{algorithm}" if self.experiment else algorithm)
