"""A node's own images, at the path that its node-config names: ``data=own``, and any node that says ``data``."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from task.data.folders import MODES, ImageFolder
from task.data.prepare import ImageDataset
from task.data.scheme import DrawnPartition, Partition
from task.data.shares import Split, balanced_subset, train_test
from task.data.sources import Npz, RawImages, Source, check_resize
from task.seeding import stream

NEEDED = "an .npz file, or a folder with one or with a sub-folder for each class"
TEST_FRACTION = 0.25
"""Share of a node's images that is for testing where neither the images nor the partition say so."""


@dataclass(frozen=True)
class Own(Source):
    """Every node's own images; how they are read is the same for all.

    Parameters
    ----------
    resize
        Edge length in pixels of the square that every image is resized to (bilinear), null: as they are.
    mode
        As in ``task.data.folders.ImageFolder``.
    """

    resize: int | None = None
    mode: str = "auto"

    def __post_init__(self) -> None:
        check_resize(self.resize)
        if self.mode not in MODES:
            raise ValueError(f"data.source.mode: must be one of {', '.join(MODES)}, got {self.mode!r}")

    def read(self) -> RawImages:
        """Refuse, since only nodes have such images, and this one names none."""
        raise ValueError(
            f"data=own, and this node names none: start its SuperNode with --node-config 'data=\"/path\"', {NEEDED}"
        )


def own_source(path: Path, settings: Source) -> Source:
    """Return the source of the images at ``path``, read as ``settings``, the source of the run, would read them.

    Raises
    ------
    ValueError
        One line, when there is nothing that can be read.
    """
    known = {field.name for field in dataclasses.fields(settings)}
    how = {name: getattr(settings, name) for name in ("resize", "mode") if name in known}
    archives = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if len(archives) == 1 and archives[0].suffix == ".npz" and archives[0].is_file():
        return Npz(str(archives[0]), resize=how.get("resize"))
    if not path.is_dir() or len(archives) > 1:
        found = f"{len(archives)} .npz files" if path.is_dir() else "another file" if path.exists() else "nothing"
        raise ValueError(f"node-config data={str(path)!r}: there is {found}; {NEEDED} is needed")
    return ImageFolder(str(path), **how)


def own_split(dataset: ImageDataset, partition: Partition, client: int, num_clients: int, seed: int) -> Split:
    """Return training and test samples of a node's own images.

    The images' own test part stays one. Where there is none, ``partition.test_fraction`` of them become one. Of
    ``partition.max_samples``, which are those of all clients, a node takes its share.
    """
    most = None if partition.max_samples is None else -(-partition.max_samples // num_clients)
    every = np.arange(len(dataset.labels), dtype=np.int64)
    kept = balanced_subset(every, dataset.labels, most, stream(seed, "partition", "subset", client))
    in_test = dataset.is_test[kept]
    if in_test.any():
        return Split(kept[~in_test], kept[in_test])
    fraction, stratify = TEST_FRACTION, False
    if isinstance(partition, DrawnPartition):
        fraction, stratify = partition.test_fraction, partition.stratify
    return train_test(kept, dataset.labels, fraction, stratify, stream(seed, "partition", "test", client))
