"""Views: their draws, what they do to an image, and what they leave alone."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from task.config import build
from task.data import augment, image_ops, simclr_ops
from task.data.augment import (
    Augmentation,
    require_8bit,
    simclr_views,
    strong_views,
    three_views,
    weak_views,
)
from task.data.randaugment import IDENTITY, LEVELS, OPERATIONS

torch.set_num_threads(1)
VIEWS = (weak_views, strong_views, simclr_views, three_views)
SHAPES = [(1, 8, 8), (3, 8, 8), (1, 28, 28), (3, 32, 32), (3, 32, 24), (3, 96, 96)]


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def noise(count: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 256, (count, *shape), generator=seeded(seed), dtype=torch.uint8)


def plain(**changes: Any) -> Augmentation:
    """Return settings that change nothing but what is asked for."""
    nothing: dict[str, Any] = {"flip": False, "crop_padding": 0.0, "strong_ops": 0, "cutout": 0.0}
    return Augmentation(**nothing | changes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("views", VIEWS)
def test_shape_type_and_the_input_stays(views: Callable[..., Tensor], shape: tuple[int, int, int]) -> None:
    images = noise(9, *shape)
    before = images.clone()
    made = views(images, seeded())
    assert made.shape == ((3 if views is three_views else 1) * 9, *shape)
    assert made.dtype == torch.uint8
    assert torch.equal(images, before)


@pytest.mark.parametrize("views", VIEWS)
def test_only_the_generator_decides(views: Callable[..., Tensor]) -> None:
    images = noise(16, 3, 16, 16)
    torch.manual_seed(1)
    first = views(images, seeded(5))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(first, views(images, seeded(5)))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, views(images, seeded(6)))
    rng = seeded(5)
    assert torch.equal(first, views(images, rng))
    assert not torch.equal(first, views(images, rng))


@pytest.mark.parametrize("views", VIEWS)
def test_every_sample_has_draws_of_its_own(views: Callable[..., Tensor]) -> None:
    made = views(noise(1, 3, 32, 32).expand(64, -1, -1, -1), seeded())
    # 2 x 9 x 9 weak views there are.
    assert len(torch.unique(made, dim=0)) > 0.6 * len(made)


@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("count", [0, 1])
def test_batches_of_none_and_one(views: Callable[..., Tensor], count: int) -> None:
    assert len(views(noise(count, 3, 16, 16), seeded())) == (3 if views is three_views else 1) * count


@pytest.mark.parametrize("views", VIEWS)
def test_views_do_not_need_contiguous_images(views: Callable[..., Tensor]) -> None:
    images = noise(6, 3, 16, 16)
    last = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(views(images, seeded()), views(last, seeded()))


@pytest.mark.parametrize("strong2", ["randaug", "simclr"])
def test_three_views_are_a_weak_and_two_different_strong_ones(strong2: Any) -> None:
    images, settings = noise(32, 3, 32, 32), Augmentation(strong2=strong2)
    weak, first, second = three_views(images, seeded(), settings).chunk(3)
    assert torch.equal(weak, weak_views(images, seeded(), settings))
    for one, other in ((first, second), (weak, first), (weak, second)):
        assert (one != other).flatten(1).any(1).all()


@pytest.mark.parametrize("strong2", ["randaug", "simclr"])
def test_views_are_in_the_order_of_the_images(strong2: Any) -> None:
    light = torch.rand(40, generator=seeded()) < 0.5
    images = torch.where(light, 220, 30).to(torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8)
    for part in three_views(images, seeded(), plain(strong2=strong2)).chunk(3):
        assert torch.equal(part.float().mean((1, 2, 3)) > 85, light)


def test_second_strong_view_of_simclr_has_no_cutout() -> None:
    images = noise(64, 3, 32, 32).clamp(max=90)
    first, second = three_views(images, seeded(), Augmentation(strong_ops=0, strong2="simclr")).chunk(3)[1:]
    assert ((first == 127).sum((1, 2, 3)) >= 3 * 64).all()
    assert ((second == 127).sum((1, 2, 3)) < 3 * 64).all()


# Weak views


def crop_by_hand(image: Tensor, flipped: bool, top: int, left: int, padding: tuple[int, int]) -> Tensor:
    array = image.numpy()[:, :, ::-1] if flipped else image.numpy()
    (vertical, horizontal), (height, width) = padding, array.shape[1:]
    padded = np.pad(array, ((0, 0), (vertical, vertical), (horizontal, horizontal)), mode="reflect")
    top, left = top + vertical, left + horizontal
    return torch.from_numpy(padded[:, top : top + height, left : left + width].copy())


@pytest.mark.parametrize(("shape", "padding"), [((3, 32, 32), (4, 4)), ((1, 28, 8), (3, 1)), ((3, 96, 40), (12, 5))])
def test_flip_and_crop_by_hand(shape: tuple[int, int, int], padding: tuple[int, int]) -> None:
    images, rng = noise(20, *shape), seeded(3)
    flips = torch.rand(20, generator=rng) < 0.5
    tops, lefts = (torch.randint(-most, most + 1, (20,), generator=rng) for most in padding)
    made = image_ops.flip_and_crop(images, flips, tops, lefts)
    for i in range(20):
        expected = crop_by_hand(images[i], bool(flips[i]), int(tops[i]), int(lefts[i]), padding)
        assert torch.equal(made[i], expected)


def test_weak_view_is_flip_and_crop_only() -> None:
    images = noise(400, 1, 16, 16)  # padded by 2
    made = weak_views(images, seeded())
    found: collections.Counter[tuple[bool, int, int]] = collections.Counter()
    for image, view in zip(images, made, strict=True):
        fits = [
            (flipped, top, left)
            for flipped in (False, True)
            for top in range(-2, 3)
            for left in range(-2, 3)
            if torch.equal(view, crop_by_hand(image, flipped, top, left, (2, 2)))
        ]
        assert len(fits) == 1
        found[fits[0]] += 1
    assert len(found) == 50  # 8 of each are expected
    assert 160 <= sum(count for (flipped, _, _), count in found.items() if flipped) <= 240
    assert max(found.values()) <= 24


def test_weak_settings() -> None:
    images = noise(50, 3, 16, 16)
    assert torch.equal(weak_views(images, seeded(), plain()), images)
    mirrored = weak_views(images, seeded(), plain(flip=True))
    for image, view in zip(images, mirrored, strict=True):
        assert torch.equal(view, image) or torch.equal(view, image.flip(2))
    assert not torch.equal(mirrored, images)


# RandAugment's draws


def drawn(count: int, **changes: Any) -> list[tuple[Tensor, ...]]:
    """Return the operations, levels and signs that strong views of ``count`` images use, one tuple for each of n."""
    calls: list[tuple[Tensor, ...]] = []

    def capture(images: Tensor, *draws: Any) -> Tensor:
        calls.append(draws)
        return images

    with patch.object(augment, "apply_operations", capture):
        strong_views(noise(1, 1, 8, 8).expand(count, -1, -1, -1), seeded(), Augmentation(**changes))
    return calls


def test_two_operations_of_fourteen_each_used_with_probability_one_half() -> None:
    total = 20_000
    calls = drawn(total)
    assert len(OPERATIONS) == 14
    assert len(calls) == 2
    for operations, levels, signs, fill in calls:
        counts = torch.bincount(operations, minlength=14)
        other, most = total / 28, total * (0.5 + 1 / 28)
        assert (counts[:IDENTITY] - other).abs().max() < 5 * other**0.5
        assert abs(counts[IDENTITY] - most) < 5 * (total / 4) ** 0.5
        counted = torch.bincount(levels)
        assert counted[0] == 0
        assert len(counted) == LEVELS
        assert (counted[1:] - total / 9).abs().max() < 5 * (total / 9) ** 0.5
        assert set(signs.tolist()) == {-1, 1}
        assert abs(signs.sum()) < 5 * total**0.5
        assert fill == 0
    same = (calls[0][0] == calls[1][0]) & (calls[0][0] < IDENTITY)
    assert same.any()  # with replacement
    assert same.float().mean() < 0.05


def test_number_of_operations_and_probability_are_settings() -> None:
    assert len(drawn(10, strong_ops=3)) == 3
    assert (drawn(100, op_probability=0.0)[0][0] == IDENTITY).all()
    used = (drawn(20_000, op_probability=1.0)[0][0] != IDENTITY).float().mean()
    assert used == pytest.approx(13 / 14, abs=0.01)
    assert drawn(10, fill=127)[0][3] == 127


def test_share_of_touched_samples() -> None:
    images = noise(3000, 3, 32, 32)
    made = strong_views(images, seeded(), plain(strong_ops=1))
    touched = (made != images).flatten(1).any(1).float().mean().item()
    # Of the 13 operations autocontrast changes nothing where 0 and 255 are there, and a translation nothing at level 1.
    assert touched == pytest.approx(0.5 * (10 + 2 * 8 / 9) / 14, abs=5 * (0.25 / 3000) ** 0.5)


# Cutout


@pytest.mark.parametrize(("side", "square"), [(8, 4), (28, 14), (32, 16), (96, 48)])
def test_cutout_is_a_gray_square_of_half_the_side(side: int, square: int) -> None:
    images = torch.full((1500, 1, side, side), 9, dtype=torch.uint8)
    covered = strong_views(images, seeded(), plain(cutout=0.5))[:, 0] == 127
    rows, columns = covered.any(2), covered.any(1)
    assert torch.equal(covered, rows[:, :, None] & columns[:, None, :])  # a rectangle without gaps
    heights, widths = rows.sum(1), columns.sum(1)
    for line, length in ((rows, heights), (columns, widths)):
        runs = (line[:, 1:] & ~line[:, :-1]).sum(1) + line[:, 0]
        assert (runs == 1).all()
        assert length.max() == square
        assert length.min() >= square // 2  # the middle is inside, so that at most half is clipped
        clipped = line[:, 0] | line[:, -1]
        assert (length[~clipped] == square).all()
        # Middles from square / 2 to side - square / 2 leave it whole.
        assert (length == square).float().mean() == pytest.approx((side - square + 1) / side, abs=0.07)


def test_cutout_by_hand() -> None:
    images = noise(3, 3, 6, 7).clamp(max=100)
    made = image_ops.cutout(images, torch.tensor([0, 3, 5]), torch.tensor([0, 3, 6]), 4)
    expected = images.clone()
    expected[0, :, 0:2, 0:2] = 127
    expected[1, :, 1:5, 1:5] = 127
    expected[2, :, 3:6, 4:7] = 127
    assert torch.equal(made, expected)
    assert torch.equal(image_ops.cutout(images, torch.tensor([0, 3, 5]), torch.tensor([0, 3, 6]), 0), images)


# SimCLR


def test_simclr_boxes() -> None:
    boxes: list[Tensor] = []
    original = simclr_ops.resized_crop

    def capture(images: Tensor, each: Tensor) -> Tensor:
        boxes.append(each)
        return original(images, each)

    with patch.object(simclr_ops, "resized_crop", capture):
        simclr_views(noise(1, 3, 64, 48).expand(2000, -1, -1, -1), seeded())
    top, left, height, width = boxes[0].unbind(1)
    assert (top >= 0).all() and (left >= 0).all()  # noqa: PT018
    assert (top + height <= 64).all() and (left + width <= 48).all()  # noqa: PT018
    area, ratio = height * width / (64 * 48), width / height
    assert 0.19 < area.min() < 0.22
    assert area.max() > 0.9
    assert 0.72 < ratio.min() < 0.77
    assert 1.29 < ratio.max() < 1.39
    assert (top + height == 64).any() and (left == 0).any()  # noqa: PT018


def test_simclr_probabilities() -> None:
    images = noise(1, 3, 16, 16).expand(2000, -1, -1, -1)
    with patch.object(simclr_ops, "resized_crop", lambda images, boxes: images.clone()):
        made = simclr_views(images, seeded(), Augmentation(flip=False))
    gray = (made == made[:, :1]).flatten(1).all(1)
    assert gray.float().mean() == pytest.approx(0.2, abs=0.05)
    untouched = (made == images).flatten(1).all(1)
    assert untouched.float().mean() == pytest.approx(0.2 * 0.8, abs=0.05)


def test_simclr_keeps_images_of_one_channel_gray() -> None:
    images = noise(30, 1, 16, 16)
    factors, nothing = torch.full((30,), 0.3), torch.zeros(30, dtype=torch.bool)
    assert torch.equal(simclr_ops.hue(images, factors), images)
    assert torch.equal(simclr_ops.saturation(images, factors), images)
    assert torch.equal(simclr_ops.grayscale(images, ~nothing), images)


# Settings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("crop_padding", -0.1),
        ("crop_padding", 0.6),
        ("strong_ops", -1),
        ("op_probability", 1.1),
        ("fill", 256),
        ("cutout", 1.5),
        ("strong2", "mixup"),
    ],
)
def test_settings_out_of_range(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{key}=.* is not allowed: .*$") as error:
        Augmentation(**{key: value})
    assert "\n" not in str(error.value)


def test_settings_as_yaml_holds_them() -> None:
    node = {"_target_": "task.data.augment.Augmentation", **dataclasses.asdict(Augmentation(flip=False))}
    assert build(node, "views") == Augmentation(flip=False)
    with pytest.raises(ValueError, match=r"^views\.cutout=2 is not allowed: from 0 to 1$"):
        build(node | {"cutout": 2}, "views")


@pytest.mark.parametrize("views", VIEWS)
def test_normalised_images_are_refused(views: Callable[..., Tensor]) -> None:
    with pytest.raises(
        ValueError, match=r"^the client's data: images are float32, but this method augments 8-bit images"
    ):
        views(torch.zeros(2, 3, 8, 8), seeded())
    with pytest.raises(ValueError, match=r"^client 3: images are float32, but this method augments 8-bit images"):
        require_8bit(torch.zeros(2, 3, 8, 8), "client 3")
    require_8bit(noise(2, 3, 8, 8), "client 3")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpu_makes_the_same_views(shape: tuple[int, int, int]) -> None:
    images = noise(256, *shape)
    for views in (weak_views, strong_views, three_views):
        made = views(images.cuda(), seeded())
        assert made.is_cuda
        assert torch.equal(made.cpu(), views(images, seeded()))
    difference = simclr_views(images.cuda(), seeded()).cpu().int() - simclr_views(images, seeded()).int()
    assert (difference.abs() > 2).float().mean() < 0.001
