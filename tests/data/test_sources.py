import dataclasses
import importlib
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from task.data.sources import Digits, FashionSmall, Npz, standard_layout

CONF = Path(__file__).parents[2] / "conf"


def _class(target):
    module, name = target.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", sorted((CONF / "data").glob("*.yaml")), ids=lambda path: path.stem)
def test_data_yaml_lists_every_setting(path, tmp_path):
    config = OmegaConf.load(path)
    assert config.name == path.stem
    missing = [key for key in config.source if OmegaConf.is_missing(config.source, key)]
    settings = OmegaConf.to_container(config.source, throw_on_missing=False)
    kind = _class(settings.pop("_target_"))
    assert set(settings) == {field.name for field in dataclasses.fields(kind)}
    kind(**{**settings, **dict.fromkeys(missing, str(tmp_path))})


SCHEMES = sorted(path for path in (CONF / "partition").glob("*.yaml") if "_target_" in path.read_text())  # no variants


@pytest.mark.parametrize("path", SCHEMES, ids=lambda path: path.stem)
def test_partition_yaml_gives_the_defaults(path):
    settings = OmegaConf.to_container(OmegaConf.load(path))
    kind = _class(settings.pop("_target_"))
    assert set(settings) == {field.name for field in dataclasses.fields(kind)}
    assert kind(**settings) == kind()


def test_fashion_small_is_complete_and_balanced():
    raw = FashionSmall().read()
    assert raw.images.shape[:3] == (5000, 28, 28)
    assert raw.images.dtype == np.uint8
    assert raw.is_test.sum() == 1000
    assert np.bincount(raw.labels).tolist() == [500] * 10
    assert len(raw.class_names) == 10


def test_digits_are_enlarged_and_use_the_whole_range():
    raw = Digits(resize=28).read()
    assert raw.images.shape == (1797, 28, 28)
    assert raw.images.max() == 255
    assert sorted(set(raw.labels.tolist())) == list(range(10))


def test_npz_with_one_part(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 9, 9, 3), np.uint8), y=np.array(["u", "v", "u", "v"]))
    raw = Npz(str(tmp_path / "a.npz")).read()
    assert raw.images.shape == (4, 9, 9, 3)
    assert not raw.is_test.any()
    assert raw.class_names is None


def test_npz_with_two_parts_and_names(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3, 8, 8))
    arrays = {"x_train": x[:3], "y_train": [[0], [1], [2]], "x_test": x[3:], "y_test": [[0], [1]]}
    np.savez(tmp_path / "a.npz", **arrays, class_names=["a", "b", "c", "d"])
    raw = Npz(str(tmp_path / "a.npz")).read()
    assert raw.images.dtype == np.float32
    np.testing.assert_allclose(raw.images, x, rtol=1e-6)
    assert raw.is_test.tolist() == [False] * 3 + [True] * 2
    assert raw.class_names == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 8, 8), np.uint8)}, "needs x and y"),
        ({"x": np.zeros((2, 8, 8), np.uint8), "y": np.zeros(3)}, "N = 2"),
        ({"x": np.zeros((2, 8, 8, 4), np.uint8), "y": np.zeros(2)}, "1 or 3 channels"),
        ({"x": np.full((2, 8, 8), 255.0), "y": np.zeros(2)}, "as uint8"),
        ({"x": np.full((2, 8, 8), np.nan), "y": np.zeros(2)}, "finite"),
        ({"x": np.full((2, 8, 8), 300), "y": np.zeros(2)}, r"0\.\.255"),
        ({"x": np.full((2, 8, 8), "a"), "y": np.zeros(2)}, "integers"),
        ({"x": np.array([None, 1]), "y": np.zeros(2)}, "allow_pickle"),
    ],
)
def test_malformed_npz_is_refused_in_one_line_with_its_name(arrays, message, tmp_path):
    np.savez(tmp_path / "odd.npz", **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        Npz(str(tmp_path / "odd.npz")).read()
    assert "odd.npz" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parts_that_do_not_fit_are_refused(tmp_path):
    arrays = {"y_train": [0], "y_test": [0], "x_train": np.zeros((1, 8, 8), np.uint8)}
    np.savez(tmp_path / "a.npz", x_test=np.zeros((1, 9, 8), np.uint8), **arrays)
    with pytest.raises(ValueError, match="differ in shape"):
        Npz(str(tmp_path / "a.npz")).read()


def test_missing_and_foreign_files_are_named(tmp_path):
    for name in ("none.npz", "text.npz", "one.npy"):
        if name == "text.npz":
            (tmp_path / name).write_text("no archive")
        if name == "one.npy":
            np.save(tmp_path / name, np.zeros(3))
        with pytest.raises(ValueError, match=name):
            Npz(str(tmp_path / name)).read()


@pytest.mark.parametrize("path", ["", "data/a.npz", "./a.npz"])
def test_relative_paths_are_refused(path):
    with pytest.raises(ValueError, match=r"data\.source\.path: must be an absolute path"):
        Npz(path)


def test_home_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(Npz("~/a.npz").files()) == [tmp_path / "a.npz"]


def test_sizes_are_checked():
    with pytest.raises(ValueError, match=r"data\.source\.resize: .* between 8 and 1024"):
        Digits(resize=4)


def test_fingerprint_follows_the_file(tmp_path):
    source = Npz(str(tmp_path / "a.npz"))
    absent = source.fingerprint()
    np.savez(tmp_path / "a.npz", x=np.zeros((1, 8, 8), np.uint8), y=[0])
    first = source.fingerprint()
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 8, 8), np.uint8), y=[0, 1])
    assert len({absent, first, source.fingerprint()}) == 3


def test_layouts_agree():
    rng = np.random.default_rng(0)
    last = rng.integers(0, 256, (2, 10, 12, 3), dtype=np.uint8)
    np.testing.assert_array_equal(standard_layout(last, "x"), last)
    np.testing.assert_array_equal(standard_layout(last.transpose(0, 3, 1, 2), "x"), last)
    np.testing.assert_array_equal(standard_layout(last.astype(np.int64), "x"), last)
    floats = (last / 255).astype(np.float32)
    np.testing.assert_array_equal(standard_layout(floats, "x"), floats.transpose(0, 3, 1, 2))
    assert standard_layout(last[..., 0], "x").shape == (2, 10, 12, 1)
