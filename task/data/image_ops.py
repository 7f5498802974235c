"""Operations on a batch of 8-bit images, each with parameters of its own for every sample.

They compute what Pillow computes for one image, in whole numbers, so that a CPU and a GPU give the same bytes: factors
are hundredths, coordinates have 16 binary places. Everywhere ``images`` are ``(n, ch, H, W)`` uint8 with one or three
channels, parameters are ``(n,)`` whole numbers on the device of the images, and the result has the shape, type and
device of ``images``, which stay as they are.
"""

import torch
from torch import Tensor

ONE = 1 << 16
"""The number one of the affine coefficients."""


def _each(values: Tensor) -> Tensor:
    """Return ``(n, 1, 1, 1)`` int32 from ``(n,)``."""
    return values.to(torch.int32).reshape(-1, 1, 1, 1)


def flip_and_crop(images: Tensor, flips: Tensor, tops: Tensor, lefts: Tensor) -> Tensor:
    """Mirror the chosen images left to right, then shift them, filling the border by reflection.

    Parameters
    ----------
    flips
        ``(n,)`` bool.
    tops, lefts
        Row and column of the (mirrored) image that become row and column 0; from ``-(H - 1)`` to ``H - 1``.
    """
    height, width = images.shape[-2:]
    rows = _reflect(torch.arange(height, device=images.device) + tops[:, None], height)
    columns = _reflect(torch.arange(width, device=images.device) + lefts[:, None], width)
    columns = torch.where(flips[:, None], width - 1 - columns, columns)
    return _pick(images, rows[:, :, None] * width + columns[:, None, :])


def _reflect(positions: Tensor, side: int) -> Tensor:
    """Return positions of ``0..side - 1`` for those beyond an end, counted back from it."""
    return (side - 1) - ((side - 1) - positions.abs()).abs()


def _pick(images: Tensor, places: Tensor) -> Tensor:
    """Return the pixels at ``places`` ``(n, H, W)``, which count along the rows."""
    flat, index = images.flatten(2), places.flatten(1).unsqueeze(1)
    return flat.gather(2, index.expand(-1, flat.shape[1], -1)).reshape(images.shape)


def affine(images: Tensor, matrices: Tensor, fill: int) -> Tensor:
    """Move pixels by an affine map, taking the nearest one.

    Parameters
    ----------
    matrices
        ``(n, 6)`` whole numbers a, b, c, d, e, f in units of 1 / ``ONE``: the pixel in column x and row y comes from
        column ``a x + b y + c`` and row ``d x + e y + f``, rounded down.
    fill
        Value of what comes from outside the image.
    """
    height, width = images.shape[-2:]
    x = torch.arange(width, device=images.device, dtype=torch.int32)
    y = torch.arange(height, device=images.device, dtype=torch.int32)[:, None]
    a, b, c, d, e, f = matrices.to(torch.int32)[:, :, None, None].unbind(1)
    columns, rows = (a * x + b * y + c) >> 16, (d * x + e * y + f) >> 16
    outside = (columns < 0) | (columns >= width) | (rows < 0) | (rows >= height)
    places = (rows * width + columns).masked_fill_(outside, 0)
    return _pick(images, places.long()).masked_fill_(outside[:, None], fill)


def gray(images: Tensor) -> Tensor:
    """Return the brightness ``(n, 1, H, W)`` int32: ITU-R 601-2 luma of three channels, the mean of others."""
    values = images.to(torch.int32)
    if images.shape[1] != 3:
        return values.sum(1, keepdim=True, dtype=torch.int32) // images.shape[1]
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32, device=images.device)[:, None, None]
    return ((values * weights).sum(1, keepdim=True, dtype=torch.int32) + 32768) >> 16


def _blend(other: Tensor | int, images: Tensor, percent: Tensor) -> Tensor:
    """Return ``percent`` hundredths of ``images`` and the rest of ``other``, rounded down and kept in 0..255."""
    share = _each(percent)
    return ((share * images + (100 - share) * other) // 100).clamp_(0, 255).to(torch.uint8)


def brightness(images: Tensor, percent: Tensor) -> Tensor:
    """Blend with black."""
    return _blend(0, images, percent)


def contrast(images: Tensor, percent: Tensor) -> Tensor:
    """Blend with a plane of the mean brightness."""
    brightnesses = gray(images)
    pixels = brightnesses[0].numel()
    mean = (2 * brightnesses.sum((1, 2, 3)) + pixels) // (2 * pixels)
    return _blend(_each(mean), images, percent)


def color(images: Tensor, percent: Tensor) -> Tensor:
    """Blend with the gray image; nothing changes where there is one channel."""
    return _blend(gray(images), images, percent)


def sharpness(images: Tensor, percent: Tensor) -> Tensor:
    """Blend with the image smoothed by a 3x3 window of ones around a five; the outermost pixels stay."""
    smooth = values = images.to(torch.int32)
    if min(images.shape[-2:]) > 2:
        rows = values[:, :, :-2] + values[:, :, 1:-1] + values[:, :, 2:]
        sums = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * values[:, :, 1:-1, 1:-1]
        smooth = values.clone()
        smooth[:, :, 1:-1, 1:-1] = (sums + 6) // 13  # to the nearest
    return _blend(smooth, images, percent)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the upper ``bits`` (1..8) of each value."""
    return images & (256 - (1 << (8 - _each(bits)))).to(torch.uint8)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert all values from ``threshold`` on."""
    return torch.where(images >= _each(threshold), 255 - images, images)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel to 0..255; a channel of one value stays."""
    values = images.to(torch.int32)
    low, high = values.amin((2, 3), keepdim=True), values.amax((2, 3), keepdim=True)
    stretched = (255 * (values - low) // (high - low).clamp_(min=1)).to(torch.uint8)
    return torch.where(high > low, stretched, images)


def equalize(images: Tensor) -> Tensor:
    """Spread the values of each channel so that all are about equally frequent."""
    pixels = images.flatten(2).long()
    counts = pixels.new_zeros(*pixels.shape[:2], 256).scatter_add_(2, pixels, torch.ones_like(pixels))
    highest = counts.gather(2, pixels.amax(2, keepdim=True))
    step = (pixels.shape[2] - highest) // 255
    below = counts.cumsum(2) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp_(max=255).to(torch.uint8)
    return torch.where(step[..., None] > 0, table.gather(2, pixels).reshape(images.shape), images)


def cutout(images: Tensor, rows: Tensor, columns: Tensor, side: int, value: int = 127) -> Tensor:
    """Cover a square of ``side`` pixels around a row and column, clipped at the border."""
    height, width = images.shape[-2:]
    down = torch.arange(height, device=images.device) - (rows[:, None] - side // 2)
    right = torch.arange(width, device=images.device) - (columns[:, None] - side // 2)
    inside = ((down >= 0) & (down < side))[:, None, :, None] & ((right >= 0) & (right < side))[:, None, None, :]
    return images.masked_fill(inside, value)
