"""A whole federation in one process: a grid that hands messages straight to the client app."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from client_app.main import app as client_app
from server_app.main import app as server_app

Spoil = Callable[[Message, int, int], Message | None]


class FakeGrid(Grid):
    """Nodes with random ids, as in a simulation; each reply passes through ``spoil(reply, partition, round)``.

    ``shuffle`` hands replies back in a random order. ``spoil`` may raise (the client fails), change the reply, or
    return None (no reply). ``roles`` is what nodes say of themselves in their node-config, by partition; ``facts`` is
    all that they say, in the place of their number.
    """

    def __init__(
        self,
        num_nodes: int,
        run_config: dict[str, Any],
        spoil: Spoil | None = None,
        shuffle: int = 0,
        roles: Mapping[int, str] | None = None,
        facts: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        rng = random.Random()
        ids = rng.sample(range(2**40), num_nodes)
        self.contexts = {
            node: Context(
                run_id=7,
                node_id=node,
                node_config=facts[partition] if facts else {"partition-id": partition, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=run_config,
            )
            for partition, node in enumerate(ids)
        }
        for partition, node in enumerate(ids):
            if roles and partition in roles:
                self.contexts[node].node_config["role"] = roles[partition]
        self.spoil, self.order = spoil, random.Random(shuffle) if shuffle else None
        self.sent: list[Message] = []
        self.replies: list[Message] = []

    def set_run(self, run: Any) -> None:
        raise AssertionError("not used")

    @property
    def run(self) -> Any:
        raise AssertionError("not used")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise AssertionError("not used")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise AssertionError("not used")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise AssertionError("not used")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for message in messages:
            self.sent.append(message)
            context = self.contexts[message.metadata.dst_node_id]
            message.metadata.__dict__["_src_node_id"] = 1
            message.metadata.__dict__["_message_id"] = str(len(self.sent))
            try:
                reply: Message | None = client_app(message, context)
                if self.spoil is not None and reply is not None:
                    partition = int(context.node_config.get("partition-id", -1))
                    reply = self.spoil(reply, partition, int(message.metadata.group_id or 0))
            except Exception as error:
                reply = Message(Error(code=0, reason=f"{type(error).__name__}: {error}"), reply_to=message)
            if reply is not None:
                reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
                replies.append(reply)
        if self.order is not None:
            self.order.shuffle(replies)
        self.replies.extend(replies)
        return replies


def run_federation(overrides: str, output_dir: str, num_nodes: int = 4, **grid: Any) -> FakeGrid:
    """Run the server app to its end on ``num_nodes`` clients in this process and return the grid."""
    run_config = {"overrides": overrides, "output-dir": output_dir}
    # Flower stamps messages with the identity of the process; here one process plays every part.
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    fake = FakeGrid(num_nodes, run_config, **grid)
    context = Context(run_id=7, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    server_app(fake, context)
    return fake
