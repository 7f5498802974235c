"""What a method demands of a run, and its words where a run does not meet it."""

from collections.abc import Mapping
from typing import Any

from server_app.roster import Roster
from task.schema import Config, FederationConfig, require

ALONE = "algorithm.unlabelled=left_out, or labels.warmup_rounds"


def labelled_alone(config: Config, number: int) -> bool:
    """Tell whether clients without labels, if there are any, do not train in round ``number``, counted from 1."""
    return config.algorithm.unlabelled == "left_out" or number <= config.labels.warmup_rounds


def require_capable(config: Config, has_prototypes: bool, has_global_model: bool) -> None:
    """Refuse settings that ask a method for what it does not have; known before anything starts.

    Raises
    ------
    ValueError
        One line: inference by prototypes that do not exist, a test of a global model that does not exist, clients
        without labels where the method needs labels everywhere, or a warm-up for which none would wait.
    """
    algorithm, labels = config.algorithm, config.labels
    allowed = f"head, since {algorithm.name} has no prototypes of features"
    require(algorithm.inference == "head" or has_prototypes, "algorithm.inference", algorithm.inference, allowed)
    allowed = f"clients, since {algorithm.name} has no global model"
    require(
        algorithm.evaluation == "clients" or has_global_model, "algorithm.evaluation", algorithm.evaluation, allowed
    )
    allowed = f"refused, since {algorithm.name} needs labels on every client"
    require(
        algorithm.unlabelled == "refused" or has_global_model, "algorithm.unlabelled", algorithm.unlabelled, allowed
    )
    everybody = labels.count is None and labels.share in (None, 1.0)
    allowed = f"all, since {algorithm.name} needs labels on every client"
    require(everybody or algorithm.unlabelled != "refused", "labels", labels.name, allowed)
    allowed = f"0, since all clients of {algorithm.name} have labels: nobody would wait"
    waits = labels.warmup_rounds == 0 or algorithm.unlabelled != "refused"
    require(waits, "labels.warmup_rounds", labels.warmup_rounds, allowed)


def require_private(config: Config, has_prototypes: bool, uploads: frozenset[str]) -> None:
    """Refuse noise on prototypes where clients upload more than prototypes of features.

    Raises
    ------
    ValueError
        One line: the method's ``uploads`` are others, or counts go with them.
    """
    privacy, algorithm = config.privacy, config.algorithm
    if privacy is None:
        return
    others = ", ".join(sorted(uploads - {"prototypes"})) or ("mean outputs" if uploads else "nothing")
    allowed = f"none, since clients of {algorithm.name} upload {others}: noise on prototypes of features protects none"
    require(has_prototypes and uploads == {"prototypes"}, "privacy", privacy.name, allowed)
    counts = bool(algorithm.client.get("share_counts"))
    allowed = f"false with privacy={privacy.name}, and algorithm.server.aggregation=uniform: counts get no noise"
    require(not counts, "algorithm.client.share_counts", counts, allowed)


def require_labelled(config: Config, roster: Roster) -> None:
    """Refuse clients without labels where the method needs labels, and a run in which nobody has any.

    Raises
    ------
    ValueError
        One line with the first such client.
    """
    name, without = config.algorithm.name, [partition for partition in roster if partition not in roster.labelled]
    if without and config.algorithm.unlabelled == "refused":
        raise ValueError(f"client {without[0]} has no labels, and {name} needs labels on every client")
    if not roster.labelled:
        raise ValueError(
            f"none of the {len(roster)} clients has labels: at least one is needed (labels, node-config role)"
        )


def require_enough(federation: FederationConfig, row: Mapping[str, Any], replies: int) -> None:
    """End the run when a phase of the round of the line ``row`` had fewer good ``replies`` than asked for.

    Raises
    ------
    RuntimeError
        One line with the round and the first failure; also at any failure with ``federation.on_failure=stop``.
    """
    failures, place = row["failures"], f"round {row['round']}: "
    reason = f"; client {failures[0]['partition']}: {failures[0]['reason']}" if failures else ""
    if failures and federation.on_failure == "stop":
        raise RuntimeError(f"{place}{len(failures)} clients failed and federation.on_failure=stop{reason}")
    if replies < federation.min_replies:
        wanted = f"federation.min_replies={federation.min_replies}"
        raise RuntimeError(f"{place}{replies} good replies, {wanted} are needed{reason}")
