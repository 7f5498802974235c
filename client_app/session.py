"""Everything that one message needs: configuration, data, model, device, random stream."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from flwr.app import Context
from torch import Generator, Tensor

from client_app.node_facts import NodeFacts, has_labels, named_errors, node_facts
from task.averaging import labelled, part, require_alike
from task.config import build, load_cached
from task.data.loaders import Batch, ClientData, prepared
from task.data.own import own_source, own_split
from task.data.partition import client_splits
from task.data.prepare import ImageDataset, prepare
from task.data.shares import Split
from task.data.sources import Indices
from task.messages import Download, Placement
from task.models.assign import build_auxiliary, build_model, entry_for
from task.models.split import SplitModel
from task.schema import Config
from task.seeding import torch_stream

MODEL, KEPT = "model.", "kept."


@dataclass
class Session:
    """One message of one client. Data and model are made when they are first asked for.

    ``kept`` holds what a method itself keeps on the client from one training to the next, beside the model. Of a
    client that is not ``is_labelled`` no training batch carries a label: they are all -1.
    """

    config: Config
    node: NodeFacts
    dataset: ImageDataset
    split: Split
    device: torch.device
    is_labelled: bool = True
    download: Download = field(default_factory=Download)
    kept: dict[str, Tensor] = field(default_factory=dict)
    trace: list[Tensor] = field(default_factory=list)

    @property
    def num_classes(self) -> int:
        """C."""
        return self.dataset.num_classes

    @property
    def model_name(self) -> str:
        """The name of the client's entry of the model group."""
        return str(entry_for(self.config.model, self.node.partition, self.node.model)["name"])

    @cached_property
    def model(self) -> SplitModel:
        """The client's model with its first weights, on its device."""
        model = self._build_model()
        return self._place(model)

    def state(self, with_model: bool = True) -> dict[str, Tensor]:
        """Return all that the client must keep until it is asked again: its model, if it is its own, and ``kept``."""
        return (labelled(MODEL, self.model.state_dict()) if with_model else {}) | labelled(KEPT, self.kept)

    def restore(self, state: dict[str, Tensor], with_model: bool = True) -> None:
        """Take up what ``state()`` returned, without initialising the model first."""
        # Cloned into torch's own, always equally aligned memory: kernels may round differently by alignment, and
        # the last bits of a result must not depend on where a state came from.
        copies = {name: tensor.clone() for name, tensor in state.items()}
        self.kept = part(KEPT, copies)
        if with_model:
            with torch.device("meta"):
                model = self._build_model()
            model.load_state_dict(part(MODEL, copies), assign=True)
            self.model = self._place(model)

    def auxiliary(self, weights: Mapping[str, Tensor] | None) -> SplitModel:
        """Return the extra model that the clients share, with the ``weights`` that the server sent, on the device.

        Raises
        ------
        ValueError
            The weights are missing or are those of another model.
        """
        model = self._empty_auxiliary()
        require_alike("server", weights, model.state_dict())
        copies = {name: tensor.clone() for name, tensor in (weights or {}).items()}  # for the reason in restore()
        model.load_state_dict(copies, assign=True)
        return self._place(model)

    def auxiliary_shapes(self) -> dict[str, Tensor]:
        """Return tensors without storage with the names, shapes and types of that model's weights."""
        return dict(self._empty_auxiliary().state_dict())

    def train_batches(self, has_batchnorm: bool | None = None, raw: bool = False) -> Iterator[Batch]:
        """Return the shuffled batches of one epoch; every call goes on in the message's random stream.

        ``has_batchnorm`` tells of all models that are trained on them; None means the client's model alone. ``raw``
        images are as they are stored, for whoever augments them before ``prepared``.
        """
        train = self.config.train
        return self._train_data.train_batches(
            train.batch_size,
            self._generator,
            shuffle=train.shuffle,
            drop_last=train.drop_last,
            has_batchnorm=self.model.has_batchnorm if has_batchnorm is None else has_batchnorm,
            raw=raw,
            trace=self.trace,
        )

    def all_train_batches(self, raw: bool = False) -> Iterator[Batch]:
        """Return all training samples in order, in the batches of evaluation."""
        return self._train_data.eval_batches(self.config.train.eval_batch_size, raw=raw)

    def test_batches(self) -> Iterator[Batch]:
        """Return all test samples in order, in the batches of evaluation."""
        return self._data(self.split.test).eval_batches(self.config.train.eval_batch_size)

    def prepared(self, images: Tensor) -> Tensor:
        """Return raw images as the model wants them."""
        return prepared(images, channels_last=self.config.train.channels_last)

    def truth(self) -> Tensor | None:
        """Return the true classes behind all training batches so far, in their order: to measure, never to train.

        None where they are not known, or are nobody's business: on a node that says itself that it has no labels, has
        images of its own, or whose labels are -1.
        """
        order = torch.cat(self.trace) if self.trace else torch.zeros(0, dtype=torch.int64)
        classes = torch.from_numpy(self.dataset.labels[self.split.train])[order.cpu()]
        hidden = self.node.role == "unlabelled" or self.node.data is not None
        return None if hidden or bool((classes < 0).any()) else classes

    @cached_property
    def _train_data(self) -> ClientData:
        return self._data(self.split.train, hide_labels=not self.is_labelled)

    @cached_property
    def _generator(self) -> Generator:
        return torch_stream(self.config.seed, "client", self.node.partition, self.download.round)

    def _data(self, indices: Indices, hide_labels: bool = False) -> ClientData:
        layout = self.config.train.channels_last
        return ClientData.from_dataset(
            self.dataset, indices, self.device, channels_last=layout, hide_labels=hide_labels
        )

    def _build_model(self) -> SplitModel:
        return build_model(
            self.config.model,
            self.node.partition,
            num_classes=self.num_classes,
            image_shape=self.dataset.image_shape,
            seed=self.config.seed,
            pinned=self.node.model,
        )

    def _empty_auxiliary(self) -> SplitModel:
        classes, shape = self.num_classes, self.dataset.image_shape
        with torch.device("meta"):
            return build_auxiliary(self.config.model, num_classes=classes, image_shape=shape, seed=self.config.seed)

    def _place(self, model: SplitModel) -> SplitModel:
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.config.train.channels_last else model


def open_session(context: Context, placement: Placement | None = None) -> Session:
    """Return the session of a message, its data prepared and its device chosen.

    Raises
    ------
    ValueError
        A fact of the node or a setting that does not fit, in one line.
    """
    with named_errors(context.node_config):
        return _open_session(context, placement)


def _open_session(context: Context, placement: Placement | None) -> Session:
    overrides = str(context.run_config.get("overrides", ""))
    config = load_cached(overrides)
    node = node_facts(context.node_config).placed(placement)
    wanted = config.federation.num_clients
    if wanted is not None and wanted != node.num_partitions:
        raise ValueError(
            f"client {node.partition}: num-partitions={node.num_partitions} but federation.num_clients={wanted}: "
            f'in a simulation add --federation-config "num-supernodes={wanted}"'
        )
    torch.set_num_threads(config.train.threads)
    device = choose_device(node.device or config.train.device, node.partition)
    dataset, split = _data_of(overrides, node, placement.class_names if placement else ())
    is_labelled = has_labels(config, node)
    split = _usable(split, dataset, trained=is_labelled, tested=node.role != "unlabelled")
    return Session(config, node, dataset, split, device, is_labelled)


def class_names_of(context: Context) -> tuple[NodeFacts, tuple[str, ...]]:
    """Return the facts of a node that has not been placed yet, and the classes that it knows by name."""
    overrides, node = str(context.run_config.get("overrides", "")), node_facts(context.node_config)
    with named_errors(context.node_config):
        return node, _dataset_of(overrides, node, ()).class_names


def _usable(split: Split, dataset: ImageDataset, *, trained: bool, tested: bool) -> Split:
    """Return the split without samples that lack the label by which they would be ``trained`` or ``tested``."""
    train = split.train[dataset.labels[split.train] >= 0] if trained else split.train
    test = split.test[dataset.labels[split.test] >= 0] if tested else split.test[:0]
    return Split(train, test)


def choose_device(wanted: str, partition: int) -> torch.device:
    """Return the device of a client; ``ValueError`` when CUDA is asked for and missing."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ValueError(
            f"client {partition}: train.device=cuda but this process sees no CUDA device; in a simulation set "
            "federation.gpus_per_client above 0 (e.g. 0.25), or train.device=cpu"
        )
    return torch.device("cuda" if wanted != "cpu" and available else "cpu")


@lru_cache(maxsize=256)
def _data_of(overrides: str, node: NodeFacts, class_names: tuple[str, ...]) -> tuple[ImageDataset, Split]:
    """Return the prepared images and the client's split, its labels in the order of ``class_names``, if there are any.

    Once in a process for each client; what clients share, the images and the division, once for all of them.
    """
    config = load_cached(overrides)
    dataset = _dataset_of(overrides, node, class_names)
    partition = build(config.partition, "partition")
    if node.data is not None:
        return dataset, own_split(dataset, partition, node.partition, node.num_partitions, config.seed)
    return dataset, client_splits(partition, dataset, node.num_partitions, config.seed)[node.partition]


def _dataset_of(overrides: str, node: NodeFacts, class_names: tuple[str, ...]) -> ImageDataset:
    config = load_cached(overrides)
    source = build(config.data.source, "data.source")
    folder = node.cache_dir or (Path(config.data.cache_dir).expanduser() if config.data.cache_dir else None)
    dataset = prepare(own_source(node.data, source) if node.data is not None else source, folder)
    names = class_names or tuple(config.data.classes or ())
    return _in_order(dataset, names, f"node {node.name!r}" if node.name else f"client {node.partition}")


@lru_cache(maxsize=2)
def _in_order(dataset: ImageDataset, class_names: tuple[str, ...], who: str) -> ImageDataset:
    return dataset.with_classes(class_names, who) if class_names else dataset
