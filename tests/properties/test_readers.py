"""Readers of data folders under bounded fuzz: what they return is what was written, or one line says what is wrong."""

import io
import os
import pickle
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from task.data.folders import ImageFolder, TinyImagenet
from task.data.pfllib import Pfllib, read_client_file
from task.data.prepare import _load, _prepare, prepare
from task.data.sources import Npz, RawImages, Source
from task.data.vision import Mnist
from tests.properties.attempts import attempt

SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
IMAGES = np.random.default_rng(0).integers(0, 256, (6, 9, 8, 3)).astype(np.uint8)
LABELS = np.arange(6) % 3


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def check(raw: RawImages) -> None:
    """Check what every source promises of what it returns."""
    assert raw.images.dtype in (np.uint8, np.float32)
    assert len(raw.images) == len(raw.labels) == len(raw.is_test)
    assert raw.images.dtype == np.uint8 or bool(np.isfinite(raw.images).all())


def prepared(source: Source, cache: Path) -> Any:
    """Return the prepared data set, read anew."""
    _prepare.cache_clear()
    return prepare(source, cache)


@st.composite
def damages(draw: Any) -> Any:
    """Draw a way to damage bytes: cut them off, flip some, or put others in their place."""
    cut, seed, flips = draw(st.floats(0, 1)), draw(st.integers(0, 999)), draw(st.integers(1, 8))
    kind = draw(st.sampled_from(["cut", "flip", "noise", "empty"]))

    def damage(data: bytes) -> bytes:
        if kind == "cut":
            return data[: int(cut * (len(data) - 1))]
        if kind == "empty":
            return b""
        rng, array = np.random.default_rng(seed), np.frombuffer(data, np.uint8).copy()
        if kind == "noise":
            return rng.integers(0, 256, len(array), dtype=np.uint8).tobytes()
        array[rng.integers(0, len(array), flips)] ^= rng.integers(1, 256, flips, dtype=np.uint8)
        return array.tobytes()

    return damage


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@SOME
@given(damage=damages())
def test_a_damaged_npz_is_what_it_was_or_is_refused_by_name(save: Any, damage: Any) -> None:
    with folder() as place:
        path = place / "mine.npz"
        save(path, x=IMAGES, y=LABELS)
        path.write_bytes(damage(path.read_bytes()))
        raw, refusal = attempt(Npz(path=str(path)).read)
        if raw is None:
            assert str(path) in refusal
        else:
            assert np.array_equal(raw.images, IMAGES)
            assert np.array_equal(raw.labels, LABELS)


ARRAYS = hnp.arrays(
    dtype=st.one_of(
        hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.boolean_dtypes(), hnp.complex_number_dtypes(),
        hnp.unicode_string_dtypes(max_len=3), hnp.byte_string_dtypes(max_len=3), hnp.datetime64_dtypes(),
    ),
    shape=hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    x=st.one_of(ARRAYS, st.just(IMAGES[:4])),
    y=st.one_of(ARRAYS, st.just(LABELS[:4])),
    names=st.one_of(st.none(), ARRAYS, st.just(np.array(["a", "b", "c"]))),
)
def test_arrays_of_any_type_and_shape_are_read_or_refused(x: Any, y: Any, names: Any) -> None:
    with folder() as place:
        path = place / "mine.npz"
        np.savez(path, x=x, y=y, **({} if names is None else {"class_names": names}))
        raw, _ = attempt(Npz(path=str(path)).read)
        if raw is not None:
            check(raw)
        dataset, _ = attempt(lambda: prepared(Npz(path=str(path)), place / "cache"))
        if dataset is not None:
            assert -1 <= dataset.labels.min() <= dataset.labels.max() < dataset.num_classes
            if y.dtype.kind in "biu" and names is None:  # every sample keeps its own label
                found = [dataset.class_names[label] for label in dataset.labels]
                assert found == [str(int(label)) for label in y.reshape(len(y))]


@SOME
@given(damage=damages(), kind=st.sampled_from(["png", "jpg", "gif", "bmp", "webp", "tiff", "ppm"]))
def test_a_damaged_image_is_decoded_or_refused_by_name(damage: Any, kind: str) -> None:
    with folder() as place:
        (place / "a").mkdir()
        path = place / "a" / f"picture.{kind}"
        Image.fromarray(IMAGES[0]).save(path)
        path.write_bytes(damage(path.read_bytes()))
        for mode in ("auto", "rgb"):
            raw, refusal = attempt(lambda mode=mode: ImageFolder(root=str(place), mode=mode, resize=9).read())  # type: ignore[misc]
            if raw is None:
                assert str(path) in refusal
            else:
                check(raw)


NAMES = st.one_of(
    st.text(st.characters(exclude_characters="/\x00"), min_size=1, max_size=12),
    st.sampled_from(["a\nb", "ü ö", ".hidden", "x.png", "-rf", "~", "$HOME", "..."]),
    st.binary(min_size=1, max_size=6).map(lambda name: os.fsdecode(name.replace(b"/", b"-").replace(b"\x00", b"0"))),
)


@SOME
@given(names=st.lists(NAMES, min_size=1, max_size=3, unique=True), suffix=st.sampled_from([".png", ".PNG", "", ".txt"]))
def test_odd_names_of_folders_and_files_are_read_or_refused(names: list[str], suffix: str) -> None:
    with folder() as place:
        root = place / "root"
        for name in names:
            try:
                (root / name).mkdir(parents=True)
                Image.fromarray(IMAGES[0]).save(root / name / "plain.png")
                (root / name / f"{name}{suffix}").write_bytes((root / name / "plain.png").read_bytes())
            except (OSError, ValueError):  # this file system has no such names
                return
        source = ImageFolder(root=str(root))
        raw, _ = attempt(source.read)
        if raw is not None:
            check(raw)
            assert set(raw.class_names or ()) <= set(names)
        dataset, _ = attempt(lambda: prepared(source, place / "cache"))
        if dataset is not None:
            assert set(dataset.class_names) <= set(names)


@pytest.mark.parametrize("source", [ImageFolder, TinyImagenet, Pfllib, Mnist])
@pytest.mark.parametrize("made", ["nothing", "empty", "file", "empty classes", "empty parts"])
def test_folders_without_anything_are_refused(source: Any, made: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    if made == "file":
        root.write_text("a file")
    elif made != "nothing":
        root.mkdir()
    for name in {"empty classes": ["train/a", "train/b"], "empty parts": ["train", "test"]}.get(made, []):
        (root / name).mkdir(parents=True)
    raw, refusal = attempt(source(root=str(root)).read)
    assert raw is None
    assert str(root) in refusal


def write_client(path: Path, content: bytes | None = None) -> None:
    """Write one client's file as PFLlib does: an ``.npz`` with one pickled dictionary, or other bytes in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = (IMAGES.transpose(0, 3, 1, 2) / 127.5 - 1).astype(np.float32)
    np.savez(path, data=np.array({"x": images, "y": LABELS}, dtype=object))
    if content is not None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data.npy", content)


@SOME
@given(damage=damages(), inside=st.booleans())
def test_a_damaged_client_file_is_read_or_refused_by_name(damage: Any, inside: bool) -> None:
    with folder() as place:
        path = place / "train" / "0.npz"
        write_client(path)
        if inside:  # below the archive's checksum, where only the unpickler looks
            with zipfile.ZipFile(path) as archive:
                member = archive.read("data.npy")
            write_client(path, damage(member))
        else:
            path.write_bytes(damage(path.read_bytes()))
        pair, refusal = attempt(lambda: read_client_file(path))
        if pair is None:
            assert str(path) in refusal
        else:
            assert len(pair[0]) == len(pair[1])
            assert bool(np.isfinite(pair[0]).all())


@SOME
@given(
    config=st.one_of(
        st.text(max_size=20),
        st.sampled_from(
            ["[" * 100_000, "{}", "[]", '{"num_clients": 2}', '{"num_clients": 1e99}', '{"num_classes": 2}']
        ),
    ),
    names=st.lists(st.sampled_from(["0", "1", "00", "-1", "x", "3", "\u0663", " 0"]), max_size=4, unique=True),
)
def test_odd_client_folders_are_read_or_refused(config: str, names: list[str]) -> None:
    with folder() as place:
        for name in names:
            for part in ("train", "test"):
                write_client(place / part / f"{name}.npz")
        (place / "config.json").write_text(config, "utf-8")
        raw, _ = attempt(Pfllib(root=str(place)).read)
        if raw is not None:
            check(raw)
            assert raw.given is not None
            assert sum(len(part) for pair in raw.given for part in pair) == len(raw.labels)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "broken-in"),)

    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|O", "fortran_order": False, "shape": ()})
    write_client(tmp_path / "train" / "0.npz", buffer.getvalue() + pickle.dumps(Evil()))
    pair, refusal = attempt(lambda: read_client_file(tmp_path / "train" / "0.npz"))
    assert pair is None
    assert "refused" in refusal
    assert not (tmp_path / "broken-in").exists()


@SOME
@given(damage=damages(), which=st.integers(0, 9))
def test_damaged_prepared_files_are_refused_with_the_folder_to_delete(damage: Any, which: int) -> None:
    with folder() as place:
        path = place / "mine.npz"
        np.savez(path, x=IMAGES, y=LABELS)
        made = prepared(Npz(path=str(path)), place / "cache").folder
        files = sorted(made.iterdir())
        victim = files[which % len(files)]
        victim.write_bytes(damage(victim.read_bytes()))
        dataset, refusal = attempt(lambda: _load(made))
        if dataset is None:
            assert f"{made}: prepared data is damaged, delete this folder" in refusal
        else:
            assert dataset.images.ndim == 4
            assert len(dataset.images) == len(dataset.labels)


def idx(array: Any) -> bytes:
    """Return an array of bytes in the format of MNIST's files."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(side).to_bytes(4, "big") for side in array.shape)
    return header + array.astype(np.uint8).tobytes()


@SOME
@given(damage=damages(), which=st.sampled_from(["images-idx3", "labels-idx1"]))
def test_damaged_files_of_torchvision_are_read_or_refused(damage: Any, which: str) -> None:
    with folder() as place:
        raw_folder = place / "MNIST" / "raw"
        raw_folder.mkdir(parents=True)
        for part in ("train", "t10k"):
            (raw_folder / f"{part}-images-idx3-ubyte").write_bytes(idx(IMAGES[..., 0]))
            (raw_folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(LABELS))
        victim = raw_folder / f"train-{which}-ubyte"
        victim.write_bytes(damage(victim.read_bytes()))
        raw, refusal = attempt(Mnist(root=str(place)).read)
        if raw is None:
            assert str(place) in refusal
        else:
            check(raw)
