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
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional

from task.averaging import require_alike
from task.losses import divergence
from task.schema import require

Svd = Literal["flat", "htfllib"]
FACTORS = ("u", "s", "v")
MODEL, CHANGE = "model/", "change/"
SKETCH = 32
"""How many directions of a large matrix are looked at before all of them are."""


@dataclass
class Compression:
    """How the student travels: the settings that both halves of the method share.

    Parameters
    ----------
    what : str
        ``update``: the change in a round (the paper). ``params``: the parameters themselves (HtFLlib).
    energy_start, energy_end : float
        T_start and T_end, above 0, at most 1.
    svd : str
        ``flat`` or ``htfllib``, as in ``compress``.
    """

    what: Literal["update", "params"] = "update"
    energy_start: float = 0.95
    energy_end: float = 0.98
    svd: Svd = "flat"

    def __post_init__(self) -> None:
        for name in ("energy_start", "energy_end"):
            require(0 < getattr(self, name) <= 1, name, getattr(self, name), "above 0, at most 1")

    def energy(self, number: int, rounds: int) -> float:
        """Return T(t) in round ``number`` (from 1) of ``rounds``: in even steps to ``energy_end`` in the last.

        References
        ----------
        FedKD, "Dynamic gradients approximation": ``T_start + (T_end - T_start) t``, t being the share of the training
        that is done, as the authors' code counts it.
        """
        return self.energy_start + (self.energy_end - self.energy_start) * min(number / rounds, 1.0)

    @property
    def label(self) -> str:
        """What the names of uploaded tensors begin with."""
        return CHANGE if self.what == "update" else MODEL


def distillation_losses(
    teacher_BC: Tensor,
    student_BC: Tensor,
    teacher_BK: Tensor,
    aligned_BK: Tensor,
    labels_B: Tensor,
    *,
    kl: Literal["batchmean", "mean"],
    least_divisor: float,
    detach_divisor: bool,
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
    detach_divisor : bool
        Whether the divisor is taken as given. With False its gradient rewards larger task losses, which keeps the
        divisor away from 0.

    References
    ----------
    FedKD, "Adaptive mutual knowledge distillation": distillation, hidden and task losses, and their sum.
    """
    teacher_loss = functional.cross_entropy(teacher_BC, labels_B)
    student_loss = functional.cross_entropy(student_BC, labels_B)
    divisor = (teacher_loss + student_loss).clamp(min=least_divisor)
    divisor = divisor.detach() if detach_divisor else divisor
    hidden = functional.mse_loss(aligned_BK, teacher_BK)
    return (
        teacher_loss + (divergence(teacher_BC, student_BC, kl) + hidden) / divisor,
        student_loss + (divergence(student_BC, teacher_BC, kl) + hidden) / divisor,
    )


def change(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what ``apply_change`` makes ``after`` of ``before`` with; integer tensors are kept as they are after."""
    return {n: after[n] - before[n] if after[n].is_floating_point() else after[n] for n in before}


def apply_change(before: Mapping[str, Tensor], difference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return new named tensors, ``before`` with a ``difference`` (see ``change``) added."""
    return {n: old + difference[n] if old.is_floating_point() else difference[n].clone() for n, old in before.items()}


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
    FedKD, "Dynamic gradients approximation".
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # What has diverged goes out as it is, to be refused for what it is: no decomposition exists.
        diverged = not torch.isfinite(tensor.square().sum())
        if tensor.dim() < 2 or not tensor.is_floating_point() or diverged:
            packed[name] = tensor
            continue
        factors = _factorise(tensor.flatten(1) if svd == "flat" else tensor, energy, svd)
        if svd == "flat" and sum(map(torch.numel, factors)) >= tensor.numel():
            packed[name] = tensor
        else:
            packed |= {f"{name}/{key}": factor for key, factor in zip(FACTORS, factors, strict=True)}
    return packed


def decompress(packed: Mapping[str, Tensor], shapes: Mapping[str, Tensor], svd: Svd, who: str) -> dict[str, Tensor]:
    """Return the named tensors that ``compress`` turned into ``packed``.

    Parameters
    ----------
    packed : mapping
        What came over the wire.
    shapes : mapping
        Tensors (of any device, also ``meta``) with the names, shapes and types that must come out.
    svd : str
        As in ``compress``.
    who : str
        Who sent it, for messages.

    Raises
    ------
    ValueError
        One line with the first name that is missing, unknown, or does not fit.
    """
    tensors, waiting = {}, dict(packed)
    for name, wanted in shapes.items():
        keys = [f"{name}/{key}" for key in FACTORS]
        if name not in waiting and all(key in waiting for key in keys):
            factors = [waiting.pop(key) for key in keys]
            tensors[name] = _multiply(factors, wanted, svd, f"{who} sent weights.{name}")
        elif name in waiting:
            tensors[name] = waiting.pop(name)
    require_alike(who, tensors | waiting, shapes)
    return tensors


def _factorise(matrices: Tensor, energy: float, svd: Svd) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(..., m, t)``, ``(..., t)`` and ``(..., t, n)`` of the singular value decomposition at rank t.

    From the eigenvectors of the smaller Gram matrix, four times as fast as ``torch.linalg.svd`` on the wide matrices
    of a network; the digits that this costs are those of the smallest singular values, which are not kept.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        u, s, v = _factorise(matrices.mT, energy, svd)
        return v.mT.contiguous(), s, u.mT.contiguous()
    # To a largest entry of 1: the squares of large or small numbers leave the range of float32.
    scaled = matrices / matrices.abs().amax().clamp(min=torch.finfo(matrices.dtype).tiny)
    large = scaled.dim() == 2 and len(scaled) >= 4 * SKETCH
    found = _few_directions(scaled, energy, svd) if large else None
    u = (_directions(scaled, energy, svd) if found is None else found).contiguous()
    rows = u.mT @ matrices
    s = torch.linalg.vector_norm(rows, dim=-1)
    return u, s, rows / s.clamp(min=torch.finfo(s.dtype).tiny).unsqueeze(-1)


def _directions(scaled: Tensor, energy: float, svd: Svd) -> Tensor:
    """Return the ``(..., m, t)`` left singular vectors at rank t."""
    squares, vectors = _eigh(scaled @ scaled.mT)
    # Of all matrices together: those of a convolution's slices get one common rank.
    squares = squares.clamp(min=0).reshape(-1, squares.shape[-1]).sum(dim=0)
    rank = _rank(squares.flip(0).double().cumsum(dim=0), energy, svd)
    return vectors.flip(-1)[..., :rank]


def _few_directions(scaled: Tensor, energy: float, svd: Svd) -> Tensor | None:
    """Return what ``_directions`` does, to rounding and in a tenth of the time; None where many have to be kept.

    The change of a large layer in a round has a handful. A step of subspace iteration from fixed random vectors finds
    them: what lies beyond the sketch fades as the third power of its singular value over that of a kept one.
    """
    start = torch.randn(scaled.shape[1], SKETCH, generator=Generator().manual_seed(0))
    basis = torch.linalg.qr(scaled @ start.to(scaled))[0]
    basis = torch.linalg.qr(scaled @ (scaled.mT @ basis))[0]
    rows = basis.mT @ scaled
    squares, vectors = _eigh(rows @ rows.mT)
    rest = scaled.square().sum() - squares.sum()
    rank = _rank(torch.cat([squares.flip(0), rest[None]]).clamp(min=0).double().cumsum(dim=0), energy, svd)
    return (basis @ vectors.flip(-1))[:, :rank] if 0 < rank <= SKETCH // 2 else None


def _eigh(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, ascending, and eigenvectors of symmetric matrices."""
    try:
        values, vectors = torch.linalg.eigh(gram)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # float32 does not converge on some matrices of low rank, with many zero rows.
        values, vectors = (part.to(gram.dtype) for part in torch.linalg.eigh(gram.double()))
    return values, vectors


def _rank(cumulative: Tensor, energy: float, svd: Svd) -> int:
    """Return how many singular values to keep, given the ``(n,)`` running sums of their squares."""
    wanted = energy * float(cumulative[-1])
    if svd == "flat":
        return 1 + int((cumulative[:-1] < wanted).sum())
    # The public code compares the first r squares for r = 0 .. n - 1, and keeps r = 0 where none is enough.
    enough = (cumulative[:-1] > wanted).nonzero()
    return 1 + int(enough[0]) if len(enough) else 0


def _multiply(factors: list[Tensor], wanted: Tensor, svd: Svd, what: str) -> Tensor:
    """Return the tensor like ``wanted`` that factors u, s, v make, or refuse them."""
    u, s, v = factors
    flat = wanted.flatten(1) if svd == "flat" and wanted.dim() > 1 else wanted
    *batch, rows, columns = (0, 0, *flat.shape)[-max(2, flat.dim()) :]
    rank = s.shape[-1] if s.dim() else 0
    shapes = [(*batch, rows, rank), (*batch, rank), (*batch, rank, columns)]
    fits = [factor.shape for factor in factors] == shapes and (rank >= 1 or svd == "htfllib")
    if not fits or rank > min(rows, columns) or any(factor.dtype != wanted.dtype for factor in factors):
        found = ", ".join(str(tuple(factor.shape)) for factor in factors)
        raise ValueError(f"{what} as factors {found}: they do not make {tuple(wanted.shape)} {wanted.dtype}")
    # Cloned into torch's own, always equally aligned memory: the last bits must not depend on where factors lay.
    product: Tensor = ((u * s.unsqueeze(-2)) @ v.clone()).reshape(wanted.shape)
    if not torch.isfinite(product).all():
        raise ValueError(f"{what} as factors whose product is not finite (NaN or Inf)")
    return product
