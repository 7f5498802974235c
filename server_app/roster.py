"""Who takes part: every node is asked once, before round 1."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from task.messages import NodeReport
from task.payload import decode_node_report
from task.schema import Config


@dataclass(frozen=True)
class Roster:
    """The clients of a run by partition id, with the node that holds each."""

    reports: dict[int, NodeReport]
    node_ids: dict[int, int]

    def __len__(self) -> int:
        return len(self.reports)

    def __iter__(self) -> Iterator[int]:
        return iter(self.reports)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the C classes, in the order of their ids."""
        return next(iter(self.reports.values())).class_names

    @property
    def labelled(self) -> frozenset[int]:
        """The partitions whose clients have labels."""
        return frozenset(partition for partition, report in self.reports.items() if report.role == "labelled")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The (channels, height, width) that all clients have; ``ValueError`` when there is no such shape."""
        shapes = {report.image_shape: partition for partition, report in self.reports.items()}
        if len(shapes) != 1:
            found = ", ".join(f"{shape} of client {partition}" for shape, partition in sorted(shapes.items()))
            raise ValueError(f"clients that share a model need images of one shape; found {found}")
        (shape,) = shapes
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"client {shapes[shape]} sent image-shape={shape}: channels, height, width are needed")
        channels, height, width = shape
        return channels, height, width


def discover(grid: Grid, config: Config) -> Roster:
    """Wait for the nodes of the run and ask each for its facts.

    Raises
    ------
    RuntimeError
        Too few or too many nodes within ``federation.node_timeout`` seconds, or a node that failed to answer.
    ValueError
        Nodes whose facts do not fit together.
    """
    deadline = time.monotonic() + config.federation.node_timeout
    wanted = config.federation.num_clients
    first = _wait_for(grid, 1 if wanted is None else wanted, deadline)
    if wanted is not None and len(first) != wanted:
        raise RuntimeError(_node_advice(len(first), wanted))
    reports = _query(grid, first, config)
    if wanted is None:
        wanted = max(report.num_partitions for report in reports.values())
        if len(first) < wanted:
            reports = _query(grid, _wait_for(grid, wanted, deadline), config)
    return _check(reports, wanted, config)


def _wait_for(grid: Grid, wanted: int, deadline: float) -> list[int]:
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) >= wanted:
            return nodes
        if time.monotonic() > deadline:
            raise RuntimeError(_node_advice(len(nodes), wanted))
        time.sleep(0.2)


def _node_advice(found: int, wanted: int) -> str:
    return (
        f"{found} nodes are connected, the run needs {wanted} (federation.num_clients): in a simulation add "
        f'--federation-config "num-supernodes={wanted}", in a deployment start {wanted} SuperNodes'
    )


def _query(grid: Grid, nodes: Iterable[int], config: Config) -> dict[int, NodeReport]:
    """Return the facts of each node, by node id."""
    messages = [Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in nodes]
    replies = list(grid.send_and_receive(messages, timeout=config.federation.round_timeout))
    reports, problems = {}, []
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error():
            problems.append((reason_of(reply), node))
        else:
            reports[node] = decode_node_report(reply.content, node)
    if problems:
        text, node = min(problems)  # by their words: node ids are random, and the same fault should read the same
        raise RuntimeError(f"{len(problems)} of {len(messages)} nodes failed before round 1; node {node}: {text}")
    if len(reports) < len(messages):
        missing = len(messages) - len(reports)
        raise RuntimeError(f"{missing} of {len(messages)} nodes did not answer within federation.round_timeout")
    return reports


def reason_of(reply: Message) -> str:
    """Return the last line of a failed reply's reason, which names the error itself."""
    text = (reply.error.reason or "").replace("\\n", "\n").strip()
    lines = [line.strip(" '\">") for line in text.splitlines() if line.strip(" '\">")]
    named = [line for line in lines if "Error" in line.split(":", 1)[0] and ":" in line]
    line = (named or lines or [f"error code {reply.error.code}"])[-1]
    return line[:500]


def _check(reports: dict[int, NodeReport], wanted: int, config: Config) -> Roster:
    by_partition: dict[int, int] = {}
    for node, report in sorted(reports.items(), key=lambda item: item[1].partition):
        if report.partition in by_partition:
            raise ValueError(f"two nodes say partition-id={report.partition}: give every SuperNode its own")
        if report.num_partitions != wanted:
            raise ValueError(
                f"client {report.partition} says num-partitions={report.num_partitions}, the run has {wanted} clients"
            )
        if report.feature_dim != config.model.feature_dim:
            raise ValueError(
                f"client {report.partition} ({report.model}) has features of width {report.feature_dim}: "
                f"model.feature_dim={config.model.feature_dim} is needed"
            )
        by_partition[report.partition] = node
    first = reports[next(iter(by_partition.values()))]
    for partition, node in by_partition.items():
        if reports[node].class_names != first.class_names:
            raise ValueError(
                f"clients {first.partition} and {partition} do not know the same classes in the same order"
            )
    return Roster({partition: reports[node] for partition, node in by_partition.items()}, by_partition)
