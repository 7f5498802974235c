"""Who is there at the beginning of a round: clients may leave, come back, and come late."""

import time
from collections.abc import Sequence
from logging import INFO, WARNING, getLogger

from flwr.serverapp import Grid

from server_app.demands import ALONE, labelled_alone, require_labelled
from server_app.roster import NO_ANSWER, Roster, ask, check_fits
from task.messages import UNPLACED, NodeReport, Placement
from task.schema import Config

LOG = getLogger("flwr")
AGAIN = 600.0  # seconds until a node that was refused is asked again
GONE = "its SuperNode is not connected"


def connected(grid: Grid, roster: Roster) -> list[int]:
    """Return the clients whose nodes are connected, ascending by partition."""
    nodes = set(grid.get_node_ids())
    return [partition for partition in roster if roster.node_ids[partition] in nodes]


def attend(grid: Grid, roster: Roster, config: Config, number: int) -> list[int]:
    """Admit who has come since the last round and return the clients that are there for round ``number``.

    Raises
    ------
    RuntimeError
        Fewer than ``federation.min_clients`` after ``federation.node_timeout`` seconds; or, where clients with labels
        train alone, fewer of them than ``federation.min_replies``.
    """
    deadline = time.monotonic() + config.federation.node_timeout
    while True:
        _admit_newcomers(grid, roster, config)
        here = connected(grid, roster)
        lacking = _lacking(here, roster, config, number)
        if lacking is None:
            return here
        if time.monotonic() > deadline or len(here) == roster.size:
            raise RuntimeError(lacking)
        time.sleep(0.5)


def _lacking(here: Sequence[int], roster: Roster, config: Config, number: int) -> str | None:
    """Return in one line which clients round ``number`` lacks to begin; None where it can."""
    fewest, replies = config.federation.min_clients, config.federation.min_replies
    if fewest is not None and len(here) < fewest:
        wanted = f"federation.min_clients={fewest}"
        return f"{len(here)} of {len(roster)} clients are connected, {wanted} are needed"
    own = len(roster.labelled.intersection(here))
    if own < replies and labelled_alone(config, number):
        wanted = f"federation.min_replies={replies} are needed, since they train alone in round {number}"
        return f"{own} clients with labels are connected, {wanted} ({ALONE})"
    return None


def _admit_newcomers(grid: Grid, roster: Roster, config: Config) -> None:
    nodes = sorted(grid.get_node_ids())
    if time.monotonic() - roster.refused_at > AGAIN:
        roster.refused.clear()
    # Who was away may be back with the same key and other facts.
    roster.refused = {node: reason for node, reason in roster.refused.items() if node in nodes}
    known = set(roster.node_ids.values()) | set(roster.refused)
    new = [node for node in nodes if node not in known]
    if not new:
        return
    roster.refused_at = time.monotonic()
    here = set(connected(grid, roster))
    for node, answer in ask(grid, dict.fromkeys(new), config.federation.node_timeout).items():
        try:
            report, placement = _placed(grid, node, answer, roster, here, config)
            check_fits(report, report.partition, roster.class_names, roster.size, config)
            require_labelled(config, Roster({report.partition: report} | roster.reports, {}))
        except TimeoutError as error:  # it is asked again before the next round
            LOG.log(WARNING, "node %d: %s", node, error)
        except ValueError as error:
            roster.refused[node] = str(error)
            LOG.log(WARNING, "node %d is refused: %s", node, error)
        else:
            again = "is back" if report.partition in roster else "joins"
            roster.admit(node, report, placement)
            LOG.log(INFO, "%s %s", report.who, again)


def _placed(
    grid: Grid, node: int, answer: NodeReport | str, roster: Roster, here: set[int], config: Config
) -> tuple[NodeReport, Placement | None]:
    """Return the facts of a new node in its place, and what it must be told."""
    report = _told(answer)
    place = report.partition if report.partition != UNPLACED else _place_of(report.name, roster)
    if place in here:
        raise ValueError(f"{roster.who(place)} is connected already; give every SuperNode facts of its own")
    before = roster.reports.get(place)
    if before is not None and before.name != report.name:
        raise ValueError(f"{before.who} has this place, and this node is called {report.name!r}")
    if report.partition != UNPLACED and report.class_names == roster.class_names:
        return report, None
    placement = Placement(place, roster.size, roster.class_names)
    return _told(ask(grid, {node: placement}, config.federation.node_timeout)[node]), placement


def _told(answer: NodeReport | str) -> NodeReport:
    if isinstance(answer, str):
        raise (TimeoutError if answer.startswith(NO_ANSWER) else ValueError)(answer)
    return answer


def _place_of(name: str, roster: Roster) -> int:
    """Return the place of a client by its name: its earlier one, or the next that is free."""
    for partition, known in roster.names.items():
        if known == name:
            return partition
    free = sorted(set(range(roster.size)) - set(roster.reports))
    if not free:
        raise ValueError(f"the run has {roster.size} clients, and all places are taken")
    return free[0]


def absent(roster: Roster, here: Sequence[int]) -> list[int]:
    """Return the clients of the run that are not there, also those that never were."""
    return sorted(set(range(roster.size)) - set(here))
