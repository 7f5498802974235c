"""Data folders as HtFLlib and PFLlib write them, read without running the pickles inside.

A folder has ``train/<client>.npz`` and ``test/<client>.npz``, clients 0..M-1, and usually ``config.json``.
A file holds one member ``data``: a pickled dictionary of ``x`` (images, normalised already) and ``y``.
Unpickling runs code that the file chooses, so `read_client_file` uses an unpickler that knows three names of
NumPy and replaces even those by inert stand-ins. Files with plain members ``x`` and ``y`` are read as well.
"""

import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from task.data.sources import Array, Indices, RawImages, Source, absolute_path, read_npz, reason, standard_layout

ROOT_KEY = "data.source.root"
PLAIN_TYPE = re.compile(r"[biuf][1248]")


class _PickledType:
    """Stands in for ``numpy.dtype``: remembers a plain numeric type, or ``O`` for the outer wrapper."""

    def __init__(self, code: Any) -> None:
        self.code = code
        self.big_endian = False

    def __setstate__(self, state: Any) -> None:
        byte_order = state[1]
        if byte_order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"byte order {byte_order!r}")
        self.big_endian = byte_order == ">"

    def resolve(self) -> np.dtype[Any]:
        """Return the real type, numbers only."""
        if not isinstance(self.code, str) or PLAIN_TYPE.fullmatch(self.code) is None:
            raise pickle.UnpicklingError(f"an array of type {self.code!r}, only numbers are admitted")
        return np.dtype(self.code).newbyteorder(">" if self.big_endian else "<")


class _PickledArray:
    """Stands in for ``numpy.ndarray``: ends as a real array of numbers, or as the object in the wrapper."""

    def __init__(self) -> None:
        self.content: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _PickledType):
            raise pickle.UnpicklingError("an array without a type")
        if kind.code in ("O", "O8") and shape == () and isinstance(raw, list) and len(raw) == 1:
            self.content = raw[0]
        elif isinstance(raw, bytes):
            flat = np.frombuffer(raw, dtype=kind.resolve())
            self.content = flat.reshape(shape, order="F" if fortran else "C")
        else:
            raise pickle.UnpicklingError("an array of Python objects")


class _NumbersOnly(pickle.Unpickler):
    """An unpickler that admits three names of NumPy, whatever version wrote the file."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return an inert stand-in, new at every call so that a file cannot alter it for the next one."""
        if (module, name) in (
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
        ):
            return lambda *_: _PickledArray()
        if (module, name) == ("numpy", "dtype"):
            return lambda code, *_: _PickledType(code)
        if (module, name) == ("numpy", "ndarray"):
            return lambda *_: None
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unwrap(value: Any) -> Any:
    return value.content if isinstance(value, _PickledArray) else value


def _load_restricted(stream: BinaryIO) -> Any:
    """Read one ``.npy`` member whose content is a pickle."""
    version = npy_format.read_magic(stream)
    if version == (1, 0):
        _, _, dtype = npy_format.read_array_header_1_0(stream)
    elif version == (2, 0):
        _, _, dtype = npy_format.read_array_header_2_0(stream)
    else:
        raise pickle.UnpicklingError(f"member data.npy has format version {version}")
    if not dtype.hasobject:
        raise pickle.UnpicklingError("member data.npy is no pickled dictionary")
    return _unwrap(_NumbersOnly(stream).load())


def read_client_file(path: Path) -> tuple[Array, Array]:
    """Return images and labels of one file of one client.

    Returns
    -------
    tuple
        ``(n, ch, H, W)`` float32, or ``(n, H, W, ch)`` uint8, and labels ``(n,)`` int64. An empty file gives
        images of shape ``(0,)``.

    Raises
    ------
    ValueError
        Naming the file, when it is missing or broken, asks for any other name in its pickle, or does not
        hold images with as many labels.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if "data.npy" not in archive.namelist():
                content: Any = read_npz(path)
            else:
                content = _load_restricted(io.BytesIO(archive.read("data.npy")))
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path}: cannot be read ({reason(error)})") from error
    except Exception as error:
        # A hostile pickle can make the unpickler fail with any exception; none may end in a stack trace.
        what = f"its pickle is not a plain dictionary of arrays ({reason(error)})"
        raise ValueError(f"{path}: refused, {what}") from error
    if not isinstance(content, dict) or not {"x", "y"} <= content.keys():
        raise ValueError(f"{path}: must hold a dictionary with x and y")
    return _check_pair(_unwrap(content["x"]), _unwrap(content["y"]), path)


def _check_pair(images: Any, labels: Any, path: Path) -> tuple[Array, Array]:
    """Check that images and labels belong together."""
    if not isinstance(images, np.ndarray) or not isinstance(labels, np.ndarray):
        raise ValueError(f"{path}: x and y must be arrays of numbers (text data sets are not supported)")
    if len(labels.shape) != 1 or images.shape[:1] != labels.shape:
        raise ValueError(f"{path}: y must be (n,) with as many entries as x, got {labels.shape} and {images.shape}")
    if labels.size == 0:
        return np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int64)
    with np.errstate(invalid="ignore"):  # what is no whole number is refused here
        whole = labels.astype(np.int64) if labels.dtype.kind in "iuf" else None
    if whole is None or not np.array_equal(labels, whole):
        raise ValueError(f"{path}: y must be whole numbers, got type {labels.dtype}")
    if images.ndim != 4:
        raise ValueError(f"{path}: x must be images (n, ch, H, W), got shape {images.shape}")
    return standard_layout(images, f"{path}: x"), whole


@dataclass(frozen=True)
class Pfllib(Source):
    """A data folder of HtFLlib or PFLlib, already split by client; use it with ``partition=given``.

    Parameters
    ----------
    root
        Absolute path of the folder that holds ``train/`` and ``test/``.
    """

    root: str

    def __post_init__(self) -> None:
        absolute_path(self.root, ROOT_KEY)

    def files(self) -> Iterable[Path]:
        """Return ``config.json`` and the files of all clients."""
        root = absolute_path(self.root, ROOT_KEY)
        return [root / "config.json", *root.glob("train/*.npz"), *root.glob("test/*.npz")]

    def read(self) -> RawImages:
        """Read all clients, each with its training file before its test file."""
        root = absolute_path(self.root, ROOT_KEY)
        num_clients, num_classes = _read_config(root)
        images: list[Array] = []
        labels: list[Array] = []
        is_test: list[Array] = []
        given: list[tuple[Indices, Indices]] = []
        position = 0
        for client in range(_count_clients(root) if num_clients is None else num_clients):
            parts = []
            for part in ("train", "test"):
                path = root / part / f"{client}.npz"
                x, y = read_client_file(path)
                _check_against(x, y, images, num_classes, path)
                if len(y):
                    images.append(x)
                labels.append(y)
                is_test.append(np.full(len(y), part == "test"))
                parts.append(np.arange(position, position + len(y), dtype=np.int64))
                position += len(y)
            given.append((parts[0], parts[1]))
        if not images:
            raise ValueError(f"{ROOT_KEY}: {root} holds no sample")
        names = None if num_classes is None else tuple(str(label) for label in range(num_classes))
        return RawImages(np.concatenate(images), np.concatenate(labels), np.concatenate(is_test), names, tuple(given))


def _check_against(x: Array, y: Array, images: list[Array], num_classes: int | None, path: Path) -> None:
    """Check one file against the files before it and the number of classes."""
    if len(y) and images and (x.shape[1:], x.dtype) != (images[0].shape[1:], images[0].dtype):
        raise ValueError(f"{path}: images are {x.shape[1:]} {x.dtype}, before {images[0].shape[1:]} {images[0].dtype}")
    if num_classes is not None and len(y) and (y.min() < 0 or y.max() >= num_classes):
        outside = y.min() if y.min() < 0 else y.max()
        raise ValueError(f"{path}: label {outside} is outside 0..{num_classes - 1}, the classes of config.json")


def _read_config(root: Path) -> tuple[int | None, int | None]:
    """Return the numbers of clients and classes that ``config.json`` gives; the rest of it is not needed."""
    path = root / "config.json"
    if not path.is_file():
        return None, None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not valid JSON ({reason(error)})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must be a JSON object")
    counts = []
    for key in ("num_clients", "num_classes"):
        value = config.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{path}: {key} must be a whole number of at least 1, got {value!r}")
        counts.append(value)
    return counts[0], counts[1]


def _count_clients(root: Path) -> int:
    """Count the clients by their training files, which must be 0..M-1."""
    numbers = sorted(int(path.stem) for path in root.glob("train/*.npz") if path.stem.isdecimal())
    if not numbers:
        raise ValueError(f"{ROOT_KEY}: {root} has no file train/0.npz; is it a data folder of HtFLlib or PFLlib?")
    if numbers != list(range(len(numbers))):
        missing = min(set(range(len(numbers))) - set(numbers))
        raise ValueError(f"{root / 'train' / f'{missing}.npz'}: is missing, the folder goes up to {numbers[-1]}.npz")
    return len(numbers)
