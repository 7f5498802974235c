"""Layers that several of our own networks share."""

from math import gcd
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["batch", "group", "none"]


def make_norm(norm: Norm, channels: int) -> nn.Module:
    """Return the normalisation called ``norm`` for maps of ``channels`` channels.

    Parameters
    ----------
    norm : {"batch", "group", "none"}
        ``group`` makes groups of about eight channels; it works the same in training, in evaluation and for
        a batch of one.
    channels : int
        Channels of the map.
    """
    assert norm in get_args(Norm), norm
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(gcd(channels, max(1, channels // 8)), channels)
    return nn.Identity()


def conv_norm(inputs: int, outputs: int, kernel: int, *, norm: Norm, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the size (up to the stride) and its normalisation.

    The convolution has a bias only where no normalisation follows that would remove it.
    """
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=norm == "none"),
        make_norm(norm, outputs),
    )


class BasicBlock(nn.Module):
    """The residual block of two 3x3 convolutions, with a 1x1 shortcut where the shape changes.

    References
    ----------
    He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, Fig. 5 (left).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm = "batch") -> None:
        super().__init__()
        self.first = conv_norm(inputs, outputs, 3, norm=norm, stride=stride)
        self.second = conv_norm(outputs, outputs, 3, norm=norm)
        same_shape = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same_shape else conv_norm(inputs, outputs, 1, norm=norm, stride=stride)

    def forward(self, maps: Tensor) -> Tensor:
        """Return ``(B, outputs, h, w)`` from ``(B, inputs, H, W)``, with h, w divided by the stride."""
        change: Tensor = self.second(F.relu(self.first(maps)))
        return F.relu(change + self.shortcut(maps))
