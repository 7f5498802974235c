"""Which client gets which model, and how a model is built, checked and initialised."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from task.config import build
from task.models.pretrained import load_pretrained
from task.models.split import SplitModel, make_head
from task.schema import ModelConfig
from task.seeding import stream_seed

Entry = Mapping[str, Any]


def entry_for(settings: ModelConfig, partition: int, pinned: str | None = None) -> Entry:
    """Return the entry of a client: number ``partition mod n``, or the one that the node has pinned by name.

    Raises
    ------
    ValueError
        If there is no entry called ``pinned``.
    """
    return settings.entries[_entry_index(settings, partition, pinned)]


def _entry_index(settings: ModelConfig, partition: int, pinned: str | None) -> int:
    names = _names(settings)
    if pinned is None:
        return partition % len(names)
    if pinned not in names:
        raise ValueError(f"client {partition}: pinned model {pinned!r} must be one of {', '.join(names)}")
    return names.index(pinned)


def _names(settings: ModelConfig) -> list[str]:
    """Return the names of the entries, which must be there and differ: pins, weights and results use them."""
    names = [str(entry.get("name", "")) for entry in settings.entries]
    if "" in names or len(set(names)) < len(names):
        raise ValueError(f"model.entries: every entry needs a name of its own; found {names}")
    return names


def head_for(settings: ModelConfig, partition: int) -> Sequence[int]:
    """Return the hidden widths of a client's head: number ``partition mod number of heads``."""
    return settings.heads[partition % len(settings.heads)]


def build_model(
    settings: ModelConfig,
    partition: int,
    *,
    num_classes: int,
    image_shape: tuple[int, int, int],
    seed: int,
    pinned: str | None = None,
) -> SplitModel:
    """Return the model of one client, initialised from its own random stream, on the CPU.

    Torch's global generator is left as it was. A caller that has the weights already spares itself the
    initialisation: ``with torch.device("meta"): model = build_model(...)``, then
    ``model.load_state_dict(state, assign=True)``; checks and pretrained weights are left out then.

    Parameters
    ----------
    partition, seed : int
        The client, and the seed of the run. With ``same_init``, the clients of one entry start alike.
    image_shape : tuple of int
        (channels, height, width).
    pinned : str, optional
        Name of an entry, in place of the one that the partition gives.

    Raises
    ------
    ValueError
        If the entry's settings, its images or features, or its pretrained weights do not fit.
    """
    index = _entry_index(settings, partition, pinned)
    init = ("init-entry", index) if settings.same_init else ("init", partition)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would seed the generators of all GPUs too.
        torch.default_generator.manual_seed(stream_seed(seed, *init))
        body = _build_body(settings, settings.entries[index], image_shape)
        hidden = head_for(settings, partition)
        head = make_head(settings.feature_dim, hidden, num_classes, settings.final_relu)
    return SplitModel(body, head, settings.feature_dim)


def build_auxiliary(
    settings: ModelConfig, *, num_classes: int, image_shape: tuple[int, int, int], seed: int
) -> SplitModel:
    """Return the extra model that some methods share: ``model.auxiliary``, or the first entry, with head 0.

    Its first weights come from a stream of its own and are the same wherever it is built. Parameters and errors are
    those of ``build_model``.
    """
    entry = settings.auxiliary or settings.entries[0]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream_seed(seed, "init", "auxiliary"))
        body = _build_body(settings, entry, image_shape)
        head = make_head(settings.feature_dim, head_for(settings, 0), num_classes, settings.final_relu)
    return SplitModel(body, head, settings.feature_dim)


def check_models(settings: ModelConfig, image_shape: tuple[int, int, int]) -> None:
    """Build the body of every entry once, to refuse a bad one before the first round.

    Raises
    ------
    ValueError
        As ``build_model``, and for entries without a name of their own.
    """
    _names(settings)
    with torch.random.fork_rng(devices=[]):
        for entry in settings.entries:
            _build_body(settings, entry, image_shape)


def _build_body(settings: ModelConfig, entry: Entry, image_shape: tuple[int, int, int]) -> nn.Module:
    """Return the checked body of an entry, with its pretrained weights if it has any."""
    name = entry["name"]
    body = build(entry, f"model.entries.{name}", image_shape=image_shape)
    if not isinstance(body, nn.Module):
        found = type(body).__name__
        raise ValueError(f"model.entries.{name}: {entry['_target_']} must return an nn.Module, not {found}")
    if any(parameter.is_meta for parameter in body.parameters()):
        return body
    check_body(body, image_shape, name)
    if name in settings.pretrained:
        load_pretrained(body, settings.pretrained[name], name)
    return body


def check_body(body: nn.Module, image_shape: tuple[int, int, int], name: str = "body") -> int:
    """Return the native width of a body after checking it with a batch of two in eval mode.

    Raises
    ------
    ValueError
        If it cannot take images ``(2, *image_shape)``, or does not turn them into floating-point features
        ``(2, width)``.
    """
    where = f"model.entries.{name}: images of shape {tuple(image_shape)}"
    training = [module for module in body.modules() if module.training]
    device = next((parameter.device for parameter in body.parameters()), torch.device("cpu"))
    body.eval()
    try:
        with torch.no_grad():
            features = body(torch.zeros(2, *image_shape, device=device))
    except Exception as error:  # a user's module may raise anything
        reason = " ".join(str(error).split())
        raise ValueError(f"{where} do not fit: {type(error).__name__}: {reason}") from error
    finally:
        for module in training:
            module.training = True
    if not isinstance(features, Tensor):
        raise ValueError(f"{where} must become a tensor of features (2, width); found {type(features).__name__}")
    shape, dtype = tuple(features.shape), features.dtype
    if len(shape) != 2 or shape[0] != 2 or shape[1] < 1 or not features.is_floating_point():
        raise ValueError(f"{where} must become floating-point features (2, width); found {shape} {dtype}")
    return shape[1]
