"""The contract of every client model: a base with features ``(B, K)`` and a head with logits ``(B, C)``."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class PoolToWidth(nn.Module):
    """Average pooling along the features, from any native width to ``width``; it has no parameters.

    It computes what ``nn.AdaptiveAvgPool1d(width)`` computes on a ``(B, n)`` tensor: output j is the mean of
    the inputs ``floor(j n / width)`` to ``ceil((j + 1) n / width) - 1``. A wider input is averaged in groups
    or overlapping windows, a narrower one is repeated, an equal one passes.

    Parameters
    ----------
    width : int
        The width K of the result.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, features: Tensor) -> Tensor:
        """Return ``(B, width)`` from features ``(B, n)``."""
        native = features.shape[1]
        if native == self.width:
            return features
        # The two even cases are written out because the backward pass of adaptive pooling adds in no fixed
        # order on CUDA; these are deterministic there too.
        if native % self.width == 0:
            return features.reshape(-1, self.width, native // self.width).mean(2)
        if self.width % native == 0:
            return features.unsqueeze(2).expand(-1, -1, self.width // native).flatten(1)
        return F.adaptive_avg_pool1d(features, self.width)

    def extra_repr(self) -> str:
        """Return the width for ``repr``."""
        return str(self.width)


class SplitModel(nn.Module):
    """A base that makes features and a head that makes logits, the only model that the methods know.

    Parameters
    ----------
    body : nn.Module
        Images ``(B, channels, height, width)`` to features ``(B, n)`` of any width n.
    head : nn.Module
        Features ``(B, K)`` to logits ``(B, C)``.
    feature_dim : int
        K.
    """

    def __init__(self, body: nn.Module, head: nn.Module, feature_dim: int) -> None:
        super().__init__()
        self.base = nn.Sequential(OrderedDict(body=body, pool=PoolToWidth(feature_dim)))
        self.head = head

    def features(self, images: Tensor) -> Tensor:
        """Return the features ``(B, K)`` of images ``(B, channels, height, width)``."""
        features: Tensor = self.base(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits ``(B, C)`` of images ``(B, channels, height, width)``."""
        logits: Tensor = self.head(self.base(images))
        return logits

    @property
    def has_batchnorm(self) -> bool:
        """Whether any layer is a BatchNorm, so that batches of one need care (``batchnorm_in_eval``)."""
        return has_batchnorm(self)


def make_head(feature_dim: int, hidden: Sequence[int], num_classes: int, final_relu: bool = False) -> nn.Module:
    """Return a head: Linear and ReLU for every hidden width, then a Linear to the classes.

    Parameters
    ----------
    feature_dim, num_classes : int
        K and C.
    hidden : sequence of int
        Widths of the hidden layers; empty for a single Linear.
    final_relu : bool
        Put a ReLU on the logits, as the public code of the heads HtC4 does (no negative logits).
    """
    layers: list[nn.Module] = []
    width = feature_dim
    for next_width in hidden:
        layers += [nn.Linear(width, next_width), nn.ReLU()]
        width = next_width
    layers.append(nn.Linear(width, num_classes))
    if final_relu:
        layers.append(nn.ReLU())
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


def has_batchnorm(module: nn.Module) -> bool:
    """Tell whether any layer of ``module`` is a BatchNorm."""
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())


@contextmanager
def batchnorm_in_eval(model: nn.Module) -> Iterator[None]:
    """Run the block with all BatchNorm layers of ``model`` in eval mode, then put them back.

    For a training step of a single sample: the variance of one value is undefined and torch refuses it where
    a map is 1x1. In eval mode the layer normalises with its running statistics and leaves them untouched; its
    weight and bias are trained all the same. Dropout and everything else stay in training mode.
    """
    training = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    for module in training:
        module.train(False)
    try:
        yield
    finally:
        for module in training:
            module.train(True)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all named tensors of a model, parameters and buffers, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def parameter_count(module: nn.Module) -> int:
    """Return the number of trainable scalars; running statistics of BatchNorm are not counted."""
    return sum(parameter.numel() for parameter in module.parameters())


def check_image_shape(model: str, image_shape: Sequence[int], smallest: int) -> None:
    """Refuse images that are too small for a model, before a layer does so in words of its own.

    Raises
    ------
    ValueError
        If ``image_shape`` is not (channels, height, width) with a channel and sides of ``smallest`` pixels.
    """
    if len(image_shape) != 3 or image_shape[0] < 1 or min(image_shape[1:]) < smallest:
        raise ValueError(
            f"model {model}: images of shape {tuple(image_shape)} do not fit; expected (channels, height, "
            f"width) with at least 1 channel and sides of at least {smallest} pixels"
        )
