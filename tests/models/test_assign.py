import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from task.models.assign import build_model, check_body, check_models, entry_for, head_for
from task.models.split import parameter_count
from task.schema import ModelConfig
from tests.models.zoo_table import ALL

torch.set_num_threads(1)
FOLDER = Path(__file__).resolve().parents[2] / "conf" / "model"
GRAY = (1, 28, 28)


def read(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig(**(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) | changes))


def names(name: str, clients: int) -> list[str]:
    return [entry_for(read(name), partition)["name"] for partition in range(clients)]


FAMILIES = {
    "htfe2": ["cnn4", "resnet18"],
    "htfe3": ["resnet10", "resnet18", "resnet34"],
    "htfe4": ["cnn4", "googlenet", "mobilenet_v2", "resnet18"],
    "htfe8": ["cnn4", "googlenet", "mobilenet_v2", *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152))],
    "htfe9": [f"resnet{depth}" for depth in (4, 6, 8, 10, 18, 34, 50, 101, 152)],
    "res34_htc4": ["resnet34"],
    "htcnn4": ["plain", "vgg", "residual", "separable"],
}
FAMILIES["htfe8_htc4"] = FAMILIES["htfe8"]


@pytest.mark.parametrize("family", FAMILIES)
def test_client_takes_entry_i_mod_n(family: str) -> None:
    entries = FAMILIES[family]
    assert names(family, 20) == [entries[i % len(entries)] for i in range(20)]


@pytest.mark.parametrize("family", ["res34_htc4", "htfe8_htc4"])
def test_client_takes_head_i_mod_4(family: str) -> None:
    settings = read(family)
    assert [list(head_for(settings, i)) for i in range(6)] == [[], [512], [256], [128], [], [512]]
    with torch.device("meta"):
        models = [build_model(settings, i, num_classes=100, image_shape=(3, 32, 32), seed=0) for i in range(4)]
    assert [parameter_count(model.head) for model in models] == [51_300, 313_956, 157_028, 78_564]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_yaml_builds_features_of_width_k(path: Path) -> None:
    settings = read(path.stem, feature_dim=96)
    assert settings.name == path.stem
    for partition in range(len(settings.entries)):
        entry = entry_for(settings, partition)
        assert entry["_target_"] == ALL[entry["name"]].target
        with torch.device("meta"):
            model = build_model(settings, partition, num_classes=7, image_shape=GRAY, seed=0).eval()
            images = torch.zeros(2, *GRAY)
        assert model.features(images).shape == (2, 96)
        assert model(images).shape == (2, 7)


def test_whole_mnist_cnn() -> None:
    model = build_model(read("cnn4"), 0, num_classes=10, image_shape=GRAY, seed=0)
    assert parameter_count(model) == 582_026


def test_pinned_entry() -> None:
    settings = read("htcnn4")
    assert entry_for(settings, 0, pinned="residual")["name"] == "residual"
    with pytest.raises(ValueError, match=r"client 3: pinned model 'vgg19' must be one of plain, vgg, residual"):
        entry_for(settings, 3, pinned="vgg19")


def _weights(settings: ModelConfig, partition: int, seed: int = 0) -> dict[str, Tensor]:
    return build_model(settings, partition, num_classes=10, image_shape=GRAY, seed=seed).state_dict()


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_weights_depend_on_seed_and_client_only() -> None:
    settings = read("htcnn4")
    torch.manual_seed(1)
    first = _weights(settings, 1)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert _equal(first, _weights(settings, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert not _equal(first, _weights(settings, 5))
    assert not _equal(first, _weights(settings, 1, seed=1))


def test_same_init_joins_clients_of_one_entry() -> None:
    settings = read("htcnn4", same_init=True)
    assert _equal(_weights(settings, 1), _weights(settings, 5))
    assert not _equal(_weights(settings, 1), _weights(settings, 5, seed=1))


def test_same_init_with_different_heads_shares_the_body() -> None:
    settings = read("cnn4", heads=[[], [32]], same_init=True)
    one, other = _weights(settings, 0), _weights(settings, 1)
    assert all(torch.equal(one[key], other[key]) for key in one if key.startswith("base."))


def test_restoring_without_initialisation() -> None:
    settings = read("htcnn4")
    for partition in range(4):
        weights = _weights(settings, partition)
        with torch.device("meta"):
            model = build_model(settings, partition, num_classes=10, image_shape=GRAY, seed=0)
        model.load_state_dict(weights, assign=True)
        assert _equal(weights, model.state_dict())
        assert all(parameter.requires_grad for parameter in model.parameters())
        model(torch.randn(2, *GRAY)).sum().backward()


def test_small_models_are_cheap_to_build() -> None:
    settings = read("htcnn4")
    for partition in range(4):
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            build_model(settings, partition, num_classes=10, image_shape=GRAY, seed=0)
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.05  # 10 ms on an idle core


class Body(nn.Module):
    """A user's own body, whose result a test chooses."""

    def __init__(self, image_shape: tuple[int, int, int], result: str = "features") -> None:
        super().__init__()
        self.result = result
        self.linear = nn.Linear(image_shape[0] * image_shape[1] * image_shape[2], 500)
        self.batchnorm = nn.BatchNorm1d(500)

    def forward(self, images: Tensor) -> Any:
        features = self.batchnorm(self.linear(images.flatten(1)))
        return {
            "features": lambda: features,
            "map": lambda: features[:, :, None, None],
            "flat": lambda: features.flatten(),
            "integers": lambda: features.long(),
            "pair": lambda: (features, features),
            "raises": lambda: self.linear(features),
            "empty": lambda: features[:, :0],
        }[self.result]()


Body.__module__ = "task.models.own_body"


@pytest.fixture
def own_body(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("task.models.own_body")
    module.Body = Body  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "task.models.own_body", module)
    return "task.models.own_body.Body"


def test_own_module_by_target(own_body: str) -> None:
    settings = ModelConfig(name="own", entries=[{"name": "mine", "_target_": own_body}], feature_dim=64)
    check_models(settings, GRAY)
    model = build_model(settings, 0, num_classes=10, image_shape=GRAY, seed=0)
    assert model.training
    assert model.base.body.batchnorm.num_batches_tracked == 0  # the check ran in eval mode
    assert model(torch.zeros(2, *GRAY)).shape == (2, 10)


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ("map", r"features \(2, width\); found \(2, 500, 1, 1\) torch.float32"),
        ("flat", r"features \(2, width\); found \(1000,\) torch.float32"),
        ("integers", r"features \(2, width\); found \(2, 500\) torch.int64"),
        ("empty", r"features \(2, width\); found \(2, 0\) torch.float32"),
        ("pair", r"features \(2, width\); found tuple"),
        (
            "raises",
            r"do not fit: RuntimeError: mat1 and mat2 shapes cannot be multiplied \(2x500 and 784x500\)",
        ),
    ],
)
def test_own_module_that_breaks_the_contract(own_body: str, result: str, found: str) -> None:
    entry = {"name": "mine", "_target_": own_body, "result": result}
    settings = ModelConfig(name="own", entries=[entry])
    for refuse in (
        lambda: check_models(settings, GRAY),
        lambda: build_model(settings, 0, num_classes=10, image_shape=GRAY, seed=0),
    ):
        with pytest.raises(
            ValueError, match=r"model\.entries\.mine: images of shape \(1, 28, 28\) .*" + found
        ) as error:
            refuse()
        assert "\n" not in str(error.value)


def test_check_body_returns_the_width_and_restores_the_mode() -> None:
    body = Body(GRAY)
    body.batchnorm.eval()
    assert check_body(body, GRAY) == 500
    assert body.training
    assert body.linear.training
    assert not body.batchnorm.training


def test_outside_target_is_refused() -> None:
    settings = ModelConfig(name="own", entries=[{"name": "mine", "_target_": "torchvision.models.resnet18"}])
    with pytest.raises(ValueError, match=r"torchvision.models.resnet18.*is not allowed"):
        check_models(settings, GRAY)


def test_target_that_makes_no_module_is_refused() -> None:
    entry = {"name": "mine", "_target_": "task.models.split.check_image_shape", "model": "x", "smallest": 1}
    with pytest.raises(ValueError, match=r"model.entries.mine: .*must return an nn.Module, not NoneType"):
        check_models(ModelConfig(name="own", entries=[entry]), GRAY)


def test_too_small_images_name_the_model() -> None:
    with pytest.raises(ValueError, match=r"model cnn4: images of shape \(1, 8, 8\) do not fit"):
        check_models(read("htfe2"), (1, 8, 8))


@pytest.mark.parametrize("labels", [({}, {"name": "a"}), ({"name": "a"}, {"name": "a"})])
def test_entries_need_names_of_their_own(labels: tuple[dict[str, str], ...]) -> None:
    entries: list[dict[str, Any]] = [{"_target_": "task.models.small.vgg", **label} for label in labels]
    with pytest.raises(ValueError, match=r"model.entries: .*name of its own"):
        check_models(ModelConfig(name="own", entries=entries), GRAY)
