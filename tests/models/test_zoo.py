import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from task.models.split import SplitModel, batchnorm_in_eval, make_head, parameter_count
from tests.models.zoo_table import ALL, SMALL, body_32, make, make_meta

torch.set_num_threads(1)


@pytest.mark.parametrize("name", ALL)
def test_parameter_and_batchnorm_counts(name: str) -> None:
    settings = {"norm": "batch"} if name in SMALL and name != "plain" else {}
    body = make_meta(name, (3, 32, 32), **settings)
    assert parameter_count(body) == ALL[name].parameters
    assert sum(isinstance(module, _BatchNorm) for module in body.modules()) == ALL[name].batchnorms


def test_whole_cnn4_counts() -> None:
    def count(image_shape: tuple[int, int, int], classes: int) -> int:
        body = make_meta("cnn4", image_shape)
        return parameter_count(SplitModel(body, make_head(512, [], classes), 512))

    assert count((1, 28, 28), 10) == 582_026
    assert count((3, 32, 32), 100) == 924_708
    # Only the dense layer depends on the size of the image: 1024, 1600 and 10816 inputs.
    assert [body[7].in_features for body in (make_meta("cnn4", (3, side, side)) for side in (28, 32, 64))] == [
        1024,
        1600,
        10816,
    ]


@pytest.mark.parametrize("image_shape", [(1, 28, 28), (3, 28, 28), (1, 32, 32), (4, 32, 32), (3, 64, 64), (3, 64, 48)])
@pytest.mark.parametrize("name", ALL)
def test_any_size_and_channels(name: str, image_shape: tuple[int, int, int]) -> None:
    body = make_meta(name, image_shape).eval()
    with torch.no_grad():
        features = body(torch.zeros(2, *image_shape, device="meta"))
    assert features.shape == (2, ALL[name].width)


@pytest.mark.parametrize("name", ["cnn4", "resnet4", "resnet18", *SMALL])
def test_large_image(name: str) -> None:
    body = make_meta(name, (3, 150, 150)).eval()
    assert body(torch.zeros(2, 3, 150, 150, device="meta")).shape == (2, ALL[name].width)


@pytest.mark.parametrize("name", ALL)
def test_real_features_are_finite_and_differ(name: str) -> None:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = body_32(name).eval()(images)
    assert features.shape == (2, ALL[name].width)
    assert features.isfinite().all()
    # An untrained GoogLeNet in eval mode is nearly constant (weights of 0.01), yet not quite.
    assert not torch.equal(features[0], features[1])


@pytest.mark.parametrize("name", ALL)
def test_training_step_of_one_sample(name: str) -> None:
    model = SplitModel(body_32(name), make_head(512, [], 10), 512).train()
    model.zero_grad()
    with batchnorm_in_eval(model):
        loss = nn.functional.cross_entropy(model(torch.randn(1, 3, 32, 32)), torch.tensor([3]))
        loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(module.training for module in model.modules())


def test_one_sample_would_raise_without_care() -> None:
    model = body_32("resnet10").train()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize(("name", "smallest"), [("cnn4", 16), ("wrn16_2", 8), *((name, 16) for name in SMALL)])
def test_too_small_image_is_refused_in_one_line(name: str, smallest: int) -> None:
    small = smallest - 1
    for image_shape in ((1, small, 28), (1, 28, small), (0, 28, 28)):
        with pytest.raises(ValueError, match=rf"model {name}: images of shape .* at least {smallest} pixels") as error:
            make(name, image_shape)
        assert "\n" not in str(error.value)
    body = make_meta(name, (1, smallest, smallest)).eval()
    assert body(torch.zeros(2, 1, smallest, smallest, device="meta")).shape == (2, ALL[name].width)


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "mobilenet_v2"])
def test_stem_for_other_channels_starts_like_the_original(name: str) -> None:
    def stem(channels: int) -> nn.Conv2d:
        torch.manual_seed(0)
        body = make(name, (channels, 32, 32))
        return next(module for module in body.modules() if isinstance(module, nn.Conv2d))

    rgb, gray = stem(3), stem(1)
    assert gray.weight.shape == (rgb.weight.shape[0], 1, *rgb.weight.shape[2:])
    assert (gray.bias is None) == (rgb.bias is None)
    assert (gray.stride, gray.padding) == (rgb.stride, rgb.padding)
    # Fan out and a fixed deviation do not depend on the channels, so neither does the spread.
    assert gray.weight.std().item() == pytest.approx(rgb.weight.std().item(), rel=0.2)


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("name", ["vgg", "residual", "separable", "resnet4"])
def test_norm_setting(name: str, norm: str) -> None:
    body = make(name, (1, 28, 28), norm=norm)
    kinds = {"batch": nn.BatchNorm2d, "group": nn.GroupNorm, "none": nn.Identity}
    assert any(isinstance(module, kinds[norm]) for module in body.modules())
    for other in (nn.BatchNorm2d, nn.GroupNorm):
        assert other is kinds[norm] or not any(isinstance(module, other) for module in body.modules())
    biased = [module.bias is not None for module in body.modules() if isinstance(module, nn.Conv2d)]
    assert all(biased) if norm == "none" else not any(biased)
    assert body(torch.randn(2, 1, 28, 28)).shape == (2, ALL[name].width)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("width", [1, 3, 6, 20])
def test_any_width_of_the_small_networks(name: str, width: int) -> None:
    images = torch.randn(2, 1, 28, 28)
    assert make(name, (1, 28, 28), width=width)(images).shape == (2, ALL[name].width)
    assert make(name, (1, 28, 28), width=width, features=96)(images).shape == (2, 96)


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_end_in_a_free_scale(name: str) -> None:
    *_, dense, relu = make(name, (1, 28, 28))
    assert isinstance(dense, nn.Linear)
    assert isinstance(relu, nn.ReLU)


@pytest.mark.parametrize("name", SMALL)
def test_zero_width_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"width=0 must be at least 1"):
        make(name, (1, 28, 28), width=0)


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_learn_two_textures(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    images = 0.3 * torch.randn(40, 1, 28, 28, generator=generator)
    labels = torch.arange(40) % 2
    images[labels == 0, :, ::2] += 1.0
    images[labels == 1, :, :, ::2] += 1.0
    torch.manual_seed(0)
    model = SplitModel(make(name, (1, 28, 28)), make_head(512, [], 2), 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(40):
        batch = torch.arange(step * 10, step * 10 + 10) % 40
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    assert (model.eval()(images).argmax(1) == labels).float().mean() >= 0.95


def test_small_networks_and_cnn4_do_not_import_torchvision() -> None:
    code = (
        "import sys, task.models.assign, task.models.zoo as zoo, task.models.small as small\n"
        "zoo.cnn4((1, 28, 28)); small.vgg((1, 28, 28))\n"
        "sys.exit('torchvision' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
