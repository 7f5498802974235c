"""What tests of methods with a shared model need: small shared models, and a run without nodes."""

from typing import Any, cast

import torch

from client_app.session import Session
from server_app.roster import Roster
from server_app.strategies.base import Run
from task.messages import NodeReport

SMALL_AUXILIARY = "'model.auxiliary={name: small, _target_: task.models.small.plain, width: 2, features: 64}'"
BATCHNORM = "'model.auxiliary={name: bn, _target_: task.models.small.residual, width: 2, norm: batch}'"


def run_of(session: Session, rounds_done: int = 0) -> Run:
    """Return the run of a session's configuration with one client, as a strategy sees it."""
    names, shape = session.dataset.class_names, session.dataset.image_shape
    report = NodeReport(0, 1, "plain", 9, session.config.model.feature_dim, names, "cpu", (), image_shape=shape)
    roster = Roster({0: report}, {0: 1})
    return Run(session.config, roster, cast(Any, None), "test", torch.device("cpu"), rounds_done)
