"""The one training loop: epochs over the client's data, a step that returns named losses."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from client_app.session import Session
from task.models.split import batchnorm_in_eval
from task.schema import TrainConfig

Step = Callable[[Tensor, Tensor], dict[str, Tensor]]
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def fit_epochs(session: Session, step: Step) -> dict[str, float]:
    """Train the session's model on the sum of the losses that ``step`` returns.

    Parameters
    ----------
    session : Session
        Model, data, settings and random stream of one message.
    step : callable
        Takes images ``(B, channels, height, width)`` and int64 labels ``(B,)``; returns scalar losses by name.

    Returns
    -------
    dict of str to float
        The mean of each loss over all samples of all epochs; empty when the client has no data.
    """
    train, model = session.config.train, session.model
    optimizer = torch.optim.SGD(
        model.parameters(), lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay
    )
    # Unscaled small gradients vanish in fp16; the scaler is off, and free, otherwise.
    scaler = torch.amp.GradScaler(session.device.type, enabled=train.precision == "fp16")
    single_needs_care = model.has_batchnorm
    sums: dict[str, Tensor] = {}
    samples = 0
    model.train()
    for _ in range(train.local_epochs):
        for images, labels in session.train_batches():
            care = single_needs_care and len(labels) == 1
            with batchnorm_in_eval(model) if care else nullcontext(), autocast(train, session.device):
                losses = step(images, labels)
                total = torch.stack(list(losses.values())).sum()
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(total).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            samples += len(labels)
            for name, value in losses.items():  # summed where they are: reading one would wait for the device
                weighted = value.detach().float() * len(labels)
                sums[name] = sums[name] + weighted if name in sums else weighted
    return {name: float(value) / samples for name, value in sums.items()} if samples else {}


def autocast(train: TrainConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return the mixed-precision context of ``train.precision``, on any device."""
    if train.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=PRECISIONS[train.precision])
