"""RSCFed: means of random subsets of the clients, in which models far from the subset's mean count less.

Liang, Lin, Fu, Zhu, Li: "RSCFed: Random Sampling Consensus Federated Semi-Supervised Learning", CVPR 2022,
arXiv:2203.13993.

======================  ==========================================================================
here                    paper, and the authors' code
======================  ==========================================================================
``states``              w_i, the models that a subset's clients trained from w^t
``examples``            N_i
``subsets``             M subsets of Q clients; the mean over subsets is w^{t+1}
``labelled_factor``     lam, how much more a labelled client counts (``w_mul_times``)
``labelled_scale``      s of a subset with a labelled client (``sup_scale``)
``unlabelled_scale``    s of a subset without one (``dist_scale``)
``limit``               the largest alpha of the teacher's moving average
======================  ==========================================================================

A client without labels is a mean teacher: the teacher's answer to one weak view, sharpened, is the target of the
student's answer to another. The teacher is the client's own, is never sent, and lives as long as the client.

Departures from the authors' code: it starts from a model that the labelled client trained before; here a run begins
with a new one, and ``labels.warmup_rounds`` rounds of the labelled clients alone make such a start. BatchNorm's running
statistics of the teacher are copied from the student, where the code (whose network has none) averages parameters only
and would test with the statistics of an untrained model; ``copy_buffers=False`` leaves them. Its aggregation reads an
option that is never set, and stops at the first labelled client; here it computes what it says. Largest exponents are
subtracted, so that distances however large give weights. Integer buffers have no distance and come from the model that
counts most.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from task.averaging import weighted_mean

TRAININGS = "trainings"
"""The name under which a client is told how often to train: once for every subset that it is in."""


def model_label(number: int) -> str:
    """Return what the names of the tensors begin with that a client's training ``number`` (from 0) made."""
    return f"{number}/"


def sharpen(probabilities_BC: Tensor, temperature: float = 0.5) -> Tensor:
    """Return ``p^(1/T) / sum p^(1/T)`` of each of the ``(B, C)`` rows; T below 1 makes large probabilities larger."""
    powers_BC = probabilities_BC ** (1 / temperature)
    return powers_BC / powers_BC.sum(dim=1, keepdim=True)


def consistency_loss(student_BC: Tensor, teacher_BC: Tensor, batch_size: int) -> Tensor:
    """Return the squared difference between the student's probabilities and the teacher's sharpened ones.

    Parameters
    ----------
    student_BC, teacher_BC : Tensor
        ``(B, C)`` logits for two weak views of the same images; only the student gets a gradient.
    batch_size : int
        What the sum over images and classes is divided by: the configured batch size, for a short last batch, too,
        as the authors' code has it.
    """
    target_BC = sharpen(teacher_BC.detach().softmax(dim=1))
    return (student_BC.softmax(dim=1) - target_BC).square().sum() / batch_size


def teacher_decay(step: int, limit: float = 0.999) -> float:
    """Return alpha after ``step`` (from 0, over the client's life): ``min(1 - 1 / (step + 1), limit)``."""
    return min(1 - 1 / (step + 1), limit)


@torch.no_grad()
def update_teacher(
    teacher: nn.Module, student: nn.Module, step: int, *, limit: float = 0.999, copy_buffers: bool = True
) -> None:
    """Move the teacher's parameters to ``alpha teacher + (1 - alpha) student``, in place.

    Parameters
    ----------
    teacher, student : nn.Module
        Two models of the same architecture.
    step : int
        Steps that the client took before this one in its life; at 0 the teacher becomes the student.
    limit : float
        The largest alpha.
    copy_buffers : bool
        Whether the teacher takes the student's buffers (BatchNorm's running statistics) as they are.
    """
    share = 1 - teacher_decay(step, limit)
    for parameter, target in zip(teacher.parameters(), student.parameters(), strict=True):
        parameter.lerp_(target, share)
    if copy_buffers:
        for buffer, source in zip(teacher.buffers(), student.buffers(), strict=True):
            buffer.copy_(source)


def draw_subsets(partitions: Sequence[int], subsets: int, size: int, rng: np.random.Generator) -> list[list[int]]:
    """Return ``subsets`` random subsets of ``size`` different partitions each, every one in ascending order.

    Parameters
    ----------
    partitions : sequence of int
        All clients.
    subsets, size : int
        The paper's M and Q.
    rng : numpy.random.Generator
        A named stream, for instance ``task.seeding.stream(seed, "sample", round)``.

    Raises
    ------
    ValueError
        There are fewer clients than a subset needs.
    """
    if not 1 <= size <= len(partitions):
        raise ValueError(f"subsets of {size} clients cannot be drawn from {len(partitions)}: from 1 to that many")
    drawn = [rng.choice(np.asarray(partitions), size, replace=False) for _ in range(subsets)]
    return [sorted(int(partition) for partition in each) for each in drawn]


def sub_consensus(
    states: Sequence[Mapping[str, Tensor]],
    examples: Sequence[int],
    labelled: Sequence[bool],
    *,
    labelled_factor: float,
    labelled_scale: float,
    unlabelled_scale: float,
) -> tuple[dict[str, Tensor], list[float]]:
    """Return the model of one subset, and the weight beta_i of each of its clients.

    ``f_i`` is N_i, times lam for a labelled client, normalised; ``D_i`` the distance of w_i from the mean by f;
    ``beta_i`` is ``f_i exp(-s D_i / N_i)``, times lam once more for a labelled client, normalised.

    Parameters
    ----------
    states : sequence of mapping
        At least one model, all with the same names and shapes.
    examples : sequence of int
        N_i, at least 1.
    labelled : sequence of bool
        Which of the clients have labels.
    labelled_factor, labelled_scale, unlabelled_scale : float
        lam and the two values of s; the first where the subset has a labelled client.

    References
    ----------
    RSCFed, "Distance-reweighted Model Aggregation".
    """
    assert len(states) == len(examples) == len(labelled)
    assert min(examples) >= 1
    factors = [labelled_factor if own else 1.0 for own in labelled]
    shares = [n * factor for n, factor in zip(examples, factors, strict=True)]
    mean = weighted_mean(states, shares)
    scale = labelled_scale if any(labelled) else unlabelled_scale
    exponents = [-scale * distance(state, mean) / n for state, n in zip(states, examples, strict=True)]
    largest = max(exponents)
    weights = [
        share * factor * math.exp(exponent - largest)
        for share, factor, exponent in zip(shares, factors, exponents, strict=True)
    ]
    betas = [weight / sum(weights) for weight in weights]
    return weighted_mean(states, betas, counters="heaviest"), betas


def distance(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the sum over floating-point tensors of the norms of their differences."""
    pairs = [(tensor, other[name]) for name, tensor in state.items() if tensor.is_floating_point()]
    return float(torch.stack([torch.linalg.vector_norm(one - two) for one, two in pairs]).sum())
