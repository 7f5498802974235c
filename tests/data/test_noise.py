"""The stand-in for images that must be downloaded."""

from pathlib import Path

import numpy as np
import pytest

from task.config import CONF_DIR, build, load
from task.data.noise import Noise
from task.data.prepare import prepare

# Shape and classes as the comment on top of each file says.
DOWNLOADED = {
    "mnist": ((1, 28, 28), 10),
    "fashion_mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "stl10": ((3, 96, 96), 10),
    "flowers102": ((3, 64, 64), 102),
    "tiny_imagenet": ((3, 64, 64), 200),
}
OWN = {"fashion_small": "", "digits": "", "npz": "data.source.path=/x.npz"}
OWN |= {"image_folder": "data.source.root=/x", "pfllib": "data.source.root=/x", "own": ""}


@pytest.mark.parametrize("name", DOWNLOADED)
def test_what_must_be_downloaded_gives_way_to_noise_only_when_asked(name: str, tmp_path: Path) -> None:
    assert load(f"data={name}").data.name == name
    assert load(f"data={name} debug=smoke data.stand_in=false").data == load(f"data={name}").data
    config = load(f"data={name} data.stand_in=true").data
    assert config.name == f"{name} (stand-in)"
    assert config.source["_target_"] == "task.data.noise.Noise"
    dataset = prepare(build(config.source), tmp_path)
    assert (dataset.image_shape, dataset.num_classes) == DOWNLOADED[name]
    counts = np.bincount(dataset.labels)
    assert len(counts) == dataset.num_classes
    assert counts.max() - counts.min() <= 1
    text = (CONF_DIR / "data" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    (channels, edge, _), classes = DOWNLOADED[name]
    assert f"{channels}x{edge}x{edge}, {classes} classes" in text


@pytest.mark.parametrize("name", OWN)
def test_images_that_are_there_are_read(name: str) -> None:
    words = f"data={name} {OWN[name]}"
    asked, plain = load(f"{words} data.stand_in=true").data, load(words).data
    assert (asked.name, asked.source) == (plain.name, plain.source)


def test_every_data_set_is_checked_here() -> None:
    assert {path.stem for path in (CONF_DIR / "data").glob("*.yaml")} == {*DOWNLOADED, *OWN}


@pytest.mark.parametrize(("data", "edge"), [("stl10", 32), ("flowers102", 48)])
def test_noise_has_the_size_that_is_set(data: str, edge: int) -> None:
    assert load(f"data={data} data.source.resize={edge} debug=smoke").data.source["edge"] == edge


def test_noise_is_the_same_every_time() -> None:
    one, two = Noise(8, 3, 7).read(), Noise(8, 3, 7).read()
    assert np.array_equal(one.images, two.images)
    assert one.images.std() == pytest.approx(np.sqrt((256**2 - 1) / 12), rel=0.02)  # uniform in 0..255
    assert 0 < one.is_test.sum() < len(one.labels) / 2
