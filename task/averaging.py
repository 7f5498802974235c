"""Averaging of named tensors, as the weight-sharing methods need it."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor


def weighted_mean(
    states: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    counters: Literal["largest", "heaviest"] = "largest",
) -> dict[str, Tensor]:
    """Return the weighted mean of state dicts, name by name.

    Floating-point tensors (parameters and buffers such as BatchNorm's running statistics) are averaged; integer
    buffers (its counter of batches) keep their type, since a mean of counts means nothing. A state of weight 0 is left
    out altogether: what it holds, infinities included, does not matter.

    Parameters
    ----------
    states : sequence of mapping
        At least one; all with the same names and shapes. Their order does not change the result beyond rounding.
    weights : sequence of float
        One for each state, at least 0; they are normalised to sum 1.
    counters : str
        What becomes of integer buffers: ``largest`` takes the largest value, ``heaviest`` that of the (first) state of
        the largest weight.

    Raises
    ------
    ValueError
        The weights sum to 0 or are not finite and at least 0.
    """
    assert states and len(states) == len(weights)  # noqa: PT018
    total = float(sum(weights))
    if not (0 < total < float("inf")) or min(weights) < 0:
        raise ValueError(f"weights {list(weights)} cannot be normalised: finite, at least 0, not all 0")
    shares = torch.tensor([weight / total for weight in weights])
    kept = shares.nonzero().flatten().tolist()
    states, shares = [states[index] for index in kept], shares[kept]
    heaviest = states[shares.tolist().index(shares.max())]
    mean = {}
    for name, first in states[0].items():
        stacked = torch.stack([state[name] for state in states])
        if first.is_floating_point():
            mean[name] = torch.tensordot(shares.to(stacked.dtype), stacked, dims=1)
        else:
            mean[name] = stacked.amax(dim=0) if counters == "largest" else heaviest[name].clone()
    return mean


def require_alike(who: str, found: Mapping[str, Tensor] | None, wanted: Mapping[str, Tensor]) -> None:
    """Refuse named tensors that are not those of ``wanted`` by name, shape and type.

    Raises
    ------
    ValueError
        One line with ``who`` sent them and the first name that does not fit.
    """
    if found is None:
        raise ValueError(f"{who} sent no weights")
    if set(found) != set(wanted):
        different = sorted(set(found) ^ set(wanted))
        raise ValueError(f"{who} sent other weights than asked for: {', '.join(different[:3])}")
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
            shapes = f"{tuple(found[name].shape)} {found[name].dtype}, needed {tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"{who} sent weights.{name} as {shapes}")


def labelled(label: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return named tensors with ``label`` before every name."""
    return {label + name: tensor for name, tensor in tensors.items()}


def part(label: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the named tensors that begin with ``label``, without it."""
    return {name.removeprefix(label): tensor for name, tensor in tensors.items() if name.startswith(label)}


def client_weight(who: str, examples: int | None, rule: str) -> float:
    """Return the weight of one client in a mean over clients: n_i for the rule ``examples``, 1 for ``uniform``.

    Raises
    ------
    ValueError
        The rule needs the client's number of training samples, and it is missing or 0.
    """
    if rule == "uniform":
        return 1.0
    assert rule == "examples"
    if not examples:
        raise ValueError(f"{who} sent num-examples={examples}: weighting=examples needs at least 1")
    return float(examples)
