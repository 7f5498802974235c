"""Whether a reply is what its client can honestly have: what a method shares, no more samples than it said, no giant.

What is left of a reply that lies is bounded. Its prototypes are at most ``federation.max_prototype_norm`` long, and
among three or more clients at most ``federation.max_norm_ratio`` times as long as the median client's (which counts as
at least 1); so is the norm of its weights. A mean in which it weighs w therefore moves by at most w times that (plus
what an honest reply would have added). A client that says how many samples it has before round 1 never weighs more.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from server_app.run import Run
from task.messages import EvaluationReport, Expected, NodeReport, Upload
from task.schema import Config

FEWEST = 3
"""Of fewer clients nobody can tell which is the odd one."""
LEAST_MEDIAN = 1.0
"""Norms below it count as this: features of a model that learns nothing are small, and one that learns is no giant."""


def expected(run: Run, partition: int, number: int, width: int) -> Expected:
    """Return what a reply of round ``number`` must be: its sender, C classes, vectors of this width and length."""
    config = run.config
    norm = config.federation.max_prototype_norm
    norm = config.privacy.largest_norm(run.num_classes, width) if config.privacy is not None else norm
    return Expected(partition, number, run.num_classes, width, norm)


def inspect_reply(
    reply: Upload | EvaluationReport, node: NodeReport, config: Config, shared: frozenset[str], with_prototypes: bool
) -> None:
    """Refuse a well-formed reply that its client cannot honestly have sent; ``ValueError`` naming the client."""
    if isinstance(reply, Upload):
        inspect_upload(reply, node, shared, config.train.local_epochs)
    else:
        report_sizes = config.federation.report_sizes
        inspect_evaluation(reply, node, with_prototypes=with_prototypes, report_sizes=report_sizes)


def inspect_upload(upload: Upload, node: NodeReport, shared: frozenset[str], passes: int) -> None:
    """Refuse what the method does not share, and more samples than the client had before round 1.

    Parameters
    ----------
    upload : Upload
        The reply.
    node : NodeReport
        What the client said of itself; without its ``train_size`` no number of samples is checked.
    shared : frozenset of str
        ``prototypes``, ``weights``, or both.
    passes : int
        How often a sample can count: in prototypes that are collected while training, once an epoch.

    Raises
    ------
    ValueError
        One line naming the client.
    """
    who = f"client {upload.partition}"
    for kind in ("prototypes", "weights"):
        if getattr(upload, kind) is not None and kind not in shared:
            others = " and ".join(sorted(shared)) or "nothing"
            raise ValueError(f"{who} sent {kind}: the method shares {others}")
    if node.train_size is not None:
        _check_size(who, "num-examples", upload.examples or 0, node.train_size)
    if upload.prototypes is not None and upload.prototypes.counts is not None:
        inspect_counts(upload.partition, upload.prototypes.counts, node, passes)


def inspect_counts(partition: int, counts: Tensor, node: NodeReport, passes: int = 1) -> None:
    """Refuse counts by class of more samples than the client had; ``ValueError`` naming it."""
    if node.train_size is not None:
        _check_size(f"client {partition}", "counts", int(counts.sum()), node.train_size * passes)


def inspect_evaluation(
    report: EvaluationReport, node: NodeReport, *, with_prototypes: bool, report_sizes: bool
) -> None:
    """Refuse an evaluation that lacks what the mean needs, or counts more samples than the client had.

    Raises
    ------
    ValueError
        One line naming the client.
    """
    who = f"client {report.partition}"
    if report.metrics and with_prototypes and "accuracy-prototype" not in report.metrics:
        raise ValueError(f"{who} sent no metrics.accuracy-prototype: it was sent prototypes")
    if report.metrics and report_sizes and not report.examples:
        raise ValueError(f"{who} sent num-examples={report.examples} with an accuracy: at least 1 is needed")
    if node.test_size is not None:
        _check_size(who, "num-examples", report.examples or 0, node.test_size)


def far_out(uploads: Sequence[tuple[Upload, Mapping[str, Tensor] | None]], ratio: float) -> Iterator[tuple[int, str]]:
    """Yield partition and reason of each upload that is more than ``ratio`` times as long as the median one.

    Parameters
    ----------
    uploads : sequence of (Upload, mapping or None)
        The uploads of a round, each with the weights that it stands for.
    ratio : float
        Above 1.
    """
    prototypes = {u.partition: u.prototypes.vectors for u, _ in uploads if u.prototypes is not None}
    lengths = {"longest prototype": {p: _longest(vectors) for p, vectors in prototypes.items()}}
    lengths["norm of weights"] = {u.partition: _norm(weights) for u, weights in uploads if weights is not None}
    seen: set[int] = set()
    for what, norms in lengths.items():
        median = max(statistics.median_low(norms.values()), LEAST_MEDIAN) if len(norms) >= FEWEST else math.inf
        for partition, norm in norms.items():
            if (norm > ratio * median or not math.isfinite(norm)) and partition not in seen:
                seen.add(partition)
                limit = f"{ratio:g} times the round's median, {median:.4g}"
                yield partition, f"client {partition} sent a {what} of {norm:.4g}: at most {limit}, is allowed"


def _check_size(who: str, what: str, claimed: int, held: int) -> None:
    if claimed > held:
        raise ValueError(f"{who} sent {what} of {claimed} samples: at most {held}, as it said before round 1")


def _longest(vectors: Tensor) -> float:
    return float(torch.linalg.vector_norm(vectors.double(), dim=1).amax()) if len(vectors) else 0.0


def _norm(weights: Mapping[str, Tensor]) -> float:
    squares = [float(tensor.double().square().sum()) for tensor in weights.values() if tensor.is_floating_point()]
    total = sum(squares)
    return total**0.5 if math.isfinite(total) else math.inf
