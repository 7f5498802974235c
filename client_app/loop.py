"""The one training loop: epochs over the client's data, a step that returns named losses."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from client_app.session import Session
from task.models.split import batchnorm_in_eval, has_batchnorm
from task.schema import TrainConfig

Step = Callable[[Tensor, Tensor], dict[str, Tensor]]
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Learner:
    """A module that is trained beside the session's model; ``lr`` None means ``train.lr``."""

    module: nn.Module
    lr: float | None = None


def fit_epochs(
    session: Session, step: Step, beside: Sequence[Learner] = (), clip: float | None = None
) -> dict[str, float]:
    """Train the session's model on the sum of the losses that ``step`` returns.

    Parameters
    ----------
    session : Session
        Model, data, settings and random stream of one message.
    step : callable
        Takes images ``(B, channels, height, width)`` and int64 labels ``(B,)``; returns scalar losses by name.
    beside : sequence of Learner
        What else the losses train, in the same steps.
    clip : float or None
        The largest norm of the gradient of each module by itself; None leaves gradients as they are.

    Returns
    -------
    dict of str to float
        The mean of each loss over all samples of all epochs; empty when the client has no data.
    """
    train, learners = session.config.train, [Learner(session.model), *beside]
    modules = nn.ModuleList([learner.module for learner in learners])
    update = _updater(session, learners, clip)
    needs_care = has_batchnorm(modules)
    seen: dict[str, list[tuple[Tensor, int]]] = {}
    samples, planned = 0, train.local_epochs * len(session.split.train)
    modules.train()
    for _ in range(train.local_epochs):
        for images, labels in session.train_batches(needs_care):
            care = needs_care and len(labels) == 1
            with batchnorm_in_eval(modules) if care else nullcontext(), autocast(train, session.device):
                losses = step(images, labels)
                total = reduce(torch.add, losses.values())
            update(total, _rate_factor(train.lr_schedule, samples / planned))
            samples += len(labels)
            for name, value in losses.items():  # left where they are: reading one would wait for the device
                seen.setdefault(name, []).append((value.detach(), len(labels)))
    return {name: _weighted_sum(pairs) / samples for name, pairs in seen.items()}


def _weighted_sum(pairs: Sequence[tuple[Tensor, int]]) -> float:
    """Return the sum of scalar tensors times their weights."""
    values, weights = zip(*pairs, strict=True)
    return float(torch.stack(values).cpu().double() @ torch.tensor(weights, dtype=torch.float64))


def _rate_factor(schedule: str, progress: float) -> float:
    """Return the factor on the learning rate when this share of the round's samples has been seen."""
    return 1.0 if schedule == "constant" else 1.0 - progress


def _updater(session: Session, learners: Sequence[Learner], clip: float | None) -> Callable[[Tensor, float], None]:
    """Return what takes one step of a new SGD optimiser down a loss, at a share of its learning rates."""
    train = session.config.train
    parameters = [list(learner.module.parameters()) for learner in learners]
    rates = [train.lr if learner.lr is None else learner.lr for learner in learners]
    groups = [{"params": each, "lr": rate} for each, rate in zip(parameters, rates, strict=True)]
    optimizer = torch.optim.SGD(groups, lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay)
    # Unscaled small gradients vanish in fp16; the scaler is off, and free, otherwise.
    scaler = torch.amp.GradScaler(session.device.type, enabled=train.precision == "fp16")

    def update(total: Tensor, factor: float) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = factor * rate
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(total).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            scaler.unscale_(optimizer)
            for each in parameters:
                nn.utils.clip_grad_norm_(each, clip)
        scaler.step(optimizer)
        scaler.update()

    return update


def autocast(train: TrainConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return the mixed-precision context of ``train.precision``, on any device."""
    if train.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=PRECISIONS[train.precision])
