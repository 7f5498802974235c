"""The head as the part of a model that some methods share: its names on the wire, its first weights, its checks."""

import math
from collections.abc import Mapping

import torch
from torch import Generator, Tensor, nn

from task.averaging import labelled, require_alike
from task.models.split import SplitModel, make_head, weights_of
from task.schema import ModelConfig, require

HEAD = "head."
"""What the names of a head's tensors begin with, in a model and on the wire."""


def require_equal_heads(settings: ModelConfig, method: str) -> None:
    """Refuse a group of models with different heads for a ``method`` that averages them.

    Raises
    ------
    ValueError
        One line naming ``model.heads``.
    """
    alike = len({tuple(widths) for widths in settings.heads}) == 1
    require(alike, "model.heads", settings.heads, f"{method} averages the heads, so all must have the same widths")


def build_head(settings: ModelConfig, num_classes: int) -> nn.Module:
    """Return the head that all clients share, ``(B, K)`` to ``(B, C)``; its weights are arbitrary."""
    with torch.random.fork_rng(devices=[]):
        return make_head(settings.feature_dim, settings.heads[0], num_classes, settings.final_relu)


def first_head(settings: ModelConfig, num_classes: int, rng: Generator) -> dict[str, Tensor]:
    """Return the named tensors of the shared head before round 1, drawn from ``rng``."""
    head = build_head(settings, num_classes)
    initialise(head, rng)
    return labelled(HEAD, weights_of(head))


def initialise(module: nn.Module, rng: Generator) -> None:
    """Give every linear layer of ``module`` first weights by torch's own rule, but from ``rng``."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            bound = 1 / math.sqrt(layer.in_features)
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=rng)


def head_part(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the named ``tensors`` that belong to a head."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(HEAD)}


def read_head(model: SplitModel) -> dict[str, Tensor]:
    """Return copies of the named tensors of the model's head, on the CPU."""
    return labelled(HEAD, weights_of(model.head))


def replace_head(model: SplitModel, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the model's head with the head among the named ``tensors``.

    Raises
    ------
    ValueError
        They are not those of this head by name, shape and type.
    """
    found = head_part(tensors)
    require_alike("server", found, head_part(model.state_dict()))
    model.load_state_dict(found, strict=False)
