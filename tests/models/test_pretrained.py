import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from task.models.assign import build_model
from task.models.pretrained import load_pretrained
from task.models.small import separable, vgg
from task.schema import ModelConfig

SHAPE = (1, 28, 28)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(7)
    path = tmp_path / "vgg.safetensors"
    save_file(vgg(SHAPE, norm="batch").state_dict(), path)
    return path


def _settings(path: Path) -> ModelConfig:
    entries = [
        {"name": "a", "_target_": "task.models.small.vgg", "norm": "batch"},
        {"name": "b", "_target_": "task.models.small.separable"},
    ]
    return ModelConfig(name="test", entries=entries, pretrained={"a": str(path)})


def test_the_entry_of_that_name_gets_the_weights(weights: Path) -> None:
    torch.manual_seed(7)
    expected = vgg(SHAPE, norm="batch").state_dict()
    settings = _settings(weights)
    models = [build_model(settings, i, num_classes=10, image_shape=SHAPE, seed=0) for i in range(4)]
    for model in (models[0], models[2]):
        for key, value in model.base.body.state_dict().items():
            assert torch.equal(value, expected[key])
    assert not torch.equal(models[0].head.weight, models[2].head.weight)
    with torch.random.fork_rng(devices=[]):
        plain = ModelConfig(name="test", entries=settings.entries)
        other = build_model(plain, 1, num_classes=10, image_shape=SHAPE, seed=0)
    assert torch.equal(models[1].head.weight, other.head.weight)


def _refused(path: Path | str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern) as error:
        load_pretrained(vgg(SHAPE, norm="batch"), str(path), "a")
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"model.pretrained.a: {path}: ")


def test_relative_path() -> None:
    _refused("vgg.safetensors", "must be absolute")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    _refused(tmp_path / "none.safetensors", "no such file")
    _refused(tmp_path, "not a readable safetensors file")


def test_pickled_or_damaged_file(tmp_path: Path, weights: Path) -> None:
    pickled = tmp_path / "model.pt"
    torch.save(vgg(SHAPE).state_dict(), pickled)
    _refused(pickled, "not a readable safetensors file")
    short = tmp_path / "short.safetensors"
    short.write_bytes(weights.read_bytes()[:-100])
    _refused(short, "not a readable safetensors file")


def test_wrong_keys_and_shapes(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    state = vgg(SHAPE, norm="batch").state_dict()

    save_file({key: value for key, value in state.items() if key != "6.1.bias"}, path)
    _refused(path, r"1 missing keys, the first 6\.1\.bias")

    save_file({**state, "fc.weight": torch.zeros(1), "fc.bias": torch.zeros(1)}, path)
    _refused(path, r"2 keys that the model does not have, the first fc\.bias")

    save_file(vgg((3, 28, 28), norm="batch").state_dict(), path)
    _refused(path, re.escape("key 0.0.weight has shape (8, 3, 3, 3), expected (8, 1, 3, 3)"))

    save_file(separable(SHAPE, norm="batch").state_dict(), path)
    _refused(path, "missing keys, the first")
