"""WRN-16-2, the wide residual network that semi-supervised methods are compared with at 32x32."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from task.models.blocks import Norm, make_norm
from task.models.split import check_image_shape
from task.schema import require

SLOPE = 0.1
"""Of LeakyReLU below zero."""


class PreActivationBlock(nn.Module):
    """The residual block with normalisation and activation before each of its two 3x3 convolutions.

    Parameters
    ----------
    inputs, outputs, stride : int
        Where the shape changes, the shortcut is a 1x1 convolution.
    norm : {"batch", "group", "none"}
        The normalisation.
    activated_shortcut : bool
        Whether the shortcut starts behind the first activation.

    References
    ----------
    He, Zhang, Ren, Sun, "Identity Mappings in Deep Residual Networks", ECCV 2016, Fig. 4 (e).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm, activated_shortcut: bool) -> None:
        super().__init__()
        self.first_norm = make_norm(norm, inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.second_norm = make_norm(norm, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1)
        same_shape = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same_shape else nn.Conv2d(inputs, outputs, 1, stride)
        self.activated_shortcut = activated_shortcut

    def forward(self, maps: Tensor) -> Tensor:
        """Return ``(B, outputs, h, w)`` from ``(B, inputs, H, W)``, with h, w divided by the stride."""
        active = F.leaky_relu(self.first_norm(maps), SLOPE)
        change: Tensor = self.second(F.leaky_relu(self.second_norm(self.first(active)), SLOPE))
        kept: Tensor = self.shortcut(active if self.activated_shortcut else maps)
        return kept + change


def wrn16_2(image_shape: tuple[int, int, int], *, norm: Norm = "batch", bn_momentum: float = 0.1) -> nn.Module:
    """Return the body of WRN-16-2, features ``(B, 128)``; with a linear head for 10 classes 692,810 parameters.

    As in semi-supervised work every convolution has a bias. Convolutions start from He's normal distribution
    (fan out). The head is the zoo's own, with torch's first weights in place of Xavier's.

    Parameters
    ----------
    image_shape : tuple of int
        (channels, height, width); sides of at least 8 pixels.
    norm : {"batch", "group", "none"}
        The normalisation.
    bn_momentum : float
        Share of a new batch in BatchNorm's running statistics. The 0.001 of centralised semi-supervised work needs
        about a thousand steps and a moving average of the weights; after a local epoch the statistics would still
        be those of the start, and the model in eval mode confident and wrong.

    References
    ----------
    Zagoruyko, Komodakis, "Wide Residual Networks", BMVC 2016.
    """
    check_image_shape("wrn16_2", image_shape, smallest=8)
    require(0 < bn_momentum <= 1, "bn_momentum", bn_momentum, "above 0, at most 1")
    layers: list[nn.Module] = [nn.Conv2d(image_shape[0], 16, 3, 1, 1)]
    inputs = 16
    for outputs, stride in ((32, 1), (64, 2), (128, 2)):
        layers += [
            PreActivationBlock(inputs, outputs, stride, norm, activated_shortcut=inputs == 16),
            PreActivationBlock(outputs, outputs, 1, norm, activated_shortcut=False),
        ]
        inputs = outputs
    model = nn.Sequential(*layers, make_norm(norm, inputs), nn.LeakyReLU(SLOPE), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, a=SLOPE, mode="fan_out", nonlinearity="leaky_relu")
        elif isinstance(module, _BatchNorm):
            module.momentum = bn_momentum
    return model
