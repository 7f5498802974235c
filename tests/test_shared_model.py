"""What every method that shares an auxiliary model must survive, through the real apps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, Message

from tests.fake_grid import run_federation
from tests.shared_model import BATCHNORM, SMALL_AUXILIARY
from tests.test_baselines import replies_of_scarce_clients, rows_of

METHODS = ["fml", "fml algorithm.server.weighting=examples", "fedkd", "fedkd algorithm.server.what=params"]
SMALL = f"partition.max_samples=120 {SMALL_AUXILIARY}"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("algorithm", ["fml", "fedkd"])
def test_same_seed_same_lines_in_any_order_of_replies_and_after_a_resume(algorithm: str, tmp_path: Path) -> None:
    base = f"algorithm={algorithm} {SMALL} federation.participation=0.7 federation.checkpoint_every=1"
    run_federation(f"{base} federation.rounds=4", str(tmp_path / "whole"))

    def die_in_round_three(reply: Message, partition: int, number: int) -> Message:
        if number == 3 and reply.metadata.message_type == "evaluate":
            raise KeyboardInterrupt  # as when the process is killed: after training, before the line of the round
        return reply

    cut = str(tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        run_federation(f"{base} federation.rounds=4", cut, shuffle=5, spoil=die_in_round_three)
    run_federation(f"{base} federation.rounds=4 resume={cut}", cut)
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "cut")
    assert not any(row["failures"] for row in rows_of(tmp_path / "whole"))


@pytest.mark.parametrize("algorithm", METHODS)
def test_clients_without_data_or_with_one_class_take_part(algorithm: str, tmp_path: Path) -> None:
    replies = replies_of_scarce_clients(f"{algorithm} {BATCHNORM}", tmp_path / "run")
    assert 0 < sum("weights" not in reply.content for reply in replies) < len(replies)


@pytest.mark.parametrize("algorithm", METHODS)
def test_a_reply_that_is_not_finite_or_does_not_fit_is_dropped(algorithm: str, tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if reply.metadata.message_type == "train" and number == 2 and partition < 2:
            weights = reply.content["weights"]
            name = next(name for name in weights if weights[name].numpy().ndim > 1)
            values = weights[name].numpy().copy()
            values.flat[0] = np.nan
            weights[name] = Array(values if partition == 0 else np.zeros((3, 3), np.float32))
        return reply

    run_federation(f"algorithm={algorithm} {SMALL} federation.rounds=3", str(tmp_path / "run"), spoil=spoil)
    rows = rows_of(tmp_path / "run")
    assert [failure["partition"] for failure in rows[1]["failures"]] == [0, 1]
    assert "finite" in rows[1]["failures"][0]["reason"]
    assert "client 1 sent weights." in rows[1]["failures"][1]["reason"]
    assert not rows[2]["failures"]


@pytest.mark.parametrize("algorithm", ["fml", "fedkd"])
def test_unequal_heads_share_a_model_and_tests_cost_no_download(algorithm: str, tmp_path: Path) -> None:
    grid = run_federation(
        f"algorithm={algorithm} {SMALL} federation.rounds=2 'model.heads=[[],[16]]'", str(tmp_path / "run")
    )
    assert not any(row["failures"] for row in rows_of(tmp_path / "run"))
    assert all("weights" not in sent.content for sent in grid.sent if sent.metadata.message_type == "evaluate")
    assert all(row["bytes"]["evaluate_down"] < 1000 for row in rows_of(tmp_path / "run"))


def test_fedkd_sends_a_change_to_those_who_trained_last_and_the_whole_student_to_others(tmp_path: Path) -> None:
    overrides = f"algorithm=fedkd {SMALL} federation.rounds=5 federation.participation=0.5"
    grid = run_federation(overrides, str(tmp_path / "run"))
    rows = rows_of(tmp_path / "run")
    partitions = {node: int(context.node_config["partition-id"]) for node, context in grid.contexts.items()}
    sizes: dict[bool, set[int]] = {True: set(), False: set()}
    for sent in grid.sent:
        if sent.metadata.message_type == "train":
            number, partition = int(sent.metadata.group_id), partitions[sent.metadata.dst_node_id]
            expected = number > 1 and partition in rows[number - 2]["sampled"]
            weights = sent.content["weights"]
            assert all(name.startswith("change/" if expected else "model/") for name in weights)
            sizes[expected].add(weights.count_bytes())
    assert sizes[True]
    assert max(sizes[True]) < 0.5 * min(sizes[False])
    downs = [row["bytes"]["train_down"] for row in rows]
    assert downs[0] == max(downs) > min(downs)
