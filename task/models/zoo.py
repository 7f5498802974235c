"""The bodies of the families HtFE: the 4-layer CNN, and torchvision's ResNet, GoogLeNet and MobileNetV2.

torchvision's networks keep their ImageNet stems at every image size and start untrained (``weights=None``);
their last layer is taken off. Where images do not have three channels, the first convolution is made anew for
the channels at hand and starts as that network's other convolutions do. torchvision is imported on first use:
it costs more than a second, and most clients do without.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from task.models.split import check_image_shape

_RGB = 3


def cnn4(image_shape: tuple[int, int, int], *, features: int = 512) -> nn.Module:
    """Return the 4-layer CNN (two convolutions, a dense layer; the head is the fourth).

    Parameters
    ----------
    image_shape : tuple of int
        (channels, height, width); sides of at least 16 pixels, which need not be equal.
    features : int
        Native width of the features ``(B, features)``, which are not negative.

    References
    ----------
    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
    section 3; widths as in the families HtFE (``FedAvgCNN``).
    """
    check_image_shape("cnn4", image_shape, smallest=16)
    channels, height, width = image_shape
    flat = 64 * _after_two_convolutions(height) * _after_two_convolutions(width)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(flat, features),
        nn.ReLU(),
    )


def _after_two_convolutions(side: int) -> int:
    """Return the side of a map after two times a 5x5 convolution and pooling by two."""
    for _ in range(2):
        side = (side - 4) // 2
    return side


def resnet18(image_shape: tuple[int, int, int]) -> nn.Module:
    """Return the body of ResNet18, features ``(B, 512)``."""
    return _torchvision_resnet("resnet18", image_shape)


def resnet34(image_shape: tuple[int, int, int]) -> nn.Module:
    """Return the body of ResNet34, features ``(B, 512)``."""
    return _torchvision_resnet("resnet34", image_shape)


def resnet50(image_shape: tuple[int, int, int]) -> nn.Module:
    """Return the body of ResNet50, features ``(B, 2048)``."""
    return _torchvision_resnet("resnet50", image_shape)


def resnet101(image_shape: tuple[int, int, int]) -> nn.Module:
    """Return the body of ResNet101, features ``(B, 2048)``."""
    return _torchvision_resnet("resnet101", image_shape)


def resnet152(image_shape: tuple[int, int, int]) -> nn.Module:
    """Return the body of ResNet152, features ``(B, 2048)``."""
    return _torchvision_resnet("resnet152", image_shape)


def _torchvision_resnet(name: str, image_shape: tuple[int, int, int]) -> nn.Module:
    """Return torchvision's ResNet called ``name`` without its classifier, for the channels at hand."""
    from torchvision import models

    check_image_shape(name, image_shape, smallest=1)
    # The classifier is thrown away: a single class keeps it cheap to make.
    model: Any = models.get_model(name, weights=None, num_classes=1)
    model.fc = nn.Identity()
    model.conv1 = _for_channels(model.conv1, image_shape[0], _he_normal)
    body: nn.Module = model
    return body


def googlenet(image_shape: tuple[int, int, int], *, dropout: float = 0.2) -> nn.Module:
    """Return the body of GoogLeNet with BatchNorm and without auxiliary heads, features ``(B, 1024)``.

    Convolutions start from torchvision's truncated normal distribution of standard deviation 0.01.

    Parameters
    ----------
    image_shape : tuple of int
        (channels, height, width).
    dropout : float
        Share of the features that is dropped in training.
    """
    from torchvision import models

    check_image_shape("googlenet", image_shape, smallest=1)
    model: Any = models.GoogLeNet(num_classes=1, aux_logits=False, init_weights=True, dropout=dropout)
    model.fc = nn.Identity()
    model.conv1.conv = _for_channels(model.conv1.conv, image_shape[0], _googlenet_normal)
    body: nn.Module = model
    return body


def mobilenet_v2(image_shape: tuple[int, int, int], *, dropout: float = 0.2) -> nn.Module:
    """Return the body of MobileNetV2, features ``(B, 1280)``.

    Parameters
    ----------
    image_shape : tuple of int
        (channels, height, width).
    dropout : float
        Share of the features that is dropped in training.
    """
    from torchvision import models

    check_image_shape("mobilenet_v2", image_shape, smallest=1)
    model: Any = models.MobileNetV2(num_classes=1, dropout=dropout)
    model.classifier[1] = nn.Identity()
    model.features[0][0] = _for_channels(model.features[0][0], image_shape[0], _he_normal)
    body: nn.Module = model
    return body


def _for_channels(stem: nn.Conv2d, channels: int, initialise: Callable[[nn.Conv2d], None]) -> nn.Conv2d:
    """Return ``stem`` itself for RGB images, otherwise a new one like it for ``channels`` channels."""
    if channels == _RGB:
        return stem
    kernel, stride, padding = stem.kernel_size[0], stem.stride[0], stem.padding[0]
    assert isinstance(padding, int)
    made = nn.Conv2d(channels, stem.out_channels, kernel, stride, padding, bias=stem.bias is not None)
    initialise(made)
    return made


def _he_normal(convolution: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")


def _googlenet_normal(convolution: nn.Conv2d) -> None:
    nn.init.trunc_normal_(convolution.weight, mean=0.0, std=0.01, a=-2, b=2)
