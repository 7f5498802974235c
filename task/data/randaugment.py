"""RandAugment with the fourteen operations and the ranges that FixMatch uses, one operation for each sample.

What comes from outside an image when it is turned, sheared or moved has the value ``fill``.

References
----------
Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space", NeurIPS 2020.
Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence", NeurIPS 2020.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from task.data import image_ops
from task.data.image_ops import ONE

LEVELS = 10
"""RandAugment's m: levels are drawn from 1 to ``LEVELS - 1``."""
AFFINE = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


def _blend_percent(level: Tensor) -> Tensor:
    return 9 * level + 5


# Each takes images and levels. The affine operations come first, so that they are one group, and Identity last.
PIXELWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autocontrast": lambda images, level: image_ops.autocontrast(images),
    "brightness": lambda images, level: image_ops.brightness(images, _blend_percent(level)),
    "color": lambda images, level: image_ops.color(images, _blend_percent(level)),
    "contrast": lambda images, level: image_ops.contrast(images, _blend_percent(level)),
    "equalize": lambda images, level: image_ops.equalize(images),
    "posterize": lambda images, level: image_ops.posterize(images, 4 * level // 10 + 4),
    "sharpness": lambda images, level: image_ops.sharpness(images, _blend_percent(level)),
    "solarize": lambda images, level: image_ops.solarize(images, 256 - 256 * level // 10),
}
OPERATIONS = (*AFFINE, *PIXELWISE, "identity")
IDENTITY = OPERATIONS.index("identity")


def apply_operations(images: Tensor, operations: Tensor, levels: Tensor, signs: Tensor, fill: int) -> Tensor:
    """Apply one operation of RandAugment to each image.

    Parameters
    ----------
    images
        ``(B, ch, H, W)`` uint8.
    operations
        ``(B,)`` places in ``OPERATIONS``, on the CPU like the rest.
    levels, signs
        ``(B,)`` strength from 1 to 9, and direction 1 or -1 for the operations that have one.
    fill
        Value of what comes from outside the image.
    """
    order = operations.argsort(stable=True)
    ends = torch.bincount(operations, minlength=len(OPERATIONS)).cumsum(0).tolist()
    place, back = order.to(images.device), order.argsort().to(images.device)
    level = levels[order].to(images.device)
    views = images[place]  # those with the same operation lie together
    moved = ends[len(AFFINE) - 1]
    if moved:
        first = order[:moved]
        matrices = affine_matrices(operations[first], levels[first] * signs[first], *images.shape[-2:])
        views[:moved] = image_ops.affine(views[:moved], matrices.to(images.device), fill)
    for operation, start, end in zip(PIXELWISE.values(), ends[len(AFFINE) - 1 :], ends[len(AFFINE) :], strict=False):
        if end > start:
            views[start:end] = operation(views[start:end], level[start:end])
    return views[back]


def affine_matrices(operations: Tensor, levels: Tensor, height: int, width: int) -> Tensor:
    """Return the coefficients ``(n, 6)`` of ``image_ops.affine`` for affine operations at levels with signs, ``(n,)``.

    Rotations turn around the middle, shears keep the row and the column 0.
    """
    level = levels.double()
    angle = torch.where(operations == AFFINE.index("rotate"), level * (-3 * math.pi / 180), 0.0)
    shear_x, shear_y = (torch.where(operations == AFFINE.index(name), 0.03 * level, 0.0) for name in AFFINE[1:3])
    cos, sin = angle.cos(), angle.sin()
    a, b, d, e = cos, sin + shear_x, shear_y - sin, cos
    # Whole numbers of pixels, rounded towards 0.
    shift_x, shift_y = (
        torch.where(operations == AFFINE.index(name), levels.sign() * (3 * levels.abs() * side // 100), 0)
        for name, side in (("translate_x", width), ("translate_y", height))
    )
    x, y = width / 2, height / 2
    turned_x, turned_y = (x - cos * x - sin * y), (y + sin * x - cos * y)
    # The middle of pixel 0 is at 0.5.
    c = turned_x + shift_x + (a + b) / 2
    f = turned_y + shift_y + (d + e) / 2
    return (torch.stack([a, b, c, d, e, f], 1) * ONE + 0.5).floor().long()
