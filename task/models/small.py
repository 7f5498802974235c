"""Four small and really different networks, the family ``htcnn4``: under 1 ms a sample and training step.

That is at 28x28, in batches of ten, on one CPU core. They take images from 16x16 pixels on with any number of
channels: the last map is pooled to a fixed size. ``width`` is the unit of the channel counts, ``norm`` the
normalisation (batch, group or none).

All four end in a dense layer with ReLU and no normalisation behind it. Methods that pull features towards global
prototypes need features of free scale: where a normalisation is the last layer, the features cannot follow, and
FedTGP stayed three to five points lower in our trials.
"""

from torch import nn

from task.models.blocks import BasicBlock, Norm, conv_norm
from task.models.split import check_image_shape

_SMALLEST = 16


def _check(name: str, image_shape: tuple[int, int, int], width: int) -> None:
    """Refuse images that are too small, and a width below one, by name."""
    check_image_shape(name, image_shape, _SMALLEST)
    if width < 1:
        raise ValueError(f"model {name}: width={width} must be at least 1")


def plain(image_shape: tuple[int, int, int], *, width: int = 8, features: int = 512) -> nn.Module:
    """Return a LeNet: two 5x5 convolutions without normalisation, then one wide layer of ``features``.

    Parameters
    ----------
    image_shape : tuple of int
        (channels, height, width).
    width : int
        The convolutions have ``width`` and ``4 width`` channels.
    features : int
        Native width of the features ``(B, features)``, which are not negative.

    References
    ----------
    LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", 1998.
    """
    _check("plain", image_shape, width)
    return nn.Sequential(
        nn.Conv2d(image_shape[0], width, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 4 * width, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *_to_features(4 * width, 4, features),
    )


def vgg(image_shape: tuple[int, int, int], *, width: int = 8, features: int = 1024, norm: Norm = "group") -> nn.Module:
    """Return a VGG: three 3x3 convolutions with pooling between, then one wide layer of ``features``.

    Parameters are those of ``plain``; the convolutions have ``width``, ``4 width`` and ``4 width`` channels.

    References
    ----------
    Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015.
    """
    _check("vgg", image_shape, width)
    return nn.Sequential(
        conv_norm(image_shape[0], width, 3, norm=norm),
        nn.ReLU(),
        nn.MaxPool2d(2),
        conv_norm(width, 4 * width, 3, norm=norm),
        nn.ReLU(),
        nn.MaxPool2d(2),
        conv_norm(4 * width, 4 * width, 3, norm=norm),
        nn.ReLU(),
        *_to_features(4 * width, 3, features),
    )


def residual(
    image_shape: tuple[int, int, int], *, width: int = 8, features: int = 256, norm: Norm = "group"
) -> nn.Module:
    """Return a small ResNet: a strided 3x3 stem, two residual blocks, then one layer of ``features``.

    Parameters are those of ``plain``; the stem has ``2 width`` channels, the blocks ``4 width``.

    References
    ----------
    He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016.
    """
    _check("residual", image_shape, width)
    return nn.Sequential(
        conv_norm(image_shape[0], 2 * width, 3, norm=norm, stride=2),
        nn.ReLU(),
        BasicBlock(2 * width, 4 * width, stride=2, norm=norm),
        BasicBlock(4 * width, 4 * width, stride=1, norm=norm),
        *_to_features(4 * width, 3, features),
    )


def separable(
    image_shape: tuple[int, int, int], *, width: int = 8, features: int = 512, norm: Norm = "group"
) -> nn.Module:
    """Return a MobileNet: a strided stem, two depthwise-separable convolutions, then one layer of ``features``.

    Parameters are those of ``plain``; the channels grow from ``2 width`` to ``8 width``.

    References
    ----------
    Howard et al., "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision Applications", 2017.
    """
    _check("separable", image_shape, width)
    layers: list[nn.Module] = [conv_norm(image_shape[0], 2 * width, 3, norm=norm, stride=2), nn.ReLU()]
    for inputs, outputs, stride in ((2 * width, 4 * width, 1), (4 * width, 8 * width, 2)):
        layers += [
            conv_norm(inputs, inputs, 3, norm=norm, stride=stride, groups=inputs),
            nn.ReLU(),
            conv_norm(inputs, outputs, 1, norm=norm),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, *_to_features(8 * width, 2, features))


def _to_features(channels: int, side: int, features: int) -> list[nn.Module]:
    """Return what ends every network: a map pooled to ``side`` x ``side``, a dense layer and a ReLU."""
    dense = nn.Linear(channels * side * side, features)
    return [nn.AdaptiveAvgPool2d(side), nn.Flatten(), dense, nn.ReLU()]
