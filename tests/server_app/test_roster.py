from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from server_app.attendance import absent, attend
from server_app.roster import Roster, discover, reason_of
from task.config import load
from task.messages import UNPLACED, NodeReport
from task.payload import decode_placement, encode_node_report
from task.schema import Config
from tests.fake_grid import FakeGrid


def report(partition: int, total: int = 3, **changes: Any) -> NodeReport:
    facts: dict[str, Any] = {"parameters": 9, "feature_dim": 512, "class_names": ("a", "b"), "device": "cpu"}
    facts |= {"model": "cnn4", "class_ids": (0,), **changes}
    return NodeReport(partition, total, **facts)


def named(name: str, **changes: Any) -> NodeReport:
    return report(UNPLACED, 0, name=name, **changes)


class Answers(FakeGrid):
    """Nodes that answer the query with given facts, or with an error text, or (None) not at all.

    What the server tells them they repeat, if they know no other classes.
    """

    def __init__(self, answers: list[NodeReport | str | None]) -> None:
        super().__init__(len(answers), {})
        self.answers = dict(zip(self.contexts, answers, strict=True))
        self.waited: list[float | None] = []
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        self.waited.append(timeout)
        for message in messages:
            answer, place = self.answers[message.metadata.dst_node_id], decode_placement(message.content)
            if answer is None:
                continue
            if isinstance(answer, NodeReport) and place is not None:
                unknown = sorted(set(answer.class_names) - set(place.class_names))
                facts = {"partition": place.partition, "num_partitions": place.num_partitions}
                told = replace(answer, class_names=place.class_names, **facts)
                answer = f"ValueError: class {unknown[0]} is not among the agreed" if unknown else told
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
        ([report(0), report(1, class_names=("a", "B")), report(2)], ["'b' of client 0 and class 'B' of client 1"]),
        ([report(0), report(1, class_names=("0", "1")), report(2)], ["client 0 have names", "client 1 are numbers"]),
        ([named("x"), named("x"), named("y")], ["two nodes say name='x'"]),
        ([named("x"), report(1), named("y")], ["client 1 has a partition-id, node 'x' has none"]),
        ([report(0), report(1, own_data=True), report(2)], ["client 1 has data of its own and client 2 has none"]),
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


def test_names_are_placed_in_their_order_and_a_resumed_run_keeps_their_places() -> None:
    grid = Answers([named("west"), named("north"), named("south")])
    roster = discover(grid, load("federation.num_clients=3"))
    assert roster.names == {0: "north", 1: "south", 2: "west"}
    assert all(roster.placements[partition].partition == partition for partition in range(3))
    resumed = discover(grid, load("federation.num_clients=3"), {0: "south", 2: "north"})
    assert resumed.names == {0: "south", 1: "west", 2: "north"}
    with pytest.raises(ValueError, match=r"federation\.num_clients must say"):
        discover(grid, load())


def test_the_class_list_is_that_of_all_nodes_together() -> None:
    same = discover(Answers([report(0, 2, class_names=("b", "a")), report(1, 2, class_names=("b", "a"))]), pair())
    assert (same.class_names, same.placements) == (("b", "a"), {})  # one list keeps its order, and nobody is told it
    answers = [report(0, 2, class_names=("dog", "cat")), report(1, 2, class_names=("cow",))]
    union = discover(Answers(answers), pair())
    assert union.class_names == ("cat", "cow", "dog")
    assert {place.class_names for place in union.placements.values()} == {union.class_names}
    numbers = [report(0, 2, class_names=("0", "10")), report(1, 2, class_names=("2",))]
    assert discover(Answers(numbers), pair()).class_names == ("0", "2", "10")


def pair() -> Config:
    return load("federation.num_clients=2")


def test_with_enough_clients_nobody_waits_for_the_others() -> None:
    config = load("federation.num_clients=3 federation.min_clients=2 federation.node_timeout=0.3")
    grid = Answers([report(0), None, report(2)])
    roster = discover(grid, config)
    assert (list(roster), roster.size, grid.waited[0]) == ([0, 2], 3, 0.3)
    assert list(discover(Answers([report(0), report(2)]), config)) == [0, 2]
    assert list(discover(Answers([report(0), "ValueError: no such file", report(2)]), config)) == [0, 2]
    with pytest.raises(RuntimeError, match=r"1 of 2 nodes failed before round 1; node .*no answer within 0\.3 seconds"):
        discover(Answers([report(0), None]), config)
    with pytest.raises(RuntimeError, match=r"1 nodes are connected, the run needs 3 .*federation\.min_clients=2"):
        discover(Answers([report(0)]), config)


def test_clients_come_late_leave_and_come_back() -> None:
    config = load("federation.num_clients=3 federation.min_clients=2 federation.node_timeout=0.3")
    grid = Answers([report(0), report(1)])
    roster = discover(grid, config)
    assert (attend(grid, roster, config, 1), absent(roster, [0, 1])) == ([0, 1], [2])
    join(grid, 77, report(2))
    assert attend(grid, roster, config, 1) == [0, 1, 2]
    leave(grid, roster.node_ids[1])
    assert attend(grid, roster, config, 1) == [0, 2]
    join(grid, 78, report(1))  # a SuperNode without a key is another node when it is started again
    assert attend(grid, roster, config, 1) == [0, 1, 2]
    assert roster.node_ids[1] == 78
    for node in (77, 78):
        leave(grid, node)
    with pytest.raises(RuntimeError, match=r"1 of 3 clients are connected, federation\.min_clients=2 are needed"):
        attend(grid, roster, config, 1)


def test_where_the_labelled_train_alone_a_round_waits_for_them() -> None:
    few = "algorithm=fedavg_fixmatch model=cnn4 labels=few labels.warmup_rounds=2 algorithm.evaluation=clients"
    config = load(f"{few} federation.num_clients=3 federation.min_clients=1 federation.node_timeout=0.3")
    grid = Answers([report(0), report(1, role="unlabelled"), report(2, role="unlabelled")])
    roster = discover(grid, config)
    assert attend(grid, roster, config, 1) == [0, 1, 2]
    leave(grid, roster.node_ids[0])
    alone = r"federation\.min_replies=1 are needed, since they train alone in round 2"
    with pytest.raises(RuntimeError, match=rf"0 clients with labels are connected, {alone}"):
        attend(grid, roster, config, 2)
    assert attend(grid, roster, config, 3) == [1, 2]
    join(grid, 77, report(0))
    assert attend(grid, roster, config, 2) == [0, 1, 2]
    config.federation.min_replies, config.federation.node_timeout = 2, 60.0  # known at once where all are there
    with pytest.raises(RuntimeError, match=r"1 clients with labels are connected, federation\.min_replies=2"):
        attend(grid, roster, config, 1)


@pytest.mark.parametrize(
    ("newcomer", "words"),
    [
        (report(0), "client 0 is connected already"),
        (report(2, 4), "num-partitions=4"),
        (report(2, class_names=("a", "z")), "class z is not among the agreed"),
        (report(2, feature_dim=9), "width 9"),
        (report(2, role="unlabelled"), "client 2 has no labels"),
        ("ValueError: no such folder", "no such folder"),
    ],
)
def test_a_newcomer_that_does_not_fit_is_refused_and_the_run_goes_on(newcomer: NodeReport | str, words: str) -> None:
    config = load("federation.num_clients=3 federation.min_clients=2 federation.node_timeout=0.3")
    grid = Answers([report(0), report(1)])
    roster = discover(grid, config)
    join(grid, 77, newcomer)
    asked = len(grid.waited)
    assert attend(grid, roster, config, 1) == [0, 1]
    assert words in roster.refused[77]
    told = len(grid.waited)
    attend(grid, roster, config, 1)
    assert asked < told == len(grid.waited)  # it is not asked again
    away = grid.contexts.pop(77)
    attend(grid, roster, config, 1)
    grid.contexts[77], grid.answers[77] = away, report(2)  # the same key, and better facts
    assert attend(grid, roster, config, 1) == [0, 1, 2]


def test_a_newcomer_with_a_name_takes_its_place_or_a_free_one() -> None:
    config = load("federation.num_clients=3 federation.min_clients=2 federation.node_timeout=0.3")
    grid = Answers([named("north"), named("west")])
    roster = discover(grid, config)
    join(grid, 77, named("south", class_names=("a",)))
    attend(grid, roster, config, 1)
    assert roster.names == {0: "north", 1: "west", 2: "south"}
    assert roster.placements[2].class_names == ("a", "b")
    leave(grid, roster.node_ids[1])
    join(grid, 78, named("west"))
    assert attend(grid, roster, config, 1) == [0, 1, 2]
    join(grid, 79, named("east"))
    attend(grid, roster, config, 1)
    assert "all places are taken" in roster.refused[79]


def join(grid: Answers, node: int, answer: NodeReport | str) -> None:
    grid.answers[node], grid.contexts[node] = answer, next(iter(grid.contexts.values()))


def leave(grid: Answers, node: int) -> None:
    del grid.contexts[node]


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
