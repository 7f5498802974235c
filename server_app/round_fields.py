"""The fields of a round's line in ``rounds.jsonl``: traffic, accuracies, means of the clients' metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from task.messages import EvaluationReport


@dataclass
class Traffic:
    """What was sent to one client and came back from it in one exchange.

    Bytes are those of Flower's records, parameters what ``task.messages.parameters_in`` counts, and prototypes those of
    the parameters that belong to prototypes. A reply that was dropped counts in the bytes only.
    """

    bytes_down: int = 0
    bytes_up: int = 0
    parameters_down: int = 0
    parameters_up: int = 0
    prototypes_down: int = 0
    prototypes_up: int = 0


def traffic_fields(train: Mapping[int, Traffic], evaluate: Mapping[int, Traffic]) -> dict[str, Any]:
    """Return bytes and parameters of a round, in all and by client (of the training exchange), given by partition."""

    def total(exchange: Mapping[int, Traffic], name: str) -> int:
        return sum(int(getattr(traffic, name)) for traffic in exchange.values())

    return {
        "bytes": {
            f"{phase}_{way}": total(exchange, f"bytes_{way}")
            for phase, exchange in (("train", train), ("evaluate", evaluate))
            for way in ("down", "up")
        },
        "parameters": {f"train_{way}": total(train, f"parameters_{way}") for way in ("down", "up")},
        "prototype_parameters": {f"train_{way}": total(train, f"prototypes_{way}") for way in ("down", "up")},
        "client_traffic": {str(partition): asdict(traffic) for partition, traffic in sorted(train.items())},
    }


def summarise(reports: Sequence[EvaluationReport], inference: str, by_samples: bool) -> dict[str, Any]:
    """Return the accuracy fields of a round's line.

    The mean is weighted by test samples, or plain over clients when they keep their sizes to themselves. The
    standard deviation is over clients, unweighted. Clients without test data are left out and counted. Where the
    rule is ``prototype`` and no prototypes exist, the accuracy is None: not available, which is not zero.
    """
    tested = [report for report in reports if "loss" in report.metrics]
    weights = [(report.examples or 1) if by_samples else 1 for report in tested]
    fields: dict[str, Any] = {}
    for name in ("accuracy-head", "accuracy-prototype", "loss"):
        complete = bool(tested) and all(name in report.metrics for report in tested)
        values = [report.metrics[name] for report in tested] if complete else []
        fields[name.replace("-", "_")] = float(np.average(values, weights=weights)) if values else None
    chosen = f"accuracy-{inference}"
    known = fields[chosen.replace("-", "_")] is not None
    return {
        "accuracy": fields[chosen.replace("-", "_")],
        "accuracy_std": float(np.std([report.metrics[chosen] for report in tested])) if known else None,
        "rule": inference,
        **fields,
        "clients_evaluated": len(tested),
        "clients_without_test": len(reports) - len(tested),
        "client_accuracy": {str(r.partition): r.metrics[chosen] for r in tested} if known else {},
    }


def metric_means(metrics: Sequence[Any], prefix: str) -> dict[str, float]:
    """Return the plain mean over clients of each metric that at least one of them sent."""
    names = sorted({name for each in metrics for name in each})
    return {prefix + name: float(np.mean([each[name] for each in metrics if name in each])) for name in names}


def confusion_sum(reports: Sequence[EvaluationReport]) -> Tensor | None:
    """Return how often each true class was taken for which, over all clients that told; None where none did."""
    told = [report.confusion for report in reports if report.confusion is not None]
    return torch.stack(told).sum(dim=0) if told else None
