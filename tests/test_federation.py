"""Whole federations in one process, through the real server and client apps."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Error, Message

from task.payload import nbytes
from tests import contents
from tests.algorithms import ALGORITHMS, fitting
from tests.fake_grid import FakeGrid, run_federation

SMALL = "partition.max_samples=240 federation.rounds=2"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def timeless(folder: Path) -> list[str]:
    """The lines of rounds.jsonl without the fields that hold times."""
    return [json.dumps({k: v for k, v in row.items() if k != "seconds"}) for row in rows_of(folder)]


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())  # type: ignore[no-any-return]


def train_replies(grid: FakeGrid) -> list[Message]:
    return [reply for reply in grid.replies if reply.metadata.message_type == "train" and not reply.has_error()]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_rounds_of_every_algorithm(algorithm: str, tmp_path: Path) -> None:
    run_federation(f"{fitting(algorithm)} {SMALL}", str(tmp_path / "run"))
    folder = tmp_path / "run"
    rows, summary = rows_of(folder), summary_of(folder)
    assert [row["round"] for row in rows] == [1, 2]
    assert summary["status"] == "completed"
    assert summary["algorithm"] == algorithm
    assert summary["last_accuracy"] == rows[-1]["accuracy"]
    assert 0 < summary["best_accuracy"] <= 1
    chosen = "labels=few" in fitting(algorithm)  # such methods may leave clients out of a round
    assert all({0, 1, 2, 3} >= set(row["sampled"]) and not row["failures"] for row in rows)
    assert chosen or all(row["sampled"] == [0, 1, 2, 3] for row in rows)
    assert len((folder / "clients.csv").read_text().splitlines()) == 5
    assert (folder / "checkpoint" / "state.safetensors").is_file()


def test_bytes_are_those_of_the_messages(tmp_path: Path) -> None:
    grid = run_federation(f"algorithm=fedproto {SMALL}", str(tmp_path / "run"))
    counted = {
        kind: sum(row["bytes"][kind] for row in rows_of(tmp_path / "run")) for kind in ("train_up", "train_down")
    }
    assert counted["train_up"] == sum(nbytes(reply.content) for reply in train_replies(grid))
    sent = [message for message in grid.sent if message.metadata.message_type == "train"]
    assert counted["train_down"] == sum(nbytes(message.content) for message in sent)


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name.startswith("fedtgp")])
def test_no_sample_count_leaves_a_fedtgp_client(algorithm: str, tmp_path: Path) -> None:
    grid = run_federation(f"algorithm={algorithm} {SMALL}", str(tmp_path / "run"))
    replies = train_replies(grid)
    assert len(replies) == 8
    for reply in replies:
        assert set(contents.header(reply)) == {"round", "partition", "class-ids", "vectors"}
        assert set(contents.metrics(reply)) <= {"loss", "prototype_loss", "contrast_loss"}
        assert all(isinstance(value, float) for value in contents.metrics(reply).values())


def test_sizes_can_stay_private(tmp_path: Path) -> None:
    grid = run_federation(f"federation.report_sizes=false {SMALL}", str(tmp_path / "run"))
    for reply in grid.replies:
        header = reply.content["header"]
        assert not {"num-examples", "train-size", "test-size", "class-counts"} & set(header)
    assert summary_of(tmp_path / "run")["accuracy_averaging"] == "clients"
    row = rows_of(tmp_path / "run")[-1]
    assert row["accuracy"] == pytest.approx(np.mean(list(row["client_accuracy"].values())))


def test_accuracy_is_weighted_by_test_samples(tmp_path: Path) -> None:
    grid = run_federation(SMALL, str(tmp_path / "run"))
    replies = [reply for reply in grid.replies if reply.metadata.message_type == "evaluate"][-4:]
    sizes = [reply.content["header"]["num-examples"] for reply in replies]
    right = [contents.metrics(reply)["accuracy-prototype"] * size for reply, size in zip(replies, sizes, strict=True)]
    assert rows_of(tmp_path / "run")[-1]["accuracy"] == pytest.approx(sum(right) / sum(sizes))


@pytest.mark.parametrize("algorithm", ["fedtgp", "fedtgp_official", "fedproto", "local"])
def test_same_seed_same_lines_in_any_order_of_replies(algorithm: str, tmp_path: Path) -> None:
    overrides = f"algorithm={algorithm} {SMALL} federation.participation=0.5"
    run_federation(overrides, str(tmp_path / "one"), num_nodes=6)
    run_federation(overrides, str(tmp_path / "two"), num_nodes=6, shuffle=5)
    assert timeless(tmp_path / "one") == timeless(tmp_path / "two")
    assert len(rows_of(tmp_path / "one")[0]["sampled"]) == 3
    run_federation(f"{overrides} seed=1", str(tmp_path / "three"), num_nodes=6)
    assert timeless(tmp_path / "one") != timeless(tmp_path / "three")


@pytest.mark.parametrize("algorithm", ["fedtgp", "fedproto"])
def test_a_resumed_run_ends_like_an_uninterrupted_one(algorithm: str, tmp_path: Path) -> None:
    base = f"algorithm={algorithm} partition.max_samples=240 federation.checkpoint_every=2 federation.participation=0.5"
    run_federation(f"{base} federation.rounds=5", str(tmp_path / "whole"))

    def die_in_round_four(reply: Message, partition: int, number: int) -> Message:
        if number == 4 and reply.metadata.message_type == "evaluate":
            raise KeyboardInterrupt  # as when the process is killed: after training, before the line of the round
        return reply

    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run_federation(f"{base} federation.rounds=5", str(cut), spoil=die_in_round_four)
    assert [row["round"] for row in rows_of(cut)] == [1, 2, 3]
    assert summary_of(cut)["reason"] == "interrupted"
    run_federation(f"{base} federation.rounds=5 resume={cut}", str(cut))
    assert timeless(cut) == timeless(tmp_path / "whole")
    assert summary_of(cut)["status"] == "completed"
    one, two = (np.load(folder / "prototypes.npz") for folder in (cut, tmp_path / "whole"))
    assert all(np.array_equal(one[name], two[name]) for name in two.files)


def test_resume_refuses_another_configuration_and_a_folder_without_checkpoint(tmp_path: Path) -> None:
    run_federation(SMALL, str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"train\.lr was 0\.01, is 0\.5"):
        run_federation(f"{SMALL} train.lr=0.5 resume={tmp_path / 'run'}", "")
    with pytest.raises(ValueError, match="at least 2, the rounds already done"):
        run_federation(f"{SMALL} federation.rounds=1 resume={tmp_path / 'run'}", "")
    (tmp_path / "run" / "checkpoint" / "state.safetensors").unlink()
    with pytest.raises(ValueError, match="no checkpoint"):
        run_federation(f"{SMALL} federation.rounds=3 resume={tmp_path / 'run'}", "")
    assert summary_of(tmp_path / "run")["status"] == "completed"  # every refusal left the run as it was


def test_results_are_never_overwritten_without_the_flag(tmp_path: Path) -> None:
    run_federation(SMALL, str(tmp_path / "run"))
    before = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    with pytest.raises(ValueError, match="overwrite=true"):
        run_federation(SMALL, str(tmp_path / "run"))
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == before
    run_federation(f"{SMALL} seed=3 overwrite=true", str(tmp_path / "run"))
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes() != before


def test_one_failing_client_is_named_and_the_rest_go_on(tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if partition == 2 and number == 1 and reply.metadata.message_type == "train":
            raise OSError("disk on fire")
        return reply

    run_federation(SMALL, str(tmp_path / "run"), spoil=spoil)
    rows, summary = rows_of(tmp_path / "run"), summary_of(tmp_path / "run")
    assert rows[0]["failures"] == [{"partition": 2, "phase": "train", "reason": "OSError: disk on fire"}]
    assert rows[1]["failures"] == []
    assert summary["status"] == "completed with losses"
    assert summary["failures"] == 1


def test_a_run_that_flwr_stop_ends_says_so(tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if number == 1:
            raise SystemExit(0)  # what Flower's signal handler does
        return reply

    with pytest.raises(SystemExit):
        run_federation(SMALL, str(tmp_path / "run"), spoil=spoil)
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["reason"], summary["rounds_done"]) == ("failed", "interrupted", 0)


def test_failure_policy_stop_ends_the_run(tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if partition == 2 and number == 1:
            raise OSError("disk on fire")
        return reply

    with pytest.raises(RuntimeError, match="client 2: OSError: disk on fire"):
        run_federation(f"{SMALL} federation.on_failure=stop", str(tmp_path / "run"), spoil=spoil)
    assert summary_of(tmp_path / "run")["status"] == "failed"
    assert "disk on fire" in summary_of(tmp_path / "run")["reason"]


def test_all_failing_clients_end_the_run(tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message | None:
        return None if number else reply

    with pytest.raises(RuntimeError, match="0 good replies"):
        run_federation(SMALL, str(tmp_path / "run"), spoil=spoil)
    assert summary_of(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize("algorithm", ["fedtgp", "fedproto"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reply_that_is_not_finite_is_dropped(algorithm: str, value: float, tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if partition == 1 and number == 2 and reply.metadata.message_type == "train":
            vectors = contents.vectors(reply)
            vectors[0, 0] = value
            contents.put_vectors(reply, vectors)
        return reply

    run_federation(f"algorithm={algorithm} {SMALL}", str(tmp_path / "run"), spoil=spoil)
    assert rows_of(tmp_path / "run")[1]["failures"][0]["partition"] == 1
    assert "finite" in rows_of(tmp_path / "run")[1]["failures"][0]["reason"]
    with np.load(tmp_path / "run" / "prototypes.npz") as arrays:
        assert all(np.isfinite(arrays[name]).all() for name in arrays.files)


def test_a_lost_state_is_an_error_of_that_client(tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if number == 1 and reply.metadata.message_type == "evaluate" and partition == 0:
            for path in (tmp_path / "run" / "client-state").rglob("client-00000/*.safetensors"):
                path.unlink()
        return reply

    run_federation(SMALL, str(tmp_path / "run"), spoil=spoil)
    reasons = [failure["reason"] for failure in rows_of(tmp_path / "run")[1]["failures"]]
    assert reasons
    assert all("client 0: its state of round 1 is lost" in reason for reason in reasons)


def test_idle_clients_keep_their_model_and_evaluation_changes_nothing(tmp_path: Path) -> None:
    seen: dict[int, bytes] = {}

    def spoil(reply: Message, partition: int, number: int) -> Message:
        for path in (tmp_path / "run" / "client-state").rglob("*.safetensors"):
            client = int(path.parent.name.split("-")[1])
            if reply.metadata.message_type == "train" and client == partition:
                seen[client] = path.read_bytes() if f"{number:06d}" in path.name else seen.get(client, b"")
            elif client in seen and path == sorted(path.parent.iterdir())[-1]:
                assert path.read_bytes() == seen[client]
        return reply

    run_federation(
        "partition.max_samples=240 federation.rounds=6 federation.participation=0.3 federation.checkpoint_every=1",
        str(tmp_path / "run"),
        num_nodes=6,
        spoil=spoil,
    )
    assert len(seen) == 6 or len(seen) >= 3


def test_context_state_gives_the_same_numbers_as_disk(tmp_path: Path) -> None:
    run_federation(SMALL, str(tmp_path / "disk"))
    run_federation(f"{SMALL} federation.state=context", str(tmp_path / "context"))
    assert timeless(tmp_path / "disk") == timeless(tmp_path / "context")
    assert not (tmp_path / "context" / "client-state").exists()


def test_clients_without_data_are_skipped_and_counted(tmp_path: Path) -> None:
    overrides = f"partition.alpha=0.01 partition.min_size=0 {SMALL} partition.max_samples=60"
    for algorithm in ("fedtgp", "fedproto", "local"):
        run_federation(f"algorithm={algorithm} {overrides}", str(tmp_path / algorithm), num_nodes=30)
        row = rows_of(tmp_path / algorithm)[-1]
        assert row["clients_without_test"] > 0
        assert row["clients_evaluated"] + row["clients_without_test"] == 30
        assert not row["failures"]


def test_first_round_without_prototypes_is_not_available_rather_than_zero(tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if number == 1 and reply.metadata.message_type == "train":
            contents.remove_prototypes(reply)
        return reply

    run_federation(f"algorithm=fedproto {SMALL}", str(tmp_path / "run"), spoil=spoil)
    rows = rows_of(tmp_path / "run")
    assert rows[0]["accuracy"] is None
    assert rows[0]["accuracy_head"] > 0
    assert rows[1]["accuracy"] is not None
    assert summary_of(tmp_path / "run")["best_round"] == 2


def test_evaluation_can_be_rare_but_the_last_round_is_always_evaluated(tmp_path: Path) -> None:
    overrides = "partition.max_samples=240 federation.rounds=5 federation.evaluate_every=3"
    run_federation(overrides, str(tmp_path / "run"))
    assert [row["accuracy"] is not None for row in rows_of(tmp_path / "run")] == [False, False, True, False, True]


@pytest.mark.parametrize("num_nodes", [2, 6])
def test_another_number_of_nodes_ends_with_the_flag_to_use(num_nodes: int, tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, ValueError), match='--federation-config "num-supernodes=4"'):
        run_federation(
            f"{SMALL} federation.num_clients=4 federation.node_timeout=0.5", str(tmp_path / "run"), num_nodes=num_nodes
        )
    assert summary_of(tmp_path / "run")["status"] == "failed"


def test_a_folder_that_cannot_be_written_ends_the_run_before_round_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match="output-dir"):
        run_federation(SMALL, str(tmp_path / "file" / "run"))


def test_the_prototype_term_pulls_from_the_second_round_on(tmp_path: Path) -> None:
    for weight in ("0.0", "1.0"):
        overrides = f"algorithm=fedproto algorithm.client.weight={weight} {SMALL}"
        run_federation(overrides, str(tmp_path / weight))
    free, pulled = (rows_of(tmp_path / weight) for weight in ("0.0", "1.0"))
    assert "train_prototype_loss" not in pulled[0]["metrics"]
    assert pulled[1]["metrics"]["train_prototype_loss"] > 0
    assert free[1]["metrics"]["train_prototype_loss"] == 0
    assert free[0]["client_accuracy"] == pulled[0]["client_accuracy"]
    assert free[1]["metrics"]["train_loss"] != pulled[1]["metrics"]["train_loss"]


@pytest.mark.parametrize("state", ["disk", "context"])
def test_a_client_whose_replies_were_dropped_goes_on_from_its_last_good_state(state: str, tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if partition == 1 and number in (3, 4) and reply.metadata.message_type == "train":
            contents.put_vectors(reply, np.full_like(contents.vectors(reply), np.nan))
        return reply

    overrides = f"{SMALL} federation.rounds=6 federation.checkpoint_every=3 federation.state={state}"
    run_federation(overrides, str(tmp_path / "run"), spoil=spoil)
    lost = [[failure["partition"] for failure in row["failures"]] for row in rows_of(tmp_path / "run")]
    assert lost == [[], [], [1], [1], [], []]


def test_a_huge_prototype_is_dropped_and_moves_nothing(tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if partition == 1 and reply.metadata.message_type == "train":
            vectors = contents.vectors(reply)
            vectors[0, 0] = 1e25
            contents.put_vectors(reply, vectors)
        return reply

    run_federation(SMALL, str(tmp_path / "run"), spoil=spoil)
    assert [failure["reason"] for failure in rows_of(tmp_path / "run")[1]["failures"]] == [
        "client 1 sent a prototype of norm 1e+25: at most 1e+04 is allowed"
    ]
    assert rows_of(tmp_path / "run")[1]["accuracy"] > 0


def test_a_state_that_is_not_finite_is_never_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from server_app.strategies.fedproto import FedProto

    absorb = FedProto.absorb

    def break_in_round_two(self: FedProto, state: Any, uploads: Any, rng: Any, device: Any) -> Any:
        new, metrics = absorb(self, state, uploads, rng, device)
        if uploads[0].round == 2:
            new["vectors"] = new["vectors"] * math.nan
        return new, metrics

    monkeypatch.setattr(FedProto, "absorb", break_in_round_two)
    run_federation(f"algorithm=fedproto {SMALL} federation.rounds=3", str(tmp_path / "run"))
    rows = rows_of(tmp_path / "run")
    assert rows[1]["metrics"]["state_kept"] == 1
    assert not any(row["failures"] for row in rows)


def test_dropout_is_seeded(tmp_path: Path) -> None:
    overrides = "model=htfe4 algorithm=local partition.max_samples=60 federation.rounds=1 train.lr=0.001"
    for name in ("one", "two"):
        torch.rand(3)  # another state of torch's own generator
        run_federation(overrides, str(tmp_path / name), num_nodes=2)
    assert timeless(tmp_path / "one") == timeless(tmp_path / "two")


def test_a_resumed_run_needs_as_many_clients(tmp_path: Path) -> None:
    run_federation(SMALL, str(tmp_path / "run"))
    with pytest.raises(ValueError, match="4, as before"):
        run_federation(f"{SMALL} federation.rounds=3 resume={tmp_path / 'run'}", "", num_nodes=5)


def test_failing_evaluations_follow_the_policy_too(tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if reply.metadata.message_type == "evaluate":
            raise OSError("no test today")
        return reply

    with pytest.raises(RuntimeError, match="0 good replies"):
        run_federation(SMALL, str(tmp_path / "run"), spoil=spoil)
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["rounds_done"]) == ("failed", 1)


def test_counts_that_are_not_sent_are_refused_before_the_start() -> None:
    from task.config import load

    with pytest.raises(ValueError, match=r"algorithm\.client\.share_counts=False"):
        load("algorithm=fedproto algorithm.client.share_counts=false")


def test_late_and_replayed_replies_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_federation(SMALL, str(tmp_path / "quiet"))

    class Echo(FakeGrid):
        """Hands back all earlier replies, too, and each new one twice."""

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            earlier = list(self.replies)
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if replies[0].metadata.message_type == "query":
                return replies
            return [*earlier, *replies, *replies]

    monkeypatch.setattr("tests.fake_grid.FakeGrid", Echo)
    run_federation(SMALL, str(tmp_path / "echo"))
    assert timeless(tmp_path / "echo") == timeless(tmp_path / "quiet")


def test_a_reply_of_another_round_is_none(tmp_path: Path) -> None:
    first: list[Message] = []

    def spoil(reply: Message, partition: int, number: int) -> Message:
        if partition != 1 or reply.metadata.message_type != "train":
            return reply
        first.append(reply)
        return first[0]

    run_federation(SMALL, str(tmp_path / "run"), spoil=spoil)
    assert len(first) == 2
    row = rows_of(tmp_path / "run")[1]
    assert row["failures"] == [
        {"partition": 1, "phase": "train", "reason": "no reply within federation.round_timeout"}
    ]
    assert row["client_traffic"]["1"]["bytes_up"] == 0


def test_only_the_node_that_was_asked_may_answer_but_flower_may_say_that_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strangers(FakeGrid):
        """In round 2 another node answers for one, and Flower, whose own node id is 1, for another."""

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            asked = list(messages)
            replies = list(super().send_and_receive(asked, timeout=timeout))
            if asked[0].metadata.message_type == "train" and asked[0].metadata.group_id == "2":
                replies[0].metadata.__dict__["_src_node_id"] = asked[3].metadata.dst_node_id
                replies[2] = Message(Error(code=3, reason="Error: Node Unavailable"), reply_to=asked[2])
                replies[2].metadata.__dict__["_src_node_id"] = 1
            return replies

    monkeypatch.setattr("tests.fake_grid.FakeGrid", Strangers)
    run_federation(SMALL, str(tmp_path / "run"))
    failures = rows_of(tmp_path / "run")[1]["failures"]
    reasons = {failure["partition"]: failure["reason"] for failure in failures}
    assert reasons == {0: "no reply within federation.round_timeout", 2: "Error: Node Unavailable"}


def test_a_message_does_not_outlive_its_round_for_long(tmp_path: Path) -> None:
    grid = run_federation(f"{SMALL} federation.round_timeout=50", str(tmp_path / "run"))
    assert {message.metadata.ttl for message in grid.sent if message.metadata.group_id} == {60.0}
