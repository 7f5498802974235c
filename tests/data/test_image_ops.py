"""Every operation for whole batches against Pillow and torchvision, which take one image and one parameter."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import functional

from task.data import image_ops, simclr_ops
from task.data.randaugment import OPERATIONS, apply_operations

torch.set_num_threads(1)
SHAPES = [(3, 32, 32), (1, 28, 28), (3, 8, 8), (3, 30, 47), (1, 96, 96)]
# Half of a level is rounded the other way round, for the one works in floats and the other in whole numbers.
ROUNDED = {"autocontrast", "brightness", "color", "contrast", "sharpness"}
Picture = Image.Image


def pictures(count: int, shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    """Return noise, dark noise, smooth ramps and one plane in turn."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, *shape), generator=rng, dtype=torch.uint8)
    images[1::4] = images[1::4] // 4 + 10
    ramp = torch.linspace(20, 230, shape[1])[:, None] - torch.linspace(0, 15, shape[2])
    images[2::4] = ramp.clamp(min=0).to(torch.uint8) + images[2::4] // 32
    images[3::4] = images[3::4, :, :1, :1]
    return images


def to_pillow(image: Tensor) -> Picture:
    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)


def from_pillow(picture: Picture) -> Tensor:
    array = np.array(picture)
    return torch.from_numpy(array[..., None] if array.ndim == 2 else array).permute(2, 0, 1)


def mapped(picture: Picture, *matrix: float, fill: int) -> Picture:
    color = fill if picture.mode == "L" else (fill,) * 3
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, fillcolor=color)


def turned(picture: Picture, degrees: float, fill: int) -> Picture:
    return picture.rotate(degrees, fillcolor=fill if picture.mode == "L" else (fill,) * 3)


def pixels(share: float, side: int) -> int:
    """Round a whole number of pixels down, whose float may lie a little below it."""
    return int(share * side + 1e-9)


# From the table of FixMatch: picture, level 1..9, sign, fill.
BY_PILLOW: dict[str, Callable[[Picture, int, int, int], Picture]] = {
    "identity": lambda p, v, s, fill: p,
    "autocontrast": lambda p, v, s, fill: ImageOps.autocontrast(p),
    "equalize": lambda p, v, s, fill: ImageOps.equalize(p),
    "brightness": lambda p, v, s, fill: ImageEnhance.Brightness(p).enhance(0.09 * v + 0.05),
    "color": lambda p, v, s, fill: ImageEnhance.Color(p).enhance(0.09 * v + 0.05),
    "contrast": lambda p, v, s, fill: ImageEnhance.Contrast(p).enhance(0.09 * v + 0.05),
    "sharpness": lambda p, v, s, fill: ImageEnhance.Sharpness(p).enhance(0.09 * v + 0.05),
    "posterize": lambda p, v, s, fill: ImageOps.posterize(p, int(0.4 * v) + 4),
    "solarize": lambda p, v, s, fill: ImageOps.solarize(p, 256 - int(25.6 * v)),
    "rotate": lambda p, v, s, fill: turned(p, s * int(3 * v), fill),
    "shear_x": lambda p, v, s, fill: mapped(p, 1, s * 0.03 * v, 0, 0, 1, 0, fill=fill),
    "shear_y": lambda p, v, s, fill: mapped(p, 1, 0, 0, s * 0.03 * v, 1, 0, fill=fill),
    "translate_x": lambda p, v, s, fill: mapped(p, 1, 0, s * pixels(0.03 * v, p.width), 0, 1, 0, fill=fill),
    "translate_y": lambda p, v, s, fill: mapped(p, 1, 0, 0, 0, 1, s * pixels(0.03 * v, p.height), fill=fill),
}


def test_fourteen_operations() -> None:
    assert sorted(BY_PILLOW) == sorted(OPERATIONS)
    assert len(OPERATIONS) == 14


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BY_PILLOW)
def test_operation_at_every_level_against_pillow(name: str, shape: tuple[int, int, int]) -> None:
    draws = [(level, sign) for level in range(1, 10) for sign in (1, -1) for _ in range(4)]
    levels, signs = torch.tensor(draws).unbind(1)
    images, before = pictures(len(draws), shape), pictures(len(draws), shape)
    operations = torch.full_like(levels, OPERATIONS.index(name))
    made = apply_operations(images, operations, levels, signs, fill=77)
    assert torch.equal(images, before)
    expected = torch.stack(
        [
            from_pillow(BY_PILLOW[name](to_pillow(image), level, sign, 77))
            for image, (level, sign) in zip(images, draws, strict=True)
        ]
    )
    difference = (made.int() - expected.int()).abs()
    if name in ROUNDED:
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 0.01
    else:
        assert difference.max() == 0


def test_a_mixed_batch_is_each_operation_by_itself() -> None:
    rng = torch.Generator().manual_seed(4)
    images = pictures(200, (3, 16, 16))
    operations = torch.randint(0, len(OPERATIONS), (200,), generator=rng)
    levels = torch.randint(1, 10, (200,), generator=rng)
    signs = 1 - 2 * torch.randint(0, 2, (200,), generator=rng)
    made = apply_operations(images, operations, levels, signs, fill=0)
    for i in range(200):
        one = slice(i, i + 1)
        assert torch.equal(made[one], apply_operations(images[one], operations[one], levels[one], signs[one], fill=0))


def at_levels(name: str, value: int, side: int = 32) -> Tensor:
    """Return what becomes of a plane of ``value`` at the levels 1..9."""
    images = torch.full((9, 1, side, side), value, dtype=torch.uint8)
    levels = torch.arange(1, 10)
    return apply_operations(images, torch.full_like(levels, OPERATIONS.index(name)), levels, torch.ones_like(levels), 0)


def test_ranges_of_factors_bits_and_thresholds() -> None:
    assert at_levels("brightness", 200)[:, 0, 0, 0].tolist() == [28, 46, 64, 82, 100, 118, 136, 154, 172]
    assert at_levels("posterize", 255)[:, 0, 0, 0].tolist() == [240, 240, 248, 248, 252, 252, 252, 254, 254]
    thresholds = [231, 205, 180, 154, 128, 103, 77, 52, 26]
    kept = torch.stack([at_levels("solarize", value)[:, 0, 0, 0] == value for value in range(256)])
    assert [int((~kept[:, level]).nonzero()[0]) for level in range(9)] == thresholds


@pytest.mark.parametrize(
    ("side", "shifts"), [(32, [0, 1, 2, 3, 4, 5, 6, 7, 8]), (96, [2, 5, 8, 11, 14, 17, 20, 23, 25])]
)
@pytest.mark.parametrize("name", ["translate_x", "translate_y"])
def test_ranges_of_shifts(name: str, side: int, shifts: list[int]) -> None:
    empty = (at_levels(name, 200, side)[:, 0] == 0).all(1 if name == "translate_x" else 2)
    assert empty.sum(1).tolist() == shifts


def test_against_torchvision() -> None:
    images = pictures(8, (3, 32, 32))
    for percent in (14, 50, 86):
        share = torch.full((8,), percent)
        for ours, theirs in (
            (image_ops.brightness, functional.adjust_brightness),
            (image_ops.contrast, functional.adjust_contrast),
            (image_ops.color, functional.adjust_saturation),
            (image_ops.sharpness, functional.adjust_sharpness),
        ):
            difference = ours(images, share).int() - theirs(images, percent / 100).int()
            assert difference.abs().max() <= 2  # its gray is rounded down, and its mean of gray is not rounded
    assert torch.equal(image_ops.equalize(images), functional.equalize(images))
    assert (image_ops.autocontrast(images).int() - functional.autocontrast(images).int()).abs().max() <= 1
    assert torch.equal(image_ops.posterize(images, torch.full((8,), 5)), functional.posterize(images, 5))
    assert torch.equal(image_ops.solarize(images, torch.full((8,), 103)), functional.solarize(images, 103))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 20, 36)])
def test_resized_crop_against_torchvision(shape: tuple[int, int, int]) -> None:
    images, rng = pictures(24, shape), torch.Generator().manual_seed(2)
    sizes = [torch.randint(5, side + 1, (24,), generator=rng) for side in shape[1:]]
    starts = [
        (torch.rand(24, generator=rng) * (side - size + 1)).long() for side, size in zip(shape[1:], sizes, strict=True)
    ]
    boxes = torch.stack([*starts, *sizes], 1)
    boxes[0] = torch.tensor([0, 0, *shape[1:]])
    made = simclr_ops.resized_crop(images, boxes)
    assert torch.equal(made[0], images[0])
    for image, view, (top, left, height, width) in zip(images, made, boxes.tolist(), strict=True):
        expected = functional.resized_crop(image, top, left, height, width, list(shape[1:]), antialias=False)
        assert (view.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
def test_jitter_against_torchvision(shape: tuple[int, int, int]) -> None:
    images = pictures(8, shape)
    for factor in (0.6, 0.9, 1.0, 1.37):
        factors = torch.full((8,), factor)
        for ours, theirs in (
            (simclr_ops.brightness, functional.adjust_brightness),
            (simclr_ops.contrast, functional.adjust_contrast),
            (simclr_ops.saturation, functional.adjust_saturation),
        ):
            assert (ours(images, factors).int() - theirs(images, factor).int()).abs().max() <= 1
    for turn in (-0.1, -0.03, 0.0, 0.07, 0.1, 0.4):
        made, expected = simclr_ops.hue(images, torch.full((8,), turn)), functional.adjust_hue(images, turn)
        assert (made.int() - expected.int()).abs().max() <= 1
    chosen = torch.arange(8) % 2 == 0
    made, gray = simclr_ops.grayscale(images, chosen), functional.rgb_to_grayscale(images, shape[0])
    assert torch.equal(made[1::2], images[1::2])
    assert (made[::2].int() - gray[::2].int()).abs().max() <= 1
