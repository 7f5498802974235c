"""Who takes part: every node is asked before round 1, and those that come later before the next round."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING, getLogger

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from server_app.classes import agree
from task.messages import UNPLACED, NodeReport, Placement
from task.payload import decode_node_report, encode_placement
from task.schema import Config

LOG = getLogger("flwr")
NO_ANSWER = "no answer"


@dataclass
class Roster:
    """The clients of a run by partition id, with the node that holds each.

    ``total`` is M, the number of clients that the run has when all are there; 0 stands for those that are.
    ``placements`` are for the clients that must be told something with every message.
    """

    reports: dict[int, NodeReport]
    node_ids: dict[int, int]
    total: int = 0
    placements: dict[int, Placement] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    """Nodes that came later and do not fit, with the reason; ``refused_at`` is when the last of them was asked."""
    refused_at: float = 0.0

    def __len__(self) -> int:
        return len(self.reports)

    def __iter__(self) -> Iterator[int]:
        return iter(self.reports)

    @property
    def size(self) -> int:
        """M, also counting clients that are not there (yet): partition ids are below it."""
        return self.total or len(self.reports)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the C classes, in the order of their ids."""
        return next(iter(self.reports.values())).class_names

    @property
    def labelled(self) -> frozenset[int]:
        """The partitions whose clients have labels."""
        return frozenset(partition for partition, report in self.reports.items() if report.role == "labelled")

    @property
    def names(self) -> dict[int, str]:
        """The names of the clients that have one."""
        return {partition: report.name for partition, report in self.reports.items() if report.name}

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The (channels, height, width) that all clients have; ``ValueError`` when there is no such shape."""
        shapes = {report.image_shape: partition for partition, report in self.reports.items()}
        if len(shapes) != 1:
            found = ", ".join(f"{shape} of {self.who(partition)}" for shape, partition in sorted(shapes.items()))
            raise ValueError(f"clients that share a model need images of one shape; found {found}")
        (shape,) = shapes
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"client {shapes[shape]} sent image-shape={shape}: channels, height, width are needed")
        channels, height, width = shape
        return channels, height, width

    def who(self, partition: int) -> str:
        """Return what messages call a client."""
        report = self.reports.get(partition)
        return report.who if report is not None else f"client {partition}"

    def admit(self, node: int, report: NodeReport, placement: Placement | None) -> None:
        """Take a client up, or give its place to another node of it."""
        self.reports[report.partition], self.node_ids[report.partition] = report, node
        self.reports = dict(sorted(self.reports.items()))
        self.placements.pop(report.partition, None)
        if placement is not None:
            self.placements[report.partition] = placement


def discover(grid: Grid, config: Config, named: Mapping[int, str] | None = None) -> Roster:
    """Wait for the nodes of the run and ask each for its facts.

    ``named`` are the clients that the run to be resumed had already; their names get the same places.

    Raises
    ------
    RuntimeError
        Too few or too many nodes within ``federation.node_timeout`` seconds, or a node that failed to answer.
    ValueError
        Nodes whose facts do not fit together.
    """
    federation = config.federation
    deadline = time.monotonic() + federation.node_timeout
    wanted, least = federation.num_clients, federation.min_clients
    first = _wait_for(grid, 1 if wanted is None else wanted, least, deadline)
    if wanted is not None and len(first) > wanted:
        raise RuntimeError(_node_advice(len(first), wanted))
    reports = _good(ask(grid, dict.fromkeys(first), _patience(config)), least)
    if wanted is None:
        wanted = max((report.num_partitions for report in reports.values()), default=0)
        if wanted == 0:
            raise ValueError("the nodes are known by name: federation.num_clients must say how many there are")
        if len(first) < wanted:
            later = [node for node in _wait_for(grid, wanted, least, deadline) if node not in first]
            answers = ask(grid, dict.fromkeys(later), _patience(config))
            reports |= _good(answers, None if least is None else least - len(reports))
    return _settle(grid, reports, wanted, config, named or {})


def _wait_for(grid: Grid, wanted: int, least: int | None, deadline: float) -> list[int]:
    before = -1
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) >= wanted:
            return nodes
        if len(nodes) != before:
            LOG.log(INFO, "waiting for nodes: %d of %d are connected", len(nodes), wanted)
            before = len(nodes)
        if time.monotonic() > deadline:
            if least is None or len(nodes) < least:
                raise RuntimeError(_node_advice(len(nodes), wanted, least))
            LOG.log(WARNING, "%d of %d nodes are connected; at least %d are enough", len(nodes), wanted, least)
            return nodes
        time.sleep(0.2)


def _node_advice(found: int, wanted: int, least: int | None = None) -> str:
    enough = f", at least federation.min_clients={least}" if least is not None else ""
    return (
        f"{found} nodes are connected, the run needs {wanted} (federation.num_clients){enough}: in a simulation add "
        f'--federation-config "num-supernodes={wanted}", in a deployment start {wanted} SuperNodes'
    )


def _patience(config: Config) -> float:
    """Return how many seconds nodes may take for their facts: all are needed, or ``min_clients`` go on without them."""
    federation = config.federation
    return federation.round_timeout if federation.min_clients is None else federation.node_timeout


def ask(grid: Grid, nodes: Mapping[int, Placement | None], patience: float) -> dict[int, NodeReport | str]:
    """Return the facts of each node by node id, or why there are none; ``nodes`` maps them to what they are told."""
    messages = [
        Message(encode_placement(placement), dst_node_id=node, message_type=MessageType.QUERY, ttl=patience + 10.0)
        for node, placement in nodes.items()
    ]
    found: dict[int, NodeReport | str] = dict.fromkeys(nodes, f"{NO_ANSWER} within {patience:g} seconds")
    for reply in grid.send_and_receive(messages, timeout=patience) if messages else ():
        node = reply.metadata.src_node_id
        if reply.has_error():
            # Flower itself answers, with an error, for a node that is gone.
            asked = {sent.metadata.message_id: sent.metadata.dst_node_id for sent in messages}
            found[node if node in found else asked.get(reply.metadata.reply_to_message_id, node)] = reason_of(reply)
        elif node in found:
            try:
                found[node] = decode_node_report(reply.content, node)
            except ValueError as error:
                found[node] = str(error)
    return found


def _good(answers: Mapping[int, NodeReport | str], least: int | None) -> dict[int, NodeReport]:
    """Return the nodes that told their facts; the others end the run unless it can do with fewer."""
    good = {node: answer for node, answer in answers.items() if isinstance(answer, NodeReport)}
    # By their words: node ids are random, and the same fault should read the same.
    failed = sorted((answer, node) for node, answer in answers.items() if isinstance(answer, str))
    problems = [f"node {node}: {answer}" for answer, node in failed]
    if problems and (least is None or len(good) < least):
        raise RuntimeError(f"{len(problems)} of {len(answers)} nodes failed before round 1; {problems[0]}")
    for problem in problems:
        LOG.log(WARNING, "left out: %s", problem)
    return good


def reason_of(reply: Message) -> str:
    """Return the last line of a failed reply's reason, which names the error itself."""
    text = (reply.error.reason or "").replace("\\n", "\n").strip()
    lines = [line.strip(" '\">") for line in text.splitlines() if line.strip(" '\">")]
    named = [line for line in lines if "Error" in line.split(":", 1)[0] and ":" in line]
    line = (named or lines or [f"error code {reply.error.code}"])[-1]
    return line[:500]


def _settle(
    grid: Grid, reports: dict[int, NodeReport], wanted: int, config: Config, named: Mapping[int, str]
) -> Roster:
    """Return the roster: places for those that have none yet, one class list, and facts that fit together."""
    places = _places(reports, wanted, named)
    in_order = sorted(reports.values(), key=lambda report: (report.partition, report.name))
    class_names = agree({report.who: report.class_names for report in in_order})
    told = {
        node: Placement(places[node], wanted, class_names)
        for node, report in reports.items()
        if report.partition == UNPLACED or report.class_names != class_names
    }
    least = config.federation.min_clients
    enough = None if least is None else least - (len(reports) - len(told))
    reports |= _good(ask(grid, told, _patience(config)), enough)
    roster = Roster({}, {}, wanted)
    for node in sorted(places, key=lambda each: places[each]):
        if reports[node].partition == places[node]:  # else it was left out
            check_fits(reports[node], places[node], class_names, wanted, config)
            roster.admit(node, reports[node], told.get(node))
    own = {report.own_data: report.who for report in roster.reports.values()}
    if len(own) == 2:
        raise ValueError(f"{own[True]} has data of its own and {own[False]} has none: give all a node-config data")
    return roster


def _places(reports: Mapping[int, NodeReport], wanted: int, named: Mapping[int, str]) -> dict[int, int]:
    """Return the partition of each node: its own, or one by the order of the names."""
    for key in ("partition", "name"):
        seen: dict[object, NodeReport] = {}
        for report in reports.values():
            value = getattr(report, key)
            if value not in (UNPLACED, "") and value in seen:
                fact = f"partition-id={value}" if key == "partition" else f"name={value!r}"
                raise ValueError(f"two nodes say {fact}: give every SuperNode its own")
            seen[value] = report
    unplaced = {report.name: node for node, report in reports.items() if report.partition == UNPLACED}
    if unplaced and len(unplaced) < len(reports):
        other = next(report for report in reports.values() if report.partition != UNPLACED)
        raise ValueError(f"{other.who} has a partition-id, node {min(unplaced)!r} has none: give one to all or to none")
    if not unplaced:
        return {node: report.partition for node, report in reports.items()}
    places = {unplaced[name]: partition for partition, name in named.items() if name in unplaced}
    free = iter(sorted(set(range(wanted)) - set(named)))
    for name, node in sorted(unplaced.items()):
        if node not in places:
            place = next(free, None)
            if place is None:
                raise ValueError(f"node {name!r} has no place among the {wanted} clients of the run")
            places[node] = place
    return places


def check_fits(report: NodeReport, place: int, class_names: Iterable[str], wanted: int, config: Config) -> None:
    """Refuse a client that does not fit the run, with a ``ValueError`` that names it."""
    if report.num_partitions != wanted:
        raise ValueError(f"{report.who} says num-partitions={report.num_partitions}, the run has {wanted} clients")
    if report.feature_dim != config.model.feature_dim:
        raise ValueError(
            f"{report.who} ({report.model}) has features of width {report.feature_dim}: "
            f"model.feature_dim={config.model.feature_dim} is needed"
        )
    if report.partition != place or report.class_names != tuple(class_names):
        raise ValueError(f"{report.who} does not know the same classes in the same order as the others")
