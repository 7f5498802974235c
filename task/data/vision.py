"""Data sets that torchvision knows how to find, download and decode.

torchvision itself unpickles the CIFAR files; it checks their MD5 sums first, and that is its own affair:
point ``root`` only at folders that you trust.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from filelock import FileLock

from task.data.noise import Noise
from task.data.sources import Array, RawImages, Source, absolute_path, check_resize, reason

ROOT_KEY = "data.source.root"


@dataclass(frozen=True)
class VisionSource(Source):
    """What all torchvision sources share.

    Parameters
    ----------
    root
        Absolute path of the folder that holds (or gets) torchvision's files.
    download
        Whether missing files may be fetched from the network.
    """

    root: str
    download: bool = False

    # Class in torchvision.datasets, its folder below root, noise of its shape, and (arguments, is this the test split).
    kind: ClassVar[str]
    folder: ClassVar[str]
    noise: ClassVar[Noise]
    parts: ClassVar[tuple[tuple[dict[str, Any], bool], ...]] = (
        ({"train": True}, False),
        ({"train": False}, True),
    )

    def __post_init__(self) -> None:
        absolute_path(self.root, ROOT_KEY)

    def stand_in(self) -> Source:
        """Return noise of the same shape and number of classes."""
        return self.noise

    def files(self) -> Iterable[Path]:
        """Return every file of the data set below the root."""
        folder = absolute_path(self.root, ROOT_KEY) / self.folder
        return (path for path in folder.rglob("*") if path.is_file())

    def fetch(self) -> None:
        """Download what is missing when ``download`` is on; one process at a time.

        A mark in the root says that all files have been checked, because that takes seconds for large sets.

        Raises
        ------
        ValueError
            When the folder cannot be written or the download fails.
        """
        root = absolute_path(self.root, ROOT_KEY)
        mark = root / f".{self.folder}.checked"
        if not self.download or mark.exists():
            return
        try:
            root.mkdir(parents=True, exist_ok=True)
            with FileLock(root / f".{self.folder}.lock"):
                if not mark.exists():
                    for arguments, _ in self.parts:
                        self._open(arguments, download=True)
                    mark.touch()
        except Exception as error:  # torchvision's readers and the network raise whatever they trip over
            message = f"{ROOT_KEY}: {self.kind} cannot be downloaded to {root} ({reason(error)})"
            raise ValueError(message) from error

    def read(self) -> RawImages:
        """Read all splits into memory."""
        images, labels, is_test = [], [], []
        class_names: tuple[str, ...] | None = None
        for arguments, test in self.parts:
            dataset, part_images, part_labels = self._read_part(arguments)
            images.append(part_images)
            labels.append(part_labels)
            is_test.append(np.full(len(part_labels), test))
            names = getattr(dataset, "classes", None)
            class_names = tuple(str(name) for name in names) if names else class_names
        return RawImages(np.concatenate(images), np.concatenate(labels), np.concatenate(is_test), class_names)

    def _read_part(self, arguments: dict[str, Any]) -> tuple[Any, Array, Array]:
        """Return the torchvision data set with its images and labels, or say in one line what is missing."""
        root = absolute_path(self.root, ROOT_KEY)
        try:
            dataset = self._open(arguments, download=False)
            images, labels = self.arrays(dataset)
            if len(images) != len(labels):
                raise ValueError(f"{len(images)} images and {len(labels)} labels")
        except Exception as error:  # torchvision's readers raise whatever they trip over in a damaged file
            raise ValueError(
                f"{ROOT_KEY}: {self.kind} is missing or broken in {root} ({reason(error)}); put torchvision's files "
                "there or set data.source.download=true"
            ) from error
        return dataset, images, labels

    def _open(self, arguments: dict[str, Any], download: bool) -> Any:
        """Return the torchvision data set."""
        import torchvision

        root = absolute_path(self.root, ROOT_KEY)
        return getattr(torchvision.datasets, self.kind)(str(root), download=download, **arguments)

    @abstractmethod
    def arrays(self, dataset: Any) -> tuple[Array, Array]:
        """Return images ``(N, H, W)`` or ``(N, H, W, ch)`` uint8 and labels ``(N,)`` of one split."""


@dataclass(frozen=True)
class Mnist(VisionSource):
    """MNIST: 70,000 images, 28x28, 10 classes."""

    kind: ClassVar[str] = "MNIST"
    folder: ClassVar[str] = "MNIST"
    noise: ClassVar[Noise] = Noise(edge=28, channels=1, num_classes=10)

    def arrays(self, dataset: Any) -> tuple[Array, Array]:
        """Return the tensors that torchvision holds."""
        return np.asarray(dataset.data), np.asarray(dataset.targets)


@dataclass(frozen=True)
class FashionMnist(Mnist):
    """Fashion-MNIST: 70,000 images, 28x28, 10 classes."""

    kind: ClassVar[str] = "FashionMNIST"
    folder: ClassVar[str] = "FashionMNIST"


@dataclass(frozen=True)
class Cifar10(Mnist):
    """CIFAR-10: 60,000 images, 3x32x32, 10 classes."""

    kind: ClassVar[str] = "CIFAR10"
    folder: ClassVar[str] = "cifar-10-batches-py"
    noise: ClassVar[Noise] = Noise(edge=32, channels=3, num_classes=10)


@dataclass(frozen=True)
class Cifar100(Mnist):
    """CIFAR-100: 60,000 images, 3x32x32, 100 classes."""

    kind: ClassVar[str] = "CIFAR100"
    folder: ClassVar[str] = "cifar-100-python"
    noise: ClassVar[Noise] = Noise(edge=32, channels=3, num_classes=100)


@dataclass(frozen=True)
class Stl10(VisionSource):
    """The labelled part of STL-10: 5,000 + 8,000 images, 3x96x96, 10 classes.

    Parameters
    ----------
    resize
        Edge length in pixels, or null for the original 96.
    """

    resize: int | None = None

    kind: ClassVar[str] = "STL10"
    folder: ClassVar[str] = "stl10_binary"
    noise: ClassVar[Noise] = Noise(edge=96, channels=3, num_classes=10)
    parts: ClassVar[tuple[tuple[dict[str, Any], bool], ...]] = (
        ({"split": "train"}, False),
        ({"split": "test"}, True),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_resize(self.resize)

    def stand_in(self) -> Source:
        """Return noise of the size that is set."""
        return self.noise if self.resize is None else replace(self.noise, edge=self.resize)

    def arrays(self, dataset: Any) -> tuple[Array, Array]:
        """Return the arrays that torchvision holds, channels moved last."""
        images = np.asarray(dataset.data).transpose(0, 2, 3, 1)
        if self.resize is not None:
            images = np.stack([_square(image, self.resize) for image in images])
        return images, np.asarray(dataset.labels)


@dataclass(frozen=True)
class Flowers102(VisionSource):
    """Flowers102: 8,189 images of any size, 102 classes; resized to a square as PFLlib does.

    Parameters
    ----------
    resize
        Edge length in pixels.
    """

    resize: int = 64

    kind: ClassVar[str] = "Flowers102"
    folder: ClassVar[str] = "flowers-102"
    noise: ClassVar[Noise] = Noise(edge=64, channels=3, num_classes=102)
    parts: ClassVar[tuple[tuple[dict[str, Any], bool], ...]] = (
        ({"split": "train"}, False),
        ({"split": "val"}, False),
        ({"split": "test"}, True),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_resize(self.resize)

    def stand_in(self) -> Source:
        """Return noise of the size that is set."""
        return replace(self.noise, edge=self.resize)

    def arrays(self, dataset: Any) -> tuple[Array, Array]:
        """Decode and resize every image."""
        images, labels = [], []
        for index in range(len(dataset)):
            image, label = dataset[index]
            images.append(_square(np.asarray(image.convert("RGB")), self.resize))
            labels.append(int(label))
        return np.stack(images), np.asarray(labels, dtype=np.int64)


def _square(image: Array, size: int) -> Array:
    """Resize ``(H, W, 3)`` uint8 to ``(size, size, 3)``, bilinear."""
    from PIL import Image

    return np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize((size, size), Image.Resampling.BILINEAR))
