"""ResNet4, 6, 8 and 10: the residual network of the family HtFE9 with one block a stage, cut short.

The number counts the convolutions (two a block, one stem) and the classifier. ResNet18 and larger come from
torchvision (``task.models.zoo``).
"""

from torch import nn

from task.models.blocks import BasicBlock, Norm, conv_norm
from task.models.split import check_image_shape

_WIDTHS = (64, 128, 256, 512)


def _resnet(name: str, image_shape: tuple[int, int, int], stages: int, norm: Norm) -> nn.Module:
    """Return a 7x7 stem, ``stages`` blocks of doubling width, and the mean over the map.

    Convolutions start from He's normal distribution (fan out).
    """
    check_image_shape(name, image_shape, smallest=1)
    widths = _WIDTHS[:stages]
    layers: list[nn.Module] = [
        *conv_norm(image_shape[0], widths[0], 7, norm=norm, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    inputs = widths[0]
    for stage, outputs in enumerate(widths):
        layers.append(BasicBlock(inputs, outputs, stride=1 if stage == 0 else 2, norm=norm))
        inputs = outputs
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet4(image_shape: tuple[int, int, int], *, norm: Norm = "batch") -> nn.Module:
    """Return the body of ResNet4, features ``(B, 64)``; ``norm`` is batch, group or none."""
    return _resnet("resnet4", image_shape, 1, norm)


def resnet6(image_shape: tuple[int, int, int], *, norm: Norm = "batch") -> nn.Module:
    """Return the body of ResNet6, features ``(B, 128)``; ``norm`` is batch, group or none."""
    return _resnet("resnet6", image_shape, 2, norm)


def resnet8(image_shape: tuple[int, int, int], *, norm: Norm = "batch") -> nn.Module:
    """Return the body of ResNet8, features ``(B, 256)``; ``norm`` is batch, group or none."""
    return _resnet("resnet8", image_shape, 3, norm)


def resnet10(image_shape: tuple[int, int, int], *, norm: Norm = "batch") -> nn.Module:
    """Return the body of ResNet10, features ``(B, 512)``; ``norm`` is batch, group or none."""
    return _resnet("resnet10", image_shape, 4, norm)
