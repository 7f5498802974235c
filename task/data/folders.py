"""Folders of image files: one sub-folder for each class, and Tiny-ImageNet-200."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from task.data.noise import Noise
from task.data.sources import Array, RawImages, Source, absolute_path, check_resize, reason

ROOT_KEY = "data.source.root"
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"})
MODES = {"auto": "", "rgb": "RGB", "grey": "L"}
# What "auto" makes of a file's own mode; anything else (alpha, CMYK, 16 bit) needs a decision by the user.
AUTO_MODES = {"RGB": "RGB", "L": "L", "1": "L", "P": "RGB"}


@dataclass(frozen=True)
class ImageFolder(Source):
    """Images in ``root/<class>/...``, or in ``root/train/<class>/...`` and ``root/test/<class>/...``.

    The classes are the sorted names of the sub-folders; a class may be empty.

    Parameters
    ----------
    root
        Absolute path of the folder.
    resize
        Edge length in pixels of the square that every image is resized to (bilinear), or null when all
        images have one size already.
    mode
        ``rgb`` and ``grey`` convert every image; ``auto`` takes the first image's mode and refuses others.
    """

    root: str
    resize: int | None = None
    mode: str = "auto"

    def __post_init__(self) -> None:
        absolute_path(self.root, ROOT_KEY)
        check_resize(self.resize)
        if self.mode not in MODES:
            raise ValueError(f"data.source.mode: must be one of {', '.join(MODES)}, got {self.mode!r}")

    def files(self) -> Iterable[Path]:
        """Return all image files."""
        return [path for _, folder in self._class_folders() for path in _images_below(folder)]

    def read(self) -> RawImages:
        """Decode all files, class by class in sorted order, training part first."""
        folders = self._class_folders()
        if not folders:
            raise ValueError(f"{ROOT_KEY}: {absolute_path(self.root, ROOT_KEY)} has no sub-folder for each class")
        class_names = tuple(sorted({folder.name for _, folder in folders}))
        paths: list[Path] = []
        labels: list[str] = []
        is_test: list[bool] = []
        for test, folder in folders:
            found = _images_below(folder)
            paths += found
            labels += [folder.name] * len(found)
            is_test += [test] * len(found)
        images = decode(paths, self.resize, self.mode, absolute_path(self.root, ROOT_KEY))
        return RawImages(images, np.asarray(labels), np.asarray(is_test, dtype=np.bool_), class_names)

    def _class_folders(self) -> list[tuple[bool, Path]]:
        """Return (is it for testing, folder) of every class in every part."""
        root = absolute_path(self.root, ROOT_KEY)
        split = _subfolders(root / "train") != []
        parts = [(False, root / "train"), (True, root / "test")] if split else [(False, root)]
        return [(test, folder) for test, part in parts for folder in _subfolders(part)]


@dataclass(frozen=True)
class TinyImagenet(Source):
    """The training folder of Tiny-ImageNet-200: 100,000 images, 3x64x64, 200 classes.

    As in PFLlib the validation folder stays unused (the test folder has no labels).

    Parameters
    ----------
    root
        Absolute path of the folder ``tiny-imagenet-200``.
    """

    root: str

    def __post_init__(self) -> None:
        absolute_path(self.root, ROOT_KEY)

    def stand_in(self) -> Source:
        """Return noise of the same shape and number of classes."""
        return Noise(edge=64, channels=3, num_classes=200)

    def files(self) -> Iterable[Path]:
        """Return all training images."""
        return [path for folder in self._class_folders() for path in _images_below(folder)]

    def read(self) -> RawImages:
        """Decode all training images; classes in the order of their WordNet ids."""
        root = absolute_path(self.root, ROOT_KEY)
        folders = self._class_folders()
        if not folders:
            raise ValueError(f"{ROOT_KEY}: {root} has no folder train/ with a sub-folder for each class")
        paths = [_images_below(folder) for folder in folders]
        names = tuple(folder.name for folder in folders)
        labels = np.repeat(np.asarray(names), [len(found) for found in paths])
        images = decode([path for found in paths for path in found], None, "rgb", root)
        return RawImages(images, labels, np.zeros(len(labels), dtype=np.bool_), names)

    def _class_folders(self) -> list[Path]:
        return _subfolders(absolute_path(self.root, ROOT_KEY) / "train")


def _subfolders(folder: Path) -> list[Path]:
    """Return the visible sub-folders in order of their names; none where there is no such folder."""
    if not folder.is_dir():
        return []
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return _with_plain_names(found)


def _images_below(folder: Path) -> list[Path]:
    """Return the image files below a folder in a fixed order."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))
    return _with_plain_names(sorted(path for path in found if not path.is_dir()))


def _with_plain_names(paths: list[Path]) -> list[Path]:
    """Return the paths, all of whose names can be printed in one line and written as text.

    Raises
    ------
    ValueError
        With the first that cannot: names with control characters, or in another encoding than UTF-8.
    """
    odd = next((path for path in paths if not str(path).isprintable()), None)
    if odd is not None:
        raise ValueError(f"{ROOT_KEY}: the name {str(odd)!a} is not printable text; rename it")
    return paths


def decode(paths: Sequence[Path], resize: int | None, mode: str, root: Path) -> Array:
    """Decode image files into one array.

    Parameters
    ----------
    paths
        N files.
    resize
        Edge length of the square, or None: all must have the size of the first.
    mode
        ``auto``, ``rgb`` or ``grey``.
    root
        The folder to blame when there is no file.

    Returns
    -------
    numpy.ndarray
        ``(N, H, W)`` or ``(N, H, W, 3)`` uint8.

    Raises
    ------
    ValueError
        Naming the file that is broken, or that differs from the first in size or mode.
    """
    if not paths:
        raise ValueError(f"{ROOT_KEY}: {root} holds no image ({', '.join(sorted(SUFFIXES))})")
    first = _decode_one(paths[0], resize, MODES[mode])
    target = "L" if first.ndim == 2 else "RGB"
    images = np.empty((len(paths), *first.shape), dtype=np.uint8)
    for row, path in enumerate(paths):
        image = _decode_one(path, resize, MODES[mode])
        if image.ndim != first.ndim:
            raise ValueError(f"{path}: is not {target} as {paths[0]} is; set data.source.mode to rgb or grey")
        if image.shape != first.shape:
            raise ValueError(
                f"{path}: is {image.shape[1]}x{image.shape[0]} pixels, {paths[0].name} is "
                f"{first.shape[1]}x{first.shape[0]}; set data.source.resize"
            )
        images[row] = image
    return images


def _decode_one(path: Path, resize: int | None, target: str) -> Array:
    """Return ``(H, W)`` or ``(H, W, 3)`` uint8; an empty ``target`` keeps the file's own mode."""
    from PIL import Image

    problem = ""
    try:
        with Image.open(path) as image:
            wanted = target or AUTO_MODES.get(image.mode, "")
            if wanted and not image.mode.startswith(("I", "F")):
                pixels = image.convert(wanted)
                if resize is not None:
                    pixels = pixels.resize((resize, resize), Image.Resampling.BILINEAR)
                return np.asarray(pixels)
            problem = "only 8 bits a channel are supported"
            if not wanted:
                problem = "expected L or RGB; set data.source.mode to rgb or grey"
            problem = f"has mode {image.mode}, {problem}"
    except Exception as error:  # a damaged file makes the decoders raise whatever they trip over
        raise ValueError(f"{path}: cannot be read as an image ({reason(error)})") from error
    raise ValueError(f"{path}: {problem}")
