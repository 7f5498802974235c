"""Early stopping: when the accuracy, or the loss, has not become better for a while."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from task.requirements import require, require_choice

LOSS = "loss"
METRICS = ("accuracy", "accuracy_head", "accuracy_prototype", LOSS)


@dataclass
class StopConfig:
    """A run ends before its last round after ``patience`` evaluations in a row without a better ``metric``.

    Better means higher (the loss: lower) than the best so far by more than ``min_delta``; ``patience`` null never
    stops. Evaluations that have no such number, because there are no prototypes yet, count neither way, nor do those of
    the warm-up (``labels.warmup_rounds``).
    """

    metric: str = "accuracy"
    patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        require_choice("federation.stop_after.metric", self.metric, METRICS)
        if self.patience is not None:
            require(self.patience >= 1, "federation.stop_after.patience", self.patience, "at least 1, or null")
        good = 0 <= self.min_delta < float("inf")
        require(good, "federation.stop_after.min_delta", self.min_delta, "a finite number of at least 0")


class StoppedEarly(Exception):
    """A run ends before its last round, as ``federation.stop_after`` wants it; the message says why."""


def evaluations_without_gain(rows: Sequence[Mapping[str, Any]], stop: StopConfig) -> int:
    """Return how many evaluations at the end of ``rows``, the lines of a run's rounds, brought nothing better."""
    sign = -1.0 if stop.metric == LOSS else 1.0
    best, since = float("-inf"), 0
    for value in (row[stop.metric] for row in rows if row.get(stop.metric) is not None):
        if sign * value > best + stop.min_delta:
            best, since = sign * value, 0
        else:
            since += 1
    return since


def reason_to_stop(rows: Sequence[Mapping[str, Any]], stop: StopConfig) -> str | None:
    """Return in one line why a run with these ``rows`` ends now; None while it goes on."""
    since = evaluations_without_gain(rows, stop)
    if stop.patience is None or since < stop.patience:
        return None
    more = f" by more than {stop.min_delta:g}" if stop.min_delta else ""
    return f"stopped early after round {rows[-1]['round']}: no better {stop.metric}{more} in {since} evaluations"


def may_stop_next(rows: Sequence[Mapping[str, Any]], stop: StopConfig) -> bool:
    """Tell whether the next evaluation after ``rows`` could be the last one."""
    return stop.patience is not None and evaluations_without_gain(rows, stop) >= stop.patience - 1
