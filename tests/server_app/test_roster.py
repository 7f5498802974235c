from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from server_app.roster import Roster, discover, reason_of
from task.config import load
from task.messages import NodeReport
from task.payload import encode_node_report
from tests.fake_grid import FakeGrid


def report(partition: int, total: int = 3, **changes: Any) -> NodeReport:
    facts: dict[str, Any] = {"parameters": 9, "feature_dim": 512, "class_names": ("a", "b"), "device": "cpu"}
    facts |= {"model": "cnn4", "class_ids": (0,), **changes}
    return NodeReport(partition, total, **facts)


class Answers(FakeGrid):
    """Nodes that answer the query with given facts, or with an error text."""

    def __init__(self, answers: list[NodeReport | str]) -> None:
        super().__init__(len(answers), {})
        self.answers = dict(zip(self.contexts, answers, strict=True))
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for message in messages:
            answer = self.answers[message.metadata.dst_node_id]
            message.metadata.__dict__["_src_node_id"] = 1
            content = Error(0, answer) if isinstance(answer, str) else encode_node_report(answer)
            reply = Message(content, reply_to=message)  # type: ignore[call-overload]
            reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
            replies.append(reply)
        return replies


def test_clients_are_ordered_by_partition_whatever_their_node_ids() -> None:
    roster = discover(Answers([report(2), report(0), report(1)]), load("federation.num_clients=3"))
    assert list(roster) == [0, 1, 2]
    assert roster.class_names == ("a", "b")
    assert len(set(roster.node_ids.values())) == 3


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([report(0), report(1), report(1)], ["two nodes", "partition-id=1"]),
        ([report(0), report(1), report(2, total=4)], ["client 2", "num-partitions=4", "3 clients"]),
        ([report(0), report(1, feature_dim=100), report(2)], ["client 1", "width 100", "model.feature_dim=512"]),
        ([report(0), report(1, class_names=("b", "a")), report(2)], ["clients 0 and 1", "same classes"]),
        ([report(0), "ValueError: no such file /x", report(2)], ["1 of 3 nodes", "no such file /x"]),
    ],
)
def test_facts_that_do_not_fit_end_the_run_before_round_one(answers: list[NodeReport | str], words: list[str]) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        discover(Answers(answers), load("federation.num_clients=3"))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_null_means_as_many_as_the_nodes_say() -> None:
    assert len(discover(Answers([report(0, 2), report(1, 2)]), load())) == 2
    with pytest.raises(RuntimeError, match="2 nodes are connected, the run needs 5"):
        discover(Answers([report(0, 5), report(1, 5)]), load("federation.node_timeout=0.3"))


def test_no_nodes_at_all() -> None:
    with pytest.raises(RuntimeError, match="0 nodes are connected"):
        discover(Answers([]), load("federation.node_timeout=0.2"))


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("Traceback (most recent call last):\n  File x\nValueError: client 3: bad\n", "ValueError: client 3: bad"),
        ("<class 'X'>:<'\\nTraceback\\nOSError: disk full\\n'>", "OSError: disk full"),
        ("", "error code 7"),
    ],
)
def test_the_reason_of_a_failure_is_its_last_telling_line(reason: str, expected: str) -> None:
    asked = Message(RecordDict(), dst_node_id=5, message_type="query")
    asked.metadata.__dict__["_src_node_id"] = 1
    assert reason_of(Message(Error(7, reason), reply_to=asked)) == expected


def test_a_shared_model_needs_images_of_one_shape() -> None:
    found = roster_of([report(0, image_shape=(1, 28, 28)), report(1, image_shape=(1, 28, 28))])
    assert found.image_shape == (1, 28, 28)
    with pytest.raises(ValueError, match=r"one shape; found \(1, 28, 28\) of client 0, \(3, 28, 28\) of client 1"):
        _ = roster_of([report(0, image_shape=(1, 28, 28)), report(1, image_shape=(3, 28, 28))]).image_shape
    with pytest.raises(ValueError, match=r"client 1 sent image-shape=\(\): channels, height, width"):
        _ = roster_of([report(0), report(1)]).image_shape


def roster_of(reports: list[NodeReport]) -> Roster:
    by_partition = {each.partition: each for each in reports}
    return Roster(by_partition, dict.fromkeys(by_partition, 1))
