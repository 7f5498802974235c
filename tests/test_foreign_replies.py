"""A foreign reply in a federation: every method, and every lie that we thought of."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from server_app.strategies.base import RoundStrategy
from task.payload import decode_upload
from tests.algorithms import fitting
from tests.lies import EVALUATION, OF_PROTOTYPES, lies_for
from tests.stripes import rows_of, run, same, state_of, summary_of

METHODS = [
    *("fedtgp", "fedproto", "fedproto_official", "feddistill", "lg_fedavg", "fedgen", "fml", "fedkd", "fedkd_official"),
    *("fedavg", "dccfssl", "rscfed"),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("algorithm", METHODS)
def test_every_lie_is_refused_by_name_and_the_others_stay(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round 2 one client tells each lie in turn; then the round goes on without any."""
    found: dict[str, tuple[list[int], list[dict[str, Any]]]] = {}
    honest: list[int] = []
    aggregate = RoundStrategy.aggregate_train

    def probe(self: RoundStrategy, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        contents, sent = [copy.deepcopy(reply.content) for reply in replies], copy.copy(self._sent)
        liar = self.run.roster.node_ids[1]
        if server_round == 2:
            own = contents[[reply.metadata.src_node_id for reply in replies].index(liar)]
            for name, lie in lies_for(own, self.uploads).items():
                for reply, content in zip(replies, contents, strict=True):
                    reply.content = copy.deepcopy(content)
                    if reply.metadata.src_node_id == liar:
                        lie(reply.content)
                self._sent, self._row["failures"] = copy.copy(sent), []
                uploads = self._without_giants(self._collect(replies, "train", decode_upload))
                found[name] = [upload.partition for upload in uploads], self._row["failures"]
            for reply, content in zip(replies, contents, strict=True):
                reply.content = content
            self._sent, self._row["failures"] = sent, []
            honest.extend(self._row["sampled"])
        return aggregate(self, server_round, replies)

    monkeypatch.setattr(RoundStrategy, "aggregate_train", probe)
    run(tmp_path / "run", algorithm, fitting_small(algorithm))
    assert len(found) > 20
    accepted = [name for name, (partitions, _) in found.items() if 1 in partitions]
    assert not accepted
    for name, (partitions, failures) in found.items():
        assert partitions == [partition for partition in honest if partition != 1], (name, failures)
        (failure,) = failures
        assert (failure["partition"], failure["phase"]) == (1, "train")
        assert failure["reason"].startswith("client 1 "), (name, failure)
        assert "nobody foresaw" not in failure["reason"]
        assert "cannot be read" not in failure["reason"], (name, failure)
    assert all(not row["failures"] for row in rows_of(tmp_path / "run"))


def fitting_small(algorithm: str) -> str:
    supervised = "" if "labels=few" in fitting(algorithm) else "labels=all"
    share = " federation.num_clients=4 algorithm.server.subset_size=4" if algorithm == "rscfed" else ""
    return f"partition.max_samples=64 {supervised}{share}"


def test_lies_have_the_effect_of_no_reply(tmp_path: Path) -> None:
    names = iter(["1e6 times as long", "NaN", "class id 999"])
    lies = {"train": [OF_PROTOTYPES[name] for name in names]}

    def spoil(reply: Message, partition: int, number: int) -> Message:
        if reply.metadata.message_type == "train" and partition == 1:
            lies["train"][number - 1](reply.content)
        return reply

    def fail(reply: Message, partition: int, number: int) -> Message:
        if reply.metadata.message_type == "train" and partition == 1:
            raise OSError("no reply")
        return reply

    for name, grid in (("lies", spoil), ("fails", fail)):
        overrides = "federation.rounds=3 federation.evaluate_every=9 partition.max_samples=64 labels=all"
        run(tmp_path / name, "fedtgp", overrides, spoil=grid)
    assert same(state_of(tmp_path / "lies"), state_of(tmp_path / "fails"))
    assert summary_of(tmp_path / "lies")["status"] == "completed with losses"
    assert [len(row["failures"]) for row in rows_of(tmp_path / "lies")] == [1, 1, 1]


def test_a_lie_about_the_test_changes_no_other_accuracy(tmp_path: Path) -> None:
    lies = list(EVALUATION.items())

    def spoil(reply: Message, partition: int, number: int) -> Message:
        if reply.metadata.message_type == "evaluate" and partition == 1:
            lies[number - 1][1](reply.content)
        return reply

    words = f"federation.rounds={len(lies)} partition.max_samples=64 labels=all partition=iid"
    run(tmp_path / "run", "fedtgp", words, spoil=spoil)
    for (name, _), row in zip(lies, rows_of(tmp_path / "run"), strict=True):
        (failure,) = row["failures"]
        assert (failure["partition"], failure["phase"]) == (1, "evaluate"), name
        assert failure["reason"].startswith("client 1 "), name
        assert set(row["client_accuracy"]) == {"0", "2", "3"}, name
        assert 0 <= row["accuracy"] <= 1, name
