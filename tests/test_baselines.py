"""What every baseline that shares heads, generators or outputs must survive, through the real apps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message

from tests import contents
from tests.fake_grid import run_federation

METHODS = ["lg_fedavg", "fedgen algorithm.server.steps=3", "feddistill"]
SMALL = "partition.max_samples=160"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.parametrize("algorithm", METHODS)
def test_same_seed_same_lines_in_any_order_of_replies_and_after_a_resume(algorithm: str, tmp_path: Path) -> None:
    base = f"algorithm={algorithm} {SMALL} federation.participation=0.5 federation.checkpoint_every=1"
    run_federation(f"{base} federation.rounds=4", str(tmp_path / "whole"), num_nodes=6)
    run_federation(f"{base} federation.rounds=2", str(tmp_path / "cut"), num_nodes=6, shuffle=5)
    run_federation(f"{base} federation.rounds=4 resume={tmp_path / 'cut'}", str(tmp_path / "cut"), num_nodes=6)
    whole, cut = rows_of(tmp_path / "whole"), rows_of(tmp_path / "cut")
    # The second round was the last one of the first command: its evaluation sent the confusion matrices, too.
    for rows in (whole, cut):
        del rows[1]["bytes"], rows[1]["client_traffic"]
    assert whole == cut
    assert not any(row["failures"] for row in rows_of(tmp_path / "whole"))


def replies_of_scarce_clients(algorithm: str, folder: Path) -> list[Message]:
    """Train replies of 20 clients with one class, one sample or none; the run must count them and lose nobody."""
    overrides = "partition.alpha=0.01 partition.min_size=0 partition.max_samples=60 federation.rounds=3 train.lr=0.1"
    grid = run_federation(f"algorithm={algorithm} {overrides}", str(folder), num_nodes=20)
    row = rows_of(folder)[-1]
    assert row["clients_without_test"] > 0
    assert row["clients_evaluated"] + row["clients_without_test"] == 20
    assert not row["failures"]
    assert all(np.isfinite(value) for value in row["metrics"].values())
    return [reply for reply in grid.replies if reply.metadata.message_type == "train"]


@pytest.mark.parametrize("algorithm", METHODS)
def test_clients_without_data_or_with_one_class_take_part(algorithm: str, tmp_path: Path) -> None:
    replies = replies_of_scarce_clients(algorithm, tmp_path / "run")
    assert any("weights" not in reply.content and not contents.has_prototypes(reply) for reply in replies)


@pytest.mark.parametrize("algorithm", METHODS)
def test_a_reply_that_is_not_finite_or_does_not_fit_is_dropped(algorithm: str, tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if reply.metadata.message_type == "train" and number == 2 and partition < 2:
            has_prototypes = contents.has_prototypes(reply)
            arrays: Any = reply.content["header" if has_prototypes else "weights"]
            values = contents.vectors(reply) if has_prototypes else arrays["head.weight"].numpy().copy()
            if partition == 0:
                values[0, 0] = np.nan
            else:
                values = values[:, :-1].copy()
            if has_prototypes:
                contents.put_vectors(reply, values)
            else:
                arrays["head.weight"] = Array(values)
        return reply

    run_federation(f"algorithm={algorithm} {SMALL} federation.rounds=3", str(tmp_path / "run"), spoil=spoil)
    rows = rows_of(tmp_path / "run")
    assert [failure["partition"] for failure in rows[1]["failures"]] == [0, 1]
    assert "finite" in rows[1]["failures"][0]["reason"]
    assert "needed" in rows[1]["failures"][1]["reason"]
    assert not rows[2]["failures"]
