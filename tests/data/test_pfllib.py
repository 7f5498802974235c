import io
import json
import os
import pickle
import zipfile

import numpy as np
import pytest

from task.data.pfllib import Pfllib, read_client_file

RNG = np.random.default_rng(0)


def _images(n, shape=(1, 8, 8)):
    return RNG.uniform(-1, 1, (n, *shape)).astype(np.float32)


def _save(path, x, y):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, data={"x": x, "y": y})


def _folder(root, sizes=((4, 2), (3, 1)), config=None):
    for client, pair in enumerate(sizes):
        for part, n in zip(("train", "test"), pair, strict=True):
            _save(root / part / f"{client}.npz", _images(n), np.arange(n) % 3)
    if config is not None:
        (root / "config.json").write_text(json.dumps(config))
    return Pfllib(str(root))


def _save_pickle(path, content, dtype="|O"):
    """Write an archive whose member has the usual header and any pickle behind it."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": ()})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", header.getvalue() + content)


class _Call:
    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


def test_files_come_back_as_written(tmp_path):
    x, y = _images(5, (3, 8, 9)), np.array([0, 2, 1, 1, 0])
    _save(tmp_path / "0.npz", x, y)
    images, labels = read_client_file(tmp_path / "0.npz")
    np.testing.assert_array_equal(images, x)
    np.testing.assert_array_equal(labels, y)
    assert images.dtype == np.float32
    assert labels.dtype == np.int64


@pytest.mark.parametrize(
    "change",
    [np.asfortranarray, lambda x: x.astype(">f4"), lambda x: x.astype(np.float64)],
    ids=["fortran", "big-endian", "double"],
)
def test_memory_layouts(change, tmp_path):
    x = _images(4)
    _save(tmp_path / "0.npz", change(x), np.zeros(4, dtype=">i8"))
    np.testing.assert_array_equal(read_client_file(tmp_path / "0.npz")[0], x)


def test_pickles_of_numpy_1_are_read(tmp_path):
    content = pickle.dumps(np.array({"x": _images(2), "y": np.zeros(2, int)}, dtype=object), protocol=3)
    assert b"numpy._core.multiarray" in content or b"numpy.core.multiarray" in content
    _save_pickle(tmp_path / "0.npz", content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert read_client_file(tmp_path / "0.npz")[0].shape == (2, 1, 8, 8)


def test_plain_members_are_read_too(tmp_path):
    np.savez(tmp_path / "0.npz", x=np.full((2, 3, 8, 8), 9, np.uint8), y=[0, 1])
    images, _ = read_client_file(tmp_path / "0.npz")
    assert images.shape == (2, 8, 8, 3)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "call",
    [
        lambda target: _Call(os.system, f"touch {target}"),
        lambda target: _Call(eval, f"open({str(target)!r}, 'w')"),
        lambda target: _Call(np.save, str(target), 1),
        lambda _: _Call(getattr, "abc", "upper"),
    ],
    ids=["system", "eval", "numpy.save", "getattr"],
)
def test_hostile_pickles_are_refused(call, protocol, tmp_path):
    target = tmp_path / "made-by-the-pickle.npy"
    content = {"x": _images(1), "y": np.zeros(1, int), "more": call(target)}
    _save_pickle(tmp_path / "evil.npz", pickle.dumps(np.array(content, dtype=object), protocol))
    with pytest.raises(ValueError, match=r"evil\.npz: refused") as caught:
        read_client_file(tmp_path / "evil.npz")
    assert "\n" not in str(caught.value)
    assert not target.exists()


def test_a_file_cannot_spoil_the_next_one(tmp_path):
    # BUILD with a (None, attributes) state would set attributes on what find_class returned.
    for name in (b"numpy\nndarray", b"numpy\ndtype", b"numpy.core.multiarray\n_reconstruct"):
        content = b"c" + name + b"\n(N(V__defaults__\n(I1\ntdtb."
        _save_pickle(tmp_path / "evil.npz", content)
        with pytest.raises(ValueError, match=r"evil\.npz"):
            read_client_file(tmp_path / "evil.npz")
    _save(tmp_path / "0.npz", _images(2), np.zeros(2, int))
    assert len(read_client_file(tmp_path / "0.npz")[1]) == 2


@pytest.mark.parametrize(
    "content",
    [
        {"x": np.array([_images(1), None], dtype=object), "y": np.zeros(2, int)},
        {"x": np.array(["a", "b"]), "y": np.zeros(2, int)},
        np.zeros(3),
        b"not a pickle",
    ],
    ids=["objects", "strings", "no dictionary", "garbage"],
)
def test_other_content_is_refused(content, tmp_path):
    raw = content if isinstance(content, bytes) else pickle.dumps(content)
    _save_pickle(tmp_path / "odd.npz", raw)
    with pytest.raises(ValueError, match=r"odd\.npz"):
        read_client_file(tmp_path / "odd.npz")


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1, 2], np.zeros(2, int), "text data sets"),
        (np.zeros((2, 80), np.int64), np.zeros(2, int), "must be images"),
        (_images(2), np.zeros(3, int), "as many entries"),
        (_images(2), np.array([0.5, 1]), "whole numbers"),
        (np.full((2, 1, 8, 8), np.nan), np.zeros(2, int), "finite"),
    ],
)
def test_malformed_clients_are_named(x, y, message, tmp_path):
    _save(tmp_path / "3.npz", x, y)
    with pytest.raises(ValueError, match=message) as caught:
        read_client_file(tmp_path / "3.npz")
    assert str(caught.value).startswith(str(tmp_path / "3.npz"))


def test_missing_and_broken_archives_are_named(tmp_path):
    (tmp_path / "1.npz").write_bytes(b"PK")
    for name in ("0.npz", "1.npz"):
        with pytest.raises(ValueError, match=name):
            read_client_file(tmp_path / name)


@pytest.mark.parametrize(
    "config", [None, {}, {"num_clients": 2}, {"num_clients": 2, "num_classes": 5, "real_world": 1}]
)
def test_folder_with_or_without_config(config, tmp_path):
    raw = _folder(tmp_path, config=config).read()
    assert raw.images.shape == (10, 1, 8, 8)
    assert [(len(a), len(b)) for a, b in raw.given] == [(4, 2), (3, 1)]
    assert np.concatenate([i for pair in raw.given for i in pair]).tolist() == list(range(10))
    assert raw.is_test.sum() == 3
    expected = None if not config or "num_classes" not in config else ("0", "1", "2", "3", "4")
    assert raw.class_names == expected


def test_empty_clients_are_kept(tmp_path):
    source = _folder(tmp_path)
    _save(tmp_path / "train" / "2.npz", np.array([]), np.array([]))
    _save(tmp_path / "test" / "2.npz", np.array([]), np.array([]))
    assert [len(train) for train, _ in source.read().given] == [4, 3, 0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_clients": 3}, r"2\.npz"),
        ({"num_classes": 2}, r"label 2 is outside 0\.\.1"),
        ({"num_clients": "2"}, "num_clients must be a whole number"),
        ([], "JSON object"),
    ],
)
def test_config_that_does_not_fit(config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        _folder(tmp_path, config=config).read()


def test_broken_config_gap_and_foreign_folder_are_named(tmp_path):
    source = _folder(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: is not valid JSON"):
        source.read()
    source = _folder(tmp_path / "b")
    (tmp_path / "b" / "train" / "0.npz").unlink()
    with pytest.raises(ValueError, match=r"0\.npz: is missing"):
        source.read()
    with pytest.raises(ValueError, match=r"has no file train/0\.npz"):
        Pfllib(str(tmp_path / "none")).read()


def test_clients_of_different_shapes_are_named(tmp_path):
    source = _folder(tmp_path)
    _save(tmp_path / "test" / "1.npz", _images(1, (3, 8, 8)), np.zeros(1, int))
    with pytest.raises(ValueError, match=r"1\.npz: images are \(3, 8, 8\)"):
        source.read()


@pytest.mark.shared_data
def test_real_folder(shared_data):
    raw = Pfllib(str(shared_data / "pfllib_mnist5")).read()
    assert len(raw.given) == 20
    assert sum(len(train) for train, _ in raw.given) == 10507
    assert sum(len(test) for _, test in raw.given) == 3509
    assert raw.images.shape[1:] == (1, 28, 28)
    assert len(raw.class_names) == 10


@pytest.mark.shared_data
@pytest.mark.parametrize(("part", "n"), [("train", 374), ("test", 125)])
def test_shipped_client_of_numpy_1(shared_data, part, n):
    images, labels = read_client_file(shared_data / "pfllib_shipped_client" / f"{part}_1.npz")
    assert images.shape == (n, 1, 28, 28)
    assert labels.shape == (n,)
    assert -1 <= images.min() < images.max() <= 1
