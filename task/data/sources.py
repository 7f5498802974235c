"""Sources of images: the contract, the embedded set, scikit-learn's digits and ``.npz`` files.

A source is a small frozen dataclass of settings. Making one checks the settings and touches no file;
``read`` does the work, once, when `task.data.prepare` fills the cache.
"""

import base64
import dataclasses
import hashlib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

EMBEDDED = Path(__file__).parent / "embedded" / "fashion_mnist_small.json"
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
# Float images are used as they are. Values beyond this are no normalised images but 0..255 stored as float.
LARGEST_NORMALISED = 50.0


@dataclass(frozen=True, eq=False)
class RawImages:
    """Images and labels as a source delivers them.

    Attributes
    ----------
    images
        ``(N, H, W)`` or ``(N, H, W, ch)`` uint8, or ``(N, ch, H, W)`` float32 that is normalised already.
    labels
        ``(N,)`` integers, whole floats or strings.
    is_test
        ``(N,)`` bool, the source's own test split; all False where there is none.
    class_names
        The name of each class; label ``i`` (or the label with this name) belongs to entry ``i``.
        None: the classes are the labels found.
    given
        ``(train indices, test indices)`` of each client, for data that is already split by client.
    """

    images: Array
    labels: Array
    is_test: npt.NDArray[np.bool_]
    class_names: tuple[str, ...] | None = None
    given: tuple[tuple[Indices, Indices], ...] | None = None


@dataclass(frozen=True)
class Source(ABC):
    """Settings that say where images come from; subclasses are frozen dataclasses."""

    @abstractmethod
    def read(self) -> RawImages:
        """Read everything into memory.

        Raises
        ------
        ValueError
            In one line that names the file or the key, when something is missing or malformed.
        """

    def files(self) -> Iterable[Path]:
        """Return the files whose change makes the prepared copy stale."""
        return ()

    def fetch(self) -> None:  # noqa: B027 - most sources have nothing to fetch
        """Download what is missing, where the settings allow it."""

    def stand_in(self) -> "Source":
        """Return what ``data.stand_in`` puts in the place of this source: itself, unless it must be downloaded."""
        return self

    def fingerprint(self) -> str:
        """Return a text that changes with the settings and with size or time of any file."""
        settings = {key: value for key, value in dataclasses.asdict(self).items() if key != "download"}
        stamps = [(str(path), *_stamp(path)) for path in sorted(self.files())]
        return json.dumps([type(self).__module__, type(self).__qualname__, settings, stamps], sort_keys=True)


def _stamp(path: Path) -> tuple[int, int]:
    """Return size and modification time in nanoseconds; of a missing file, -1 and -1."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def absolute_path(text: str, key: str) -> Path:
    """Return the path with ``~`` expanded.

    A relative path would mean another place in every process of a run, so it is refused.

    Raises
    ------
    ValueError
        When the path is empty or relative.
    """
    path = Path(text).expanduser() if text else Path()
    if not path.is_absolute():
        raise ValueError(f"{key}: must be an absolute path or start with ~/, got {text!r}")
    return path


def check_resize(size: int | None, key: str = "data.source.resize") -> None:
    """Refuse an edge length outside 8..1024 pixels."""
    if size is not None and not 8 <= size <= 1024:
        raise ValueError(f"{key}: must be null or between 8 and 1024 pixels, got {size}")


def reason(error: Exception) -> str:
    """Return what an error says, or else its name, in one line of readable length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def read_npz(path: Path, content: bytes | None = None) -> dict[str, Array]:
    """Return all arrays of an ``.npz`` file, or of its ``content``; pickled members are refused.

    Raises
    ------
    ValueError
        Naming the file, when it is missing, broken or holds Python objects.
    """
    try:
        with np.load(path if content is None else io.BytesIO(content), allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except Exception as error:  # a damaged archive makes its readers raise whatever they trip over
        raise ValueError(f"{path}: cannot be read as an .npz file of plain arrays ({reason(error)})") from error


@dataclass(frozen=True)
class FashionSmall(Source):
    """4,000 + 1,000 balanced images of Fashion-MNIST (28x28, 10 classes) that ship with the project.

    References
    ----------
    Xiao, Rasul, Vollgraf, "Fashion-MNIST", arXiv 1708.07747. MIT licence, beside the file.
    """

    def read(self) -> RawImages:
        """Read the embedded file: JSON around the text of an ``.npz``, since Flower's bundles carry no binaries."""
        coded = "".join(json.loads(EMBEDDED.read_text(encoding="utf-8"))["npz"])
        return _merge(read_npz(EMBEDDED, base64.b64decode(coded)), EMBEDDED, FASHION_CLASSES)

    def fingerprint(self) -> str:
        """Return the hash of the content: every installation writes new time stamps."""
        return f"fashion_small {hashlib.sha256(EMBEDDED.read_bytes()).hexdigest()}"


@dataclass(frozen=True)
class Digits(Source):
    """Scikit-learn's 1,797 handwritten digits; 8x8 pixels, enlarged (bilinear) to fit the models.

    Parameters
    ----------
    resize
        Edge length in pixels after the enlargement.
    """

    resize: int = 32

    def __post_init__(self) -> None:
        check_resize(self.resize)

    def read(self) -> RawImages:
        """Read the set from scikit-learn's own files; values 0..16 become 0..255."""
        from sklearn.datasets import load_digits

        data, labels = load_digits(return_X_y=True)
        small = np.round(data.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        names = tuple(str(digit) for digit in range(10))
        return RawImages(resized(small, self.resize), labels, np.zeros(len(labels), dtype=np.bool_), names)


@dataclass(frozen=True)
class Npz(Source):
    """One ``.npz`` file with ``x, y`` or ``x_train, y_train, x_test, y_test``, optionally ``class_names``.

    Integer images hold 0..255; float images are used as they are and must be normalised (about -1 to 1).
    Channels may come last or first; ``(N, H, W)`` is one channel. With ``class_names`` a label of -1 means none.

    Parameters
    ----------
    path
        Absolute path of the file.
    resize
        Edge length in pixels of the square that integer images are resized to (bilinear), or null.
    """

    path: str
    resize: int | None = None

    def __post_init__(self) -> None:
        absolute_path(self.path, "data.source.path")
        check_resize(self.resize)

    def files(self) -> Iterable[Path]:
        """Return the file."""
        return (absolute_path(self.path, "data.source.path"),)

    def read(self) -> RawImages:
        """Read the file."""
        path = absolute_path(self.path, "data.source.path")
        arrays = read_npz(path)
        names = arrays.get("class_names")
        if names is not None and (names.ndim != 1 or not len(names)):
            raise ValueError(f"{path}: class_names must be a list of at least one name, got shape {names.shape}")
        raw = _merge(arrays, path, None if names is None else tuple(str(name) for name in names))
        if self.resize is None:
            return raw
        if raw.images.dtype != np.uint8:
            raise ValueError(f"{path}: float images cannot be resized; store 0..255 as uint8")
        return dataclasses.replace(raw, images=resized(raw.images, self.resize))


def resized(images: Array, size: int) -> Array:
    """Resize ``(N, H, W)`` or ``(N, H, W, ch)`` uint8 images to squares of ``size`` pixels, bilinear."""
    from PIL import Image

    if images.ndim == 4 and images.shape[3] == 1:
        return resized(images[..., 0], size)[..., None]
    pictures = (Image.fromarray(np.ascontiguousarray(image)) for image in images)
    return np.stack([np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR)) for picture in pictures])


def _merge(arrays: Mapping[str, Array], path: Path, class_names: tuple[str, ...] | None) -> RawImages:
    """Put the training and the test part of an archive behind each other."""
    if {"x", "y"} <= arrays.keys():
        parts = [("x", "y", False)]
    elif {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys():
        parts = [("x_train", "y_train", False), ("x_test", "y_test", True)]
    else:
        found = ", ".join(sorted(arrays)) or "nothing"
        raise ValueError(f"{path}: needs x and y, or x_train, y_train, x_test and y_test; it has {found}")
    images, labels, is_test = [], [], []
    for x_key, y_key, test in parts:
        x, y = arrays[x_key], arrays[y_key]
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.ndim != 1 or x.shape[:1] != y.shape:
            wanted = f"with N = {len(x)} as in {x_key}" if x.ndim else f"and {x_key} images"
            raise ValueError(f"{path}: {y_key} must be (N,) {wanted}, got {y.shape}")
        images.append(standard_layout(x, f"{path}: {x_key}"))
        labels.append(y)
        is_test.append(np.full(len(y), test))
    kinds = {"number" if y.dtype.kind in "biuf" else y.dtype.kind for y in labels}
    if len(kinds) > 1:
        raise ValueError(f"{path}: y_train and y_test must both be numbers or both names")
    shapes = {(part.shape[1:], part.dtype) for part in images}
    if len(shapes) > 1:
        raise ValueError(f"{path}: training and test images differ in shape or type: {sorted(map(str, shapes))}")
    merged = np.concatenate(images)
    return RawImages(merged, np.concatenate(labels), np.concatenate(is_test), class_names)


def standard_layout(images: Array, where: str) -> Array:
    """Return ``(N, H, W, ch)`` uint8 or ``(N, ch, H, W)`` float32 from any usual image array.

    Raises
    ------
    ValueError
        Starting with ``where``, for a wrong number of axes or channels, or values out of range.
    """
    if images.ndim == 3:
        images = images[..., None]
    channels_last = images.ndim == 4 and images.shape[3] in (1, 3)
    if not channels_last and not (images.ndim == 4 and images.shape[1] in (1, 3)):
        raise ValueError(f"{where}: images must have 3 or 4 axes and 1 or 3 channels, got shape {images.shape}")
    if np.issubdtype(images.dtype, np.floating):
        largest = float(np.abs(images).max(initial=0.0))
        if not largest <= LARGEST_NORMALISED:
            raise ValueError(
                f"{where}: float images must be finite and normalised (about -1 to 1), the largest value is "
                f"{largest:g}; store 0..255 as uint8"
            )
        return (images.transpose(0, 3, 1, 2) if channels_last else images).astype(np.float32)
    if not np.issubdtype(images.dtype, np.integer):
        raise ValueError(f"{where}: images must be integers 0..255 or normalised floats, got {images.dtype}")
    if images.size and (images.min() < 0 or images.max() > 255):
        raise ValueError(f"{where}: integer images must be in 0..255, got {images.min()}..{images.max()}")
    return (images if channels_last else images.transpose(0, 2, 3, 1)).astype(np.uint8)
