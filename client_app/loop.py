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
    session: Session,
    step: Step,
    beside: Sequence[Learner] = (),
    clip: float | None = None,
    *,
    lr: float | None = None,
    raw: bool = False,
    after_step: Callable[[], None] | None = None,
    momentum: dict[str, Tensor] | None = None,
) -> dict[str, float]:
    """Train the session's model on the sum of the losses that ``step`` returns.

    Losses without a gradient (constants) teach nothing: then no step is taken, so that momentum and weight decay do not
    move a model that has learnt nothing.

    Parameters
    ----------
    session : Session
        Model, data, settings and random stream of one message.
    step : callable
        Takes images ``(B, channels, height, width)`` and int64 labels ``(B,)``; returns scalar losses by name.
    beside : sequence of Learner
        What else the losses train, in the same steps.
    clip : float or None
        The largest norm of the gradient of each module by itself; None means ``train.clip``.
    lr : float or None
        The learning rate of the session's model; None means ``train.lr``.
    raw : bool
        Whether ``step`` gets images as they are stored, to augment them and then call ``session.prepared``.
    after_step : callable or None
        Called after each step of the optimiser.
    momentum : dict or None
        The optimiser's momentum of the session's model by name of the parameter: taken up before the first step and
        replaced after the last, for methods that carry it from round to round.

    Returns
    -------
    dict of str to float
        The mean of each loss over all samples of all epochs; empty when the client has no data.
    """
    train, learners = session.config.train, [Learner(session.model, lr), *beside]
    modules = nn.ModuleList([learner.module for learner in learners])
    optimizer, update = _updater(session, learners, train.clip if clip is None else clip)
    if momentum is not None:
        _carry(optimizer, session.model, momentum)
    needs_care = has_batchnorm(modules)
    seen: dict[str, list[tuple[Tensor, int]]] = {}
    samples, planned = 0, train.local_epochs * len(session.split.train)
    modules.train()
    for _ in range(train.local_epochs):
        for images, labels in session.train_batches(needs_care, raw):
            care = needs_care and len(labels) == 1
            with batchnorm_in_eval(modules) if care else nullcontext(), autocast(train, session.device):
                losses = step(images, labels)
                total = reduce(torch.add, losses.values())
            if total.requires_grad:
                update(total, _rate_factor(train.lr_schedule, samples / planned))
                if after_step is not None:
                    after_step()
            samples += len(labels)
            for name, value in losses.items():  # left where they are: reading one would wait for the device
                seen.setdefault(name, []).append((value.detach(), len(labels)))
    if momentum is not None:
        momentum |= _momentum_of(optimizer, session.model)
    return {name: _weighted_sum(pairs) / samples for name, pairs in seen.items()}


def _weighted_sum(pairs: Sequence[tuple[Tensor, int]]) -> float:
    """Return the sum of scalar tensors times their weights."""
    values, weights = zip(*pairs, strict=True)
    return float(torch.stack(values).cpu().double() @ torch.tensor(weights, dtype=torch.float64))


def _carry(optimizer: torch.optim.Optimizer, model: nn.Module, momentum: dict[str, Tensor]) -> None:
    """Give the optimiser the momentum with which an earlier one ended."""
    for name, parameter in model.named_parameters():
        if name in momentum:
            optimizer.state[parameter]["momentum_buffer"] = momentum[name].to(parameter.device).clone()


def _momentum_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the momentum of each parameter that has any."""
    found = {name: optimizer.state[parameter].get("momentum_buffer") for name, parameter in model.named_parameters()}
    return {name: buffer.detach().cpu() for name, buffer in found.items() if buffer is not None}


def _rate_factor(schedule: str, progress: float) -> float:
    """Return the factor on the learning rate when this share of the round's samples has been seen."""
    return 1.0 if schedule == "constant" else 1.0 - progress


def _updater(
    session: Session, learners: Sequence[Learner], clip: float | None
) -> tuple[torch.optim.Optimizer, Callable[[Tensor, float], None]]:
    """Return a new SGD optimiser, and what takes one step of it down a loss, at a share of its learning rates."""
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

    return optimizer, update


def autocast(train: TrainConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return the mixed-precision context of ``train.precision``, on any device."""
    if train.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=PRECISIONS[train.precision])
