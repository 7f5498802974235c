"""SimCLR's operations on a batch of 8-bit images, each with parameters of its own for every sample.

``images`` are ``(n, ch, H, W)`` uint8 with one or three channels, parameters are on their device. A CPU and a GPU may
differ here by one level, because crops and hues are computed in float32. On images of one channel the operations that
speak of colour do nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from task.data.image_ops import gray


def resized_crop(images: Tensor, boxes: Tensor) -> Tensor:
    """Cut a box out of each image and enlarge it to the image's size, bilinear.

    Parameters
    ----------
    boxes
        ``(n, 4)`` whole numbers: top row, left column, height and width, inside the image.
    """
    top, left, height, width = boxes[:, :, None].float().unbind(1)
    rows = _sources(top, height, images.shape[2])
    columns = _sources(left, width, images.shape[3])
    sides = len(images), *images.shape[2:]
    grid = torch.stack([columns[:, None, :].expand(sides), rows[:, :, None].expand(sides)], 3)
    return _bytes(F.grid_sample(images.float(), grid, padding_mode="border", align_corners=True).round_())


def _sources(start: Tensor, length: Tensor, side: int) -> Tensor:
    """Return where the ``side`` pixels of a line come from ``(n, side)``, as -1..1 between the outermost pixels."""
    middles = (torch.arange(side, device=start.device) + 0.5) * (length / side) - 0.5
    return (start + middles.clamp(min=0.0).minimum(length - 1)) * (2 / max(side - 1, 1)) - 1


def _bytes(values: Tensor) -> Tensor:
    """Return float values as uint8, rounded down and kept in 0..255."""
    return values.clamp_(0, 255).to(torch.uint8)


def _blend(other: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    share = factor[:, None, None, None]
    return _bytes(share * images + (1 - share) * other)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply by ``factor`` ``(n,)`` of at least 0."""
    return _blend(torch.zeros_like(images), images, factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply the distance from the mean brightness by ``factor`` ``(n,)`` of at least 0."""
    return _blend(gray(images).float().mean((1, 2, 3), keepdim=True), images, factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply the distance from the gray image by ``factor`` ``(n,)`` of at least 0."""
    return _blend(gray(images), images, factor)


def hue(images: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue by ``turn`` ``(n,)`` rounds, -0.5 to 0.5."""
    if images.shape[1] != 3:
        return images
    red, green, blue = images.float().unbind(1)
    value, smallest = images.amax(1).float(), images.amin(1).float()
    chroma = value - smallest
    safe = chroma.clamp(min=1.0)
    sixth = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    # Each channel falls from the largest to the smallest value as the hue leaves it by one to two sixths.
    start = (sixth + 6 * turn[:, None, None])[:, None] + torch.tensor([5.0, 3.0, 1.0], device=turn.device)[
        :, None, None
    ]
    place = start % 6
    fall = place.minimum(4 - place).clamp_(0, 1)
    return _bytes((value[:, None] - chroma[:, None] * fall).round_())


def grayscale(images: Tensor, chosen: Tensor) -> Tensor:
    """Make the ``chosen`` ``(n,)`` images gray, with as many channels as before."""
    return torch.where(chosen[:, None, None, None], gray(images).to(torch.uint8), images)
