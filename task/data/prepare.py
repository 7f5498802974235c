"""From a source to plain arrays on disk: prepared once under a lock, then memory-mapped by every process."""

import difflib
import hashlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from task.data.labels import encode_labels
from task.data.sources import Array, Indices, RawImages, Source, absolute_path, reason

# Part of the cache key: raise it when the files below change their meaning.
FORMAT = 1
CACHE_KEY = "data.cache_dir"


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """A prepared data set; the images stay on disk until somebody indexes them.

    Attributes
    ----------
    images
        ``(N, ch, H, W)``, uint8 (0..255) or float32 (normalised already), memory-mapped and read-only.
    labels
        ``(N,)`` int64 in 0..C-1.
    is_test
        ``(N,)`` bool, the source's own test split.
    class_names
        The C class names.
    label_mapping
        The source's label, as text, -> class index.
    given
        ``(train indices, test indices)`` of each client, when the source is split by client already.
    folder
        Where the prepared files lie.
    """

    images: Array
    labels: npt.NDArray[np.int64]
    is_test: npt.NDArray[np.bool_]
    class_names: tuple[str, ...]
    label_mapping: dict[str, int]
    given: tuple[tuple[Indices, Indices], ...] | None
    folder: Path

    @property
    def num_classes(self) -> int:
        """C, including classes without a sample."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """``(ch, H, W)``."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def with_classes(self, names: tuple[str, ...], where: str) -> "ImageDataset":
        """Return the data set with its labels in the order of ``names``, which may be more than its own classes.

        Raises
        ------
        ValueError
            One line that begins with ``where``, for a class of these images that is not among ``names``.
        """
        if names == self.class_names:
            return self
        unknown = [name for name in self.class_names if name not in names]
        if unknown:
            close = difflib.get_close_matches(unknown[0], names, n=1)
            nearest = f" (nearest: {close[0]!r})" if close else ""
            listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise ValueError(f"{where}: class {unknown[0]!r} is not among the {len(names)} agreed: {listed}{nearest}")
        position_C = np.array([names.index(name) for name in self.class_names], dtype=np.int64)
        labels = np.where(self.labels < 0, self.labels, position_C[self.labels])
        mapping = {label: int(position_C[index]) for label, index in self.label_mapping.items()}
        return replace(self, labels=labels, class_names=names, label_mapping=mapping)

    @cached_property
    def digest(self) -> str:
        """The name of the prepared folder: equal for equal data."""
        return self.folder.name


def prepare(source: Source, cache_dir: str | Path | None = None) -> ImageDataset:
    """Return the data set of a source, preparing it first when no earlier run has.

    Processes that ask at the same time wait for one of them. Within a process a data set is mapped once.

    Parameters
    ----------
    source
        Settings of the source.
    cache_dir
        Absolute folder for prepared data; None means ``protofed`` below ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises
    ------
    ValueError
        In one line, when the source cannot be read or the cache cannot be written.
    """
    return _prepare(source, cache_root(cache_dir))


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Return the absolute folder for prepared data."""
    if cache_dir is not None:
        return absolute_path(str(cache_dir), CACHE_KEY)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "protofed"


@lru_cache(maxsize=8)
def _prepare(source: Source, root: Path) -> ImageDataset:
    source.fetch()
    key = f"{FORMAT} {source.fingerprint()}"
    folder = root / f"{type(source).__name__.lower()}-{hashlib.sha256(key.encode()).hexdigest()[:20]}"
    if not folder.is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with FileLock(root / f"{folder.name}.lock"):
                if not folder.is_dir():
                    _write(source.read(), folder)
        except OSError as error:
            raise ValueError(f"{CACHE_KEY}: prepared data cannot be written to {root} ({error})") from error
    return _load(folder)


def _write(raw: RawImages, folder: Path) -> None:
    """Write all files into a temporary folder and rename it: a folder with the final name is complete."""
    images = _channels_first(raw)
    try:
        labels, class_names, mapping = encode_labels(raw.labels, raw.class_names)
    except ValueError as error:
        raise ValueError(f"data.source: {error}") from error
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        np.save(temporary / "images.npy", images, allow_pickle=False)
        np.save(temporary / "labels.npy", labels, allow_pickle=False)
        np.save(temporary / "is_test.npy", raw.is_test, allow_pickle=False)
        meta: dict[str, Any] = {
            "class_names": class_names,
            "label_mapping": mapping,
            "given": raw.given is not None,
        }
        if raw.given is not None:
            parts = [part for pair in raw.given for part in pair]
            np.save(temporary / "given_indices.npy", np.concatenate(parts), allow_pickle=False)
            np.save(temporary / "given_sizes.npy", np.array([len(p) for p in parts]), allow_pickle=False)
        text = json.dumps(meta, ensure_ascii=False, indent=1)
        (temporary / "meta.json").write_text(text, encoding="utf-8")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _channels_first(raw: RawImages) -> Array:
    """Return contiguous ``(N, ch, H, W)`` images after checking what the source delivered."""
    images = raw.images
    if len(images) == 0:
        raise ValueError("data.source: there is no image")
    assert len(images) == len(raw.labels) == len(raw.is_test), "a source must give one label for each image"
    if images.dtype == np.uint8:
        images = images[..., None] if images.ndim == 3 else images
        assert images.ndim == 4, f"uint8 images must be (N, H, W, ch), got {images.shape}"
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    assert images.dtype == np.float32, f"images must be uint8 or float32, got {images.dtype}"
    assert images.ndim == 4, f"float images must be (N, ch, H, W), got {images.shape}"
    return np.ascontiguousarray(images)


def _load(folder: Path) -> ImageDataset:
    """Map the prepared files.

    Raises
    ------
    ValueError
        Naming the folder to delete, when its content is damaged.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        images = np.load(folder / "images.npy", mmap_mode="r", allow_pickle=False)
        labels = np.load(folder / "labels.npy", allow_pickle=False)
        is_test = np.load(folder / "is_test.npy", allow_pickle=False)
        given = _load_given(folder) if meta["given"] else None
        names, mapping = tuple(meta["class_names"]), dict(meta["label_mapping"])
        if not len(images) == len(labels) == len(is_test):
            raise ValueError("arrays of different lengths")
        if images.ndim != 4 or not -1 <= labels.min() <= labels.max() < len(names):
            raise ValueError("images or labels that no source makes")
    except Exception as error:  # NumPy's reader raises whatever it trips over in a damaged file
        raise ValueError(f"{folder}: prepared data is damaged, delete this folder ({reason(error)})") from error
    return ImageDataset(images, labels, is_test, names, mapping, given, folder)


def _load_given(folder: Path) -> tuple[tuple[Indices, Indices], ...]:
    """Return the (train, test) indices of each client."""
    indices = np.load(folder / "given_indices.npy", allow_pickle=False)
    sizes = np.load(folder / "given_sizes.npy", allow_pickle=False)
    parts = np.split(indices, np.cumsum(sizes)[:-1])
    return tuple(zip(parts[::2], parts[1::2], strict=True))
