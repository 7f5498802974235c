"""The models of the zoo with the numbers that they must have, and bodies built once for several tests."""

from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from task.config import build


class Row(NamedTuple):
    """One model at 3x32x32: native width, trainable scalars of the body, BatchNorm layers."""

    target: str
    width: int
    parameters: int
    batchnorms: int


ZOO = {
    "cnn4": Row("task.models.zoo.cnn4", 512, 873_408, 0),
    "googlenet": Row("task.models.zoo.googlenet", 1024, 5_599_904, 57),
    "mobilenet_v2": Row("task.models.zoo.mobilenet_v2", 1280, 2_223_872, 52),
    "resnet4": Row("task.models.resnet.resnet4", 64, 83_520, 3),
    "resnet6": Row("task.models.resnet.resnet6", 128, 313_664, 6),
    "resnet8": Row("task.models.resnet.resnet8", 256, 1_232_704, 9),
    "resnet10": Row("task.models.resnet.resnet10", 512, 4_905_792, 12),
    "resnet18": Row("task.models.zoo.resnet18", 512, 11_176_512, 20),
    "resnet34": Row("task.models.zoo.resnet34", 512, 21_284_672, 36),
    "resnet50": Row("task.models.zoo.resnet50", 2048, 23_508_032, 53),
    "resnet101": Row("task.models.zoo.resnet101", 2048, 42_500_160, 104),
    "resnet152": Row("task.models.zoo.resnet152", 2048, 58_143_808, 155),
    "wrn16_2": Row("task.models.wide_resnet.wrn16_2", 128, 691_520, 13),
}
SMALL = {
    "plain": Row("task.models.small.plain", 512, 608 + 6_432 + 262_656, 0),
    "vgg": Row("task.models.small.vgg", 1024, 216 + 16 + 2_304 + 64 + 9_216 + 64 + 295_936, 3),
    "residual": Row("task.models.small.residual", 256, 432 + 32 + 14_528 + 18_560 + 73_984, 6),
    "separable": Row(
        "task.models.small.separable", 512, 432 + 32 + 144 + 32 + 512 + 64 + 288 + 64 + 2048 + 128 + 131_584, 5
    ),
}
ALL = ZOO | SMALL


def make(name: str, image_shape: tuple[int, int, int], **settings: object) -> nn.Module:
    """Build a body as the configuration does."""
    body = build({"_target_": ALL[name].target, **settings}, image_shape=image_shape)
    assert isinstance(body, nn.Module)
    return body


def make_meta(name: str, image_shape: tuple[int, int, int], **settings: object) -> nn.Module:
    """Build a body that has shapes but no numbers."""
    with torch.device("meta"):
        return make(name, image_shape, **settings)


@cache
def body_32(name: str) -> nn.Module:
    """Return the body for 3x32x32, built once; with BatchNorm where the model can have it."""
    settings = {"norm": "batch"} if name in SMALL and name != "plain" else {}
    return make(name, (3, 32, 32), **settings)
