import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from task.models.assign import build_model
from task.models.split import PoolToWidth, SplitModel, make_head, parameter_count
from task.models.wide_resnet import wrn16_2
from task.schema import ModelConfig
from tests.models.zoo_table import body_32, make_meta

torch.set_num_threads(1)
FOLDER = Path(__file__).resolve().parents[2] / "conf" / "model"


def read(name: str) -> ModelConfig:
    return ModelConfig(**yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))


@pytest.mark.parametrize(("classes", "parameters", "overhead"), [(10, 692_810, "0.1848"), (100, 704_420, "1.817")])
def test_counts_and_overhead_of_the_paper(classes: int, parameters: int, overhead: str) -> None:
    with torch.device("meta"):
        model = build_model(read("wrn16_2"), 0, num_classes=classes, image_shape=(3, 32, 32), seed=0)
    assert parameter_count(model) == parameters
    share = 100 * classes * 128 / parameters
    assert f"{share:.{len(overhead) - 2}f}" == overhead


def test_size_does_not_depend_on_the_images() -> None:
    assert {parameter_count(make_meta("wrn16_2", (3, side, side))) for side in (8, 32, 96)} == {691_520}
    for side in (32, 96):
        images = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(side))
        with torch.no_grad():
            assert body_32("wrn16_2").eval()(images).isfinite().all()


def test_native_width_is_the_feature_width() -> None:
    features = torch.randn(2, 128)
    assert PoolToWidth(read("wrn16_2").feature_dim)(features) is features


def _by_hand(state: dict[str, Tensor], images: Tensor) -> Tensor:
    """The network in training mode, written out from its weights."""

    def activated(maps: Tensor, name: str) -> Tensor:
        mean = maps.mean((0, 2, 3), keepdim=True)
        variance = maps.var((0, 2, 3), unbiased=False, keepdim=True)
        normal = (maps - mean) / (variance + 1e-5).sqrt()
        scaled = normal * state[f"{name}.weight"][:, None, None] + state[f"{name}.bias"][:, None, None]
        return torch.where(scaled > 0, scaled, 0.1 * scaled)

    def convolved(maps: Tensor, name: str, stride: int, padding: int) -> Tensor:
        return F.conv2d(maps, state[f"{name}.weight"], state[f"{name}.bias"], stride, padding)

    maps = convolved(images, "0", 1, 1)
    for block, stride in enumerate((1, 1, 2, 1, 2, 1), start=1):
        first = activated(maps, f"{block}.first_norm")
        second = activated(convolved(first, f"{block}.first", stride, 1), f"{block}.second_norm")
        shortcut = maps
        if block in (1, 3, 5):
            shortcut = convolved(first if block == 1 else maps, f"{block}.shortcut", stride, 0)
        maps = shortcut + convolved(second, f"{block}.second", 1, 1)
    return activated(maps, "7").mean((2, 3))


def test_forward_pass_by_hand() -> None:
    torch.manual_seed(0)
    body = wrn16_2((3, 12, 8)).double().train()
    for parameter in body.parameters():  # so that no weight or bias is 1 or 0
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    images = torch.randn(3, 3, 12, 8, dtype=torch.float64)
    torch.testing.assert_close(body(images), _by_hand(body.state_dict(), images))


def test_first_weights() -> None:
    torch.manual_seed(0)
    for module in wrn16_2((3, 32, 32)).modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 4000:
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / 1.01 / fan_out), rel=0.06)
        if isinstance(module, nn.BatchNorm2d):
            assert module.momentum == 0.1
            assert (module.weight == 1).all()


def test_settings_of_the_normalisation() -> None:
    def kinds(**settings: object) -> set[type]:
        return {type(module) for module in make_meta("wrn16_2", (3, 32, 32), **settings).modules()}

    assert nn.BatchNorm2d in kinds()
    assert nn.GroupNorm in kinds(norm="group")
    assert nn.BatchNorm2d not in kinds(norm="group")
    assert not {nn.BatchNorm2d, nn.GroupNorm} & kinds(norm="none")
    momenta = {
        module.momentum for module in wrn16_2((1, 8, 8), bn_momentum=0.3).modules() if hasattr(module, "momentum")
    }
    assert momenta == {0.3}
    for momentum in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"^bn_momentum=.* is not allowed: above 0, at most 1$"):
            wrn16_2((3, 32, 32), bn_momentum=momentum)


def _accuracies(bn_momentum: float) -> tuple[float, float]:
    """Accuracy in training and in eval mode after 32 steps on ten easy classes of light images."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(160) % 10
    patterns = torch.randn(10, 3, 8, 8, generator=generator)
    images = 0.5 + 0.2 * (patterns[labels] + 0.3 * torch.randn(160, 3, 8, 8, generator=generator))
    torch.manual_seed(0)
    model = SplitModel(wrn16_2((3, 8, 8), bn_momentum=bn_momentum), make_head(128, [], 10), 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for _ in range(32):
        batch = torch.randperm(160, generator=generator)[:32]
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        training, evaluation = copy.deepcopy(model).train(), model.eval()
        found = [(each(images).argmax(1) == labels).float().mean().item() for each in (training, evaluation)]
    return found[0], found[1]


def test_running_statistics_follow_within_a_local_epoch() -> None:
    training, evaluation = _accuracies(0.1)
    assert training >= 0.95
    assert evaluation >= training - 0.05
    training, evaluation = _accuracies(0.001)  # that this test can fail
    assert training >= 0.95
    assert evaluation < training - 0.4


def test_small_network_for_cpus() -> None:
    settings = read("cnn_small")
    model = build_model(settings, 0, num_classes=10, image_shape=(3, 32, 32), seed=0)
    assert parameter_count(model) == 50_162
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.features(images), model.base.body(images))
    assert model.has_batchnorm
