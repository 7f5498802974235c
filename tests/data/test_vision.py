import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from task.data.vision import Cifar10, Cifar100, FashionMnist, Flowers102, Mnist, Stl10


class _Fake:
    """Stands in for a torchvision data set; its files are one marker below the root."""

    downloads = 0
    folder = "MNIST"
    shape = (28, 28)
    tensor = True

    def __init__(self, root, download, train=True, split="train"):
        marker = __import__("pathlib").Path(root) / self.folder / "marker"
        if download:
            type(self).downloads += 1
            marker.parent.mkdir(exist_ok=True)
            marker.touch()
        if not marker.exists():
            raise RuntimeError("Dataset not found.\nYou can use download=True to download it")
        count = 3 if train and split == "train" else 2
        data = np.full((count, *self.shape), count, dtype=np.uint8)
        self.data = torch.from_numpy(data) if self.tensor else data
        self.targets = self.labels = list(range(count))
        self.classes = ["a", "b", "c"]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return Image.new("RGB", (50 + index, 70)), self.targets[index]


def _fake(monkeypatch, kind, **attributes):
    fake = type("Fake", (_Fake,), {"downloads": 0, **attributes})
    monkeypatch.setattr(torchvision.datasets, kind, fake)
    return fake


def _place(tmp_path, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "marker").touch()


@pytest.mark.parametrize(
    ("source", "kind", "attributes"),
    [
        (Mnist, "MNIST", {"folder": "MNIST"}),
        (FashionMnist, "FashionMNIST", {"folder": "FashionMNIST"}),
        (Cifar10, "CIFAR10", {"folder": "cifar-10-batches-py", "shape": (32, 32, 3), "tensor": False}),
        (Cifar100, "CIFAR100", {"folder": "cifar-100-python", "shape": (32, 32, 3), "tensor": False}),
    ],
)
def test_train_and_test_are_merged(source, kind, attributes, monkeypatch, tmp_path):
    _fake(monkeypatch, kind, **attributes)
    _place(tmp_path, attributes["folder"])
    raw = source(str(tmp_path)).read()
    assert raw.images.shape == (5, *attributes.get("shape", (28, 28)))
    assert raw.labels.tolist() == [0, 1, 2, 0, 1]
    assert raw.is_test.tolist() == [False] * 3 + [True] * 2
    assert raw.class_names == ("a", "b", "c")


@pytest.mark.parametrize(("resize", "edge"), [(None, 96), (32, 32)])
def test_stl10_puts_channels_last(resize, edge, monkeypatch, tmp_path):
    _fake(monkeypatch, "STL10", folder="stl10_binary", shape=(3, 96, 96), tensor=False)
    _place(tmp_path, "stl10_binary")
    assert Stl10(str(tmp_path), resize=resize).read().images.shape == (5, edge, edge, 3)


def test_flowers_merge_three_parts_and_resize(monkeypatch, tmp_path):
    _fake(monkeypatch, "Flowers102", folder="flowers-102")
    _place(tmp_path, "flowers-102")
    raw = Flowers102(str(tmp_path)).read()
    assert raw.images.shape == (7, 64, 64, 3)
    assert raw.is_test.tolist() == [False] * 5 + [True] * 2


def test_missing_files_are_one_line_with_the_key(tmp_path):
    with pytest.raises(
        ValueError, match=r"data\.source\.root: MNIST is missing .*data\.source\.download=true"
    ) as caught:
        Mnist(str(tmp_path)).read()
    assert "\n" not in str(caught.value)


def test_fetch_downloads_once_and_only_when_asked(monkeypatch, tmp_path):
    fake = _fake(monkeypatch, "MNIST")
    Mnist(str(tmp_path)).fetch()
    assert fake.downloads == 0
    for _ in range(2):
        Mnist(str(tmp_path), download=True).fetch()
    assert fake.downloads == 2  # training and test part, once each
    assert len(Mnist(str(tmp_path)).read().labels) == 5


def test_failed_download_names_the_key(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise RuntimeError("Error downloading\nmnist")

    monkeypatch.setattr(torchvision.datasets, "MNIST", fail)
    with pytest.raises(ValueError, match="MNIST cannot be downloaded to") as caught:
        Mnist(str(tmp_path), download=True).fetch()
    assert "\n" not in str(caught.value)


def test_broken_download_is_repaired(monkeypatch, tmp_path):
    fake = _fake(monkeypatch, "MNIST")
    (tmp_path / "MNIST").mkdir()
    (tmp_path / "MNIST" / "half").touch()
    Mnist(str(tmp_path), download=True).fetch()
    assert fake.downloads == 2


def test_fingerprint_ignores_download_and_follows_the_files(tmp_path):
    first = Mnist(str(tmp_path)).fingerprint()
    assert Mnist(str(tmp_path), download=True).fingerprint() == first
    assert FashionMnist(str(tmp_path)).fingerprint() != first
    _place(tmp_path, "MNIST")
    assert Mnist(str(tmp_path)).fingerprint() != first


def test_settings_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"data\.source\.root: must be an absolute path"):
        Mnist("data")
    with pytest.raises(ValueError, match=r"data\.source\.resize"):
        Flowers102(str(tmp_path), resize=4)
