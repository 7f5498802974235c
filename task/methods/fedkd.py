"""FedKD: a private teacher and a small shared student learn from each other; the student travels compressed.

Wu, Wu, Lyu, Huang, Xie: "Communication-efficient federated learning via knowledge distillation", Nature
Communications 13, 2022, arXiv:2108.13323.

====================  ==========================================================================
here                  paper
====================  ==========================================================================
``teacher_BC``        logits of the teacher ("mentor"), the private model of the client
``student_BC``        logits of the student ("mentee"), the model that the clients share
``teacher_BK``        hidden states H^t of the teacher
``aligned_BK``        W^h H^s, the student's hidden states in the teacher's terms
``divisor``           L^t + L^s, the two task losses, by which distillation is divided
``energy``            T(t), share of the squared singular values that the kept ones must hold
``u, s, v``           U, Sigma, V of a matrix of rank K in the paper, ``rank`` here
====================  ==========================================================================

What is compressed is the change of the student in a round, as in the paper: clients send theirs, the server sends the
mean's to those who hold the student before it, and the student itself to the others (``what=params`` compresses the
parameters instead, for everybody, as HtFLlib does). Departures from the paper: the divisor is at least
``least_divisor``, since two models that fit a batch perfectly would divide by 0; only the last hidden states are
compared; SGD in place of Adam; the divergence is a mean over samples. A kernel of ``(out, in, height, width)`` is the
matrix ``(out, in * height * width)``; vectors travel as they are, and so does a matrix whose factors would be larger.
Float buffers are averaged like parameters, counters of batches take the largest value, and a client that trained
nothing sends nothing.

Departures from the authors' and HtFLlib's code: a matrix keeps at least one singular value and may keep all. There,
ranks 0 to n - 1 are tried and 0 stays where none suffices, which sets fresh layers to zero; and convolutions are
compressed one ``height x width`` slice at a time, which makes them larger. ``svd=htfllib`` does both, to study it.
HtFLlib also divides the divergence by the number of classes (``kl=mean``) and clips gradients (``clip=10``).
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from task.losses import divergence

Svd = Literal["flat", "htfllib"]
FACTORS = ("u", "s", "v")


def distillation_losses(
    teacher_BC: Tensor,
    student_BC: Tensor,
    teacher_BK: Tensor,
    aligned_BK: Tensor,
    labels_B: Tensor,
    *,
    kl: Literal["batchmean", "mean"],
    least_divisor: float,
) -> tuple[Tensor, Tensor]:
    """Return the losses of teacher and student on one batch; each of the models learns from the sum of both.

    ``CE + (KL(other || own) + MSE(teacher_BK, aligned_BK)) / divisor`` for each, with the sum of both CE as divisor.

    Parameters
    ----------
    teacher_BC, student_BC : Tensor
        ``(B, C)`` logits.
    teacher_BK, aligned_BK : Tensor
        ``(B, K)`` features of the teacher, and those of the student after the client's linear map.
    labels_B : Tensor
        ``(B,)`` int64 labels.
    kl : str
        ``batchmean`` or ``mean``, as in ``task.losses.divergence``.
    least_divisor : float
        The least divisor, above 0.

    References
    ----------
    FedKD, eq. (1) to (7): adaptive mutual distillation, adaptive hidden loss, task loss.
    """
    teacher_loss = functional.cross_entropy(teacher_BC, labels_B)
    student_loss = functional.cross_entropy(student_BC, labels_B)
    divisor = (teacher_loss + student_loss).clamp(min=least_divisor)
    hidden = functional.mse_loss(aligned_BK, teacher_BK)
    return (
        teacher_loss + (divergence(teacher_BC, student_BC, kl) + hidden) / divisor,
        student_loss + (divergence(student_BC, teacher_BC, kl) + hidden) / divisor,
    )


def energy_at(number: int, rounds: int, start: float, end: float) -> float:
    """Return T(t) in round ``number`` (from 1) of ``rounds``: from just above ``start`` in even steps to ``end``.

    References
    ----------
    FedKD, eq. (11): ``T_start + (T_end - T_start) t``, t being the share of the training that is done.
    """
    return start + (end - start) * min(number / rounds, 1.0)


def change(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what ``apply_change`` makes ``after`` of ``before`` with; integer tensors are kept as they are after."""
    return {n: after[n] - before[n] if after[n].is_floating_point() else after[n] for n in before}


def apply_change(before: Mapping[str, Tensor], difference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return named tensors with a ``difference`` (see ``change``) added."""
    return {n: old + difference[n] if old.is_floating_point() else difference[n] for n, old in before.items()}


def compress(tensors: Mapping[str, Tensor], energy: float, svd: Svd) -> dict[str, Tensor]:
    """Return named tensors with matrices replaced by ``name/u``, ``name/s``, ``name/v`` of lower rank.

    Parameters
    ----------
    tensors : mapping
        Float32 and integer tensors of any shape, on the CPU.
    energy : float
        Share of the sum of squared singular values that the kept ones hold at least, above 0, at most 1.
    svd : str
        ``flat``: all axes but the first are one; factors only where they are smaller than the matrix. ``htfllib``:
        the last two axes of a tensor of more, factors always, the rank that the public code's loop finds.

    References
    ----------
    FedKD, eq. (8) to (10).
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or not tensor.is_floating_point():
            packed[name] = tensor
            continue
        factors = _factorise(tensor.flatten(1) if svd == "flat" else tensor, energy, svd)
        if svd == "flat" and sum(map(torch.numel, factors)) >= tensor.numel():
            packed[name] = tensor
        else:
            packed |= {f"{name}/{key}": factor for key, factor in zip(FACTORS, factors, strict=True)}
    return packed


def decompress(packed: Mapping[str, Tensor], shapes: Mapping[str, Tensor], who: str) -> dict[str, Tensor]:
    """Return the named tensors that ``compress`` turned into ``packed``.

    Parameters
    ----------
    packed : mapping
        What came over the wire.
    shapes : mapping
        Tensors (of any device, also ``meta``) with the names, shapes and types that must come out.
    who : str
        Who sent it, for messages.

    Raises
    ------
    ValueError
        One line with the first name that is missing, unknown, or does not fit.
    """
    tensors, unknown = {}, set(packed)
    for name, wanted in shapes.items():
        if name in packed:
            tensors[name] = packed[name]
            unknown.discard(name)
        else:
            keys = [f"{name}/{key}" for key in FACTORS]
            if any(key not in packed for key in keys):
                raise ValueError(f"{who} sent neither weights.{name} nor its factors")
            tensors[name] = _multiply([packed[key] for key in keys], wanted, f"{who} sent weights.{name}")
            unknown.difference_update(keys)
    if unknown:
        raise ValueError(f"{who} sent unknown weights: {', '.join(sorted(unknown)[:3])}")
    return tensors


def _factorise(matrices: Tensor, energy: float, svd: Svd) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(..., m, t)``, ``(..., t)`` and ``(..., t, n)`` of the singular value decomposition at rank t.

    From the eigenvectors of the smaller Gram matrix, four times as fast as ``torch.linalg.svd`` on the wide matrices
    of a network; the digits that this costs are those of the smallest singular values, which are not kept.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        u, s, v = _factorise(matrices.mT, energy, svd)
        return v.mT.contiguous(), s, u.mT.contiguous()
    squares, vectors = torch.linalg.eigh(matrices @ matrices.mT)
    # Of all matrices together: those of a convolution's slices get one common rank.
    squares = squares.clamp(min=0).flatten(0, -2).sum(dim=0) if squares.dim() > 1 else squares.clamp(min=0)
    rank = _rank(squares.flip(0).double().cumsum(dim=0), energy, svd)
    u = vectors.flip(-1)[..., :rank].contiguous()
    rows = u.mT @ matrices
    s = torch.linalg.vector_norm(rows, dim=-1)
    return u, s, rows / s.clamp(min=torch.finfo(s.dtype).tiny).unsqueeze(-1)


def _rank(cumulative: Tensor, energy: float, svd: Svd) -> int:
    """Return how many singular values to keep, given the ``(n,)`` running sums of their squares."""
    wanted = energy * float(cumulative[-1])
    if svd == "flat":
        return 1 + int((cumulative[:-1] < wanted).sum())
    # The public code compares the first r squares for r = 0 .. n - 1, and keeps r = 0 where none is enough.
    enough = (cumulative[:-1] > wanted).nonzero()
    return 1 + int(enough[0]) if len(enough) else 0


def _multiply(factors: list[Tensor], wanted: Tensor, what: str) -> Tensor:
    """Return the tensor like ``wanted`` that checked factors u, s, v make."""
    u, s, v = factors
    rank = s.shape[-1] if s.dim() else -1
    for matrix in (wanted.shape, wanted.flatten(1).shape if wanted.dim() > 1 else wanted.shape):
        if len(matrix) < 2 or not wanted.is_floating_point():
            continue
        batch, (rows, columns) = matrix[:-2], matrix[-2:]
        fits = (*batch, rows, rank) == u.shape and (*batch, rank) == s.shape and (*batch, rank, columns) == v.shape
        if fits and rank <= min(rows, columns) and all(factor.dtype == wanted.dtype for factor in factors):
            product: Tensor = ((u * s.unsqueeze(-2)) @ v).reshape(wanted.shape)
            if not torch.isfinite(product).all():
                raise ValueError(f"{what} as factors whose product is not finite (NaN or Inf)")
            return product
    shapes = ", ".join(str(tuple(factor.shape)) for factor in factors)
    raise ValueError(f"{what} as factors {shapes}: they do not make {tuple(wanted.shape)} {wanted.dtype}")
