"""Random weak and strong views of a batch of 8-bit images, drawn anew for every sample.

A CPU generator draws all random numbers, a few at a time for the whole batch, so that a view depends on the seed and
not on the device. The operations themselves work on the device, on all samples that drew them together.

The weak view is a mirror image and a shifted crop. The strong view adds RandAugment, with the operations and ranges
that FixMatch uses, and Cutout. What comes from outside an image when it is turned, sheared or moved is black, as it
is in Pillow, and Cutout is gray.

References
----------
Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence", NeurIPS 2020.
Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space", NeurIPS 2020.
DeVries, Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout", 2017.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from task.data import image_ops, simclr_ops
from task.data.randaugment import IDENTITY, LEVELS, OPERATIONS, apply_operations
from task.schema import require, require_choice

# Operation, middle and reach of its strength.
JITTER = (
    (simclr_ops.brightness, 1.0, 0.4),
    (simclr_ops.contrast, 1.0, 0.4),
    (simclr_ops.saturation, 1.0, 0.4),
    (simclr_ops.hue, 0.0, 0.1),
)


@dataclass(frozen=True)
class Augmentation:
    """Settings of the views.

    Parameters
    ----------
    flip : bool
        Whether half of the images are mirrored; not meant for digits and letters.
    crop_padding : float
        Largest shift of a crop, as a share of the side; the border is filled by reflection.
    strong_ops : int
        Operations of RandAugment that a strong view draws, n.
    op_probability : float
        Probability with which a drawn operation is used.
    fill : int
        Value 0..255 of what comes from outside the image in RandAugment.
    cutout : float
        Side of Cutout's square, as a share of the image's shorter side.
    strong2 : str
        How the second strong view is made: ``randaug`` like the first, or ``simclr`` (a resized crop, a mirror
        image, colour jitter and, for some, gray).
    """

    flip: bool = True
    crop_padding: float = 0.125
    strong_ops: int = 2
    op_probability: float = 0.5
    fill: int = 0
    cutout: float = 0.5
    strong2: Literal["randaug", "simclr"] = "randaug"

    def __post_init__(self) -> None:
        require(0 <= self.crop_padding <= 0.5, "crop_padding", self.crop_padding, "from 0 to 0.5")
        require(self.strong_ops >= 0, "strong_ops", self.strong_ops, "at least 0")
        require(0 <= self.op_probability <= 1, "op_probability", self.op_probability, "from 0 to 1")
        require(0 <= self.fill <= 255, "fill", self.fill, "from 0 to 255")
        require(0 <= self.cutout <= 1, "cutout", self.cutout, "from 0 to 1")
        require_choice("strong2", self.strong2, ("randaug", "simclr"))


DEFAULT = Augmentation()


def require_8bit(images: Tensor, owner: str) -> None:
    """Refuse images that have been normalised already.

    Parameters
    ----------
    images
        The images of one client.
    owner
        Whose they are, for the message, such as ``"client 3"``.

    Raises
    ------
    ValueError
        One line, unless they are uint8.
    """
    if images.dtype != torch.uint8:
        kind = str(images.dtype).removeprefix("torch.")
        raise ValueError(f"{owner}: images are {kind}, but this method augments 8-bit images (uint8, 0 to 255)")


def weak_views(images: Tensor, rng: Generator, settings: Augmentation = DEFAULT) -> Tensor:
    """Return a weak view of each image: mirrored with probability 0.5, then cropped after reflect padding.

    Parameters
    ----------
    images
        ``(B, ch, H, W)`` uint8, on any device; they stay as they are.
    rng
        A CPU generator.
    settings
        What to draw from.

    Returns
    -------
    Tensor
        ``(B, ch, H, W)`` uint8 on the device of ``images``.

    Raises
    ------
    ValueError
        If the images are not uint8.
    """
    require_8bit(images, "the client's data")
    total, (height, width) = len(images), images.shape[-2:]
    flips = _below(0.5 if settings.flip else 0.0, total, rng)
    shifts = []
    for side in (height, width):
        padding = int(settings.crop_padding * side)
        shifts.append(_whole(-padding, padding + 1, total, rng))
    draws = torch.stack([flips.long(), *shifts]).to(images.device)
    return image_ops.flip_and_crop(images, draws[0].bool(), draws[1], draws[2])


def strong_views(images: Tensor, rng: Generator, settings: Augmentation = DEFAULT) -> Tensor:
    """Return a strong view of each image: a weak one, then RandAugment, then Cutout.

    Parameters, result and errors are those of ``weak_views``.
    """
    views = weak_views(images, rng, settings)
    total, (height, width) = len(images), images.shape[-2:]
    for _ in range(settings.strong_ops):
        operations = _whole(0, len(OPERATIONS), total, rng)
        levels = _whole(1, LEVELS, total, rng)
        signs = 1 - 2 * _whole(0, 2, total, rng)
        used = _below(settings.op_probability, total, rng)
        views = apply_operations(views, operations.where(used, IDENTITY), levels, signs, settings.fill)
    side = int(settings.cutout * min(height, width))
    places = torch.stack([_whole(0, height, total, rng), _whole(0, width, total, rng)]).to(images.device)
    return image_ops.cutout(views, places[0], places[1], side)


def simclr_views(images: Tensor, rng: Generator, settings: Augmentation = DEFAULT) -> Tensor:
    """Return a view of each image as SimCLR makes it: resized crop, mirror image, colour jitter, gray for some.

    Of the settings only ``flip`` matters. Parameters, result and errors are those of ``weak_views``.

    References
    ----------
    Chen, Kornblith, Norouzi, Hinton, "A Simple Framework for Contrastive Learning of Visual Representations",
    ICML 2020, app. A.
    """
    require_8bit(images, "the client's data")
    total, device = len(images), images.device
    views = simclr_ops.resized_crop(images, _boxes(total, images.shape[2], images.shape[3], rng).to(device))
    flips = _below(0.5 if settings.flip else 0.0, total, rng).to(device)
    views = torch.where(flips[:, None, None, None], views.flip(3), views)
    jittered = _below(0.8, total, rng)
    order = torch.rand(total, len(JITTER), generator=rng).argsort(1)
    strengths = 2 * torch.rand(total, len(JITTER), generator=rng) - 1
    for step in range(len(JITTER)):
        for number, (operation, middle, reach) in enumerate(JITTER):
            chosen = (jittered & (order[:, step] == number)).nonzero()[:, 0]
            factors = (middle + reach * strengths[chosen, number]).to(device)
            views[chosen.to(device)] = operation(views[chosen.to(device)], factors)
    return simclr_ops.grayscale(views, _below(0.2, total, rng).to(device))


def _boxes(total: int, height: int, width: int, rng: Generator) -> Tensor:
    """Draw a box inside the image for each sample, as ``simclr_ops.resized_crop`` takes them.

    Of ten boxes the first that fits is taken, or the whole image. The area is a fifth of the image or more: SimCLR's
    own least area, 8%, is for larger images.
    """
    area = height * width * (0.2 + 0.8 * torch.rand(total, 10, generator=rng))
    ratio = torch.exp(math.log(4 / 3) * (2 * torch.rand(total, 10, generator=rng) - 1))
    heights, widths = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
    fits = (heights <= height) & (widths <= width)
    first = fits.int().argmax(1, keepdim=True)
    tall = heights.gather(1, first).clamp(max=height)[:, 0]
    wide = widths.gather(1, first).clamp(max=width)[:, 0]
    places = torch.rand(2, total, generator=rng)
    top, left = (places[0] * (height - tall + 1)).floor(), (places[1] * (width - wide + 1)).floor()
    return torch.stack([top, left, tall, wide], 1).long()


def three_views(images: Tensor, rng: Generator, settings: Augmentation = DEFAULT) -> Tensor:
    """Return the weak views, the first and the second strong views, one after another, for one forward pass.

    Parameters and errors are those of ``weak_views``.

    Returns
    -------
    Tensor
        ``(3B, ch, H, W)`` uint8 on the device of ``images``; ``.chunk(3)`` takes it apart.
    """
    weak = weak_views(images, rng, settings)
    if settings.strong2 == "randaug":
        return torch.cat([weak, strong_views(torch.cat([images, images]), rng, settings)])
    return torch.cat([weak, strong_views(images, rng, settings), simclr_views(images, rng, settings)])


def _whole(low: int, high: int, total: int, rng: Generator) -> Tensor:
    """Draw ``(total,)`` whole numbers from ``low`` to ``high - 1``."""
    return torch.randint(low, high, (total,), generator=rng)


def _below(probability: float, total: int, rng: Generator) -> Tensor:
    """Draw ``(total,)`` truths of a probability."""
    return torch.rand(total, generator=rng) < probability
