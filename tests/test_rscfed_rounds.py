"""RSCFed round by round: subsets, clients that train twice, and their means, through the apps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file
from torch import Tensor

from server_app.strategies.rscfed import RSCFed
from task.averaging import part, weighted_mean
from task.messages import Upload
from task.methods.rscfed import draw_subsets, sub_consensus
from task.seeding import stream
from tests.client_app.test_training import session
from tests.shared_model import run_of
from tests.stripes import TINY, messages, model_of, rows_of, run, tensors

SCALES: dict[str, Any] = {"labelled_factor": 6.0, "labelled_scale": 100.0, "unlabelled_scale": 10000.0}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def subsets_of(number: int, clients: int = 4, subsets: int = 2, size: int = 2) -> list[list[int]]:
    return draw_subsets(range(clients), subsets, size, stream(0, "sample", number))


def by_hand(replies: dict[int, dict[str, Tensor]], subsets: list[list[int]]) -> dict[str, Tensor]:
    """The mean over subsets of their means; the n-th model of a client belongs to the n-th subset it is in."""
    means, used = [], dict.fromkeys(replies, 0)
    for subset in subsets:
        models = []
        for partition in [each for each in subset if each in replies]:
            models.append(part(f"{used[partition]}/", replies[partition]))
            used[partition] += 1
        own = [partition == 0 for partition in subset if partition in replies]
        if models:
            means.append(sub_consensus(models, [24] * len(models), own, **SCALES)[0])
    return weighted_mean(means, [1.0] * len(means))


def test_a_round_is_the_mean_of_its_subsets_and_takes_as_many_trainings_as_other_methods(tmp_path: Path) -> None:
    grid = run(tmp_path / "run", "rscfed", "federation.rounds=4")
    rows, twice = rows_of(tmp_path / "run"), 0
    for number in range(1, 5):
        subsets = subsets_of(number)
        expected = {
            partition: sum(partition in subset for subset in subsets) for subset in subsets for partition in subset
        }
        assert rows[number - 1]["sampled"] == sorted(expected)
        assert rows[number - 1]["metrics"]["trainings"] == 4
        asked = {p: tensors(m)["trainings"] for n, p, m in messages(grid, "train", sent=True) if n == number}
        assert {partition: int(trainings) for partition, trainings in asked.items()} == expected
        replies = {p: tensors(reply) for n, p, reply in messages(grid, "train") if n == number}
        assert {p: {name.split("/")[0] for name in sent} for p, sent in replies.items()} == {
            p: {str(i) for i in range(count)} for p, count in expected.items()
        }
        twice += sum(count == 2 for count in expected.values())
    assert twice > 0
    found, wanted = model_of(tmp_path / "run"), by_hand(replies, subsets)
    assert all(torch.allclose(found[name].float(), wanted[name].float(), atol=1e-6) for name in wanted)


def test_a_client_keeps_its_teacher_and_momentum_and_no_model(tmp_path: Path) -> None:
    run(tmp_path / "run", "rscfed", "federation.rounds=4")
    kept: dict[int, set[str]] = {}
    for path in (tmp_path / "run" / "client-state").rglob("*.safetensors"):
        names = {name.split("/")[0] for name in load_file(path)}
        kept[int(path.parent.name.split("-")[1])] = names
    assert kept.pop(0) == {"kept.momentum"}
    assert kept
    assert all(names == {"kept.teacher", "kept.momentum", "kept.steps"} for names in kept.values())


def test_a_client_that_has_nothing_to_keep_says_nothing_is_lost(tmp_path: Path) -> None:
    for state in ("disk", "context"):
        overrides = f"train.momentum=0 federation.state={state} federation.rounds=3"
        run(tmp_path / state, "rscfed", overrides)
        assert not any(row["failures"] for row in rows_of(tmp_path / state))
    assert rows_of(tmp_path / "disk") == rows_of(tmp_path / "context")


def test_subsets_without_the_lost_clients_are_averaged_all_the_same(tmp_path: Path) -> None:
    lost = subsets_of(1)[0]

    def spoil(reply: Message, partition: int, number: int) -> Message:
        if partition in lost and reply.metadata.message_type == "train":
            raise OSError("gone")
        return reply

    grid = run(tmp_path / "run", "rscfed", "federation.rounds=1", spoil=spoil)
    replies = {partition: tensors(reply) for _, partition, reply in messages(grid, "train") if not reply.has_error()}
    assert set(replies) == set(subsets_of(1)[1]) - set(lost)
    if replies:
        found, wanted = model_of(tmp_path / "run"), by_hand(replies, subsets_of(1))
        assert all(torch.allclose(found[name].float(), wanted[name].float(), atol=1e-6) for name in wanted)


def test_subsets_have_a_size_that_keeps_the_budget_or_the_given_one(tmp_path: Path) -> None:
    run(tmp_path / "run", "rscfed", "federation.participation=0.5 algorithm.server.subset_size=3 federation.rounds=1")
    assert rows_of(tmp_path / "run")[0]["metrics"]["trainings"] == 6
    with pytest.raises(ValueError, match="subset_size=5 is not allowed: at most 4, all clients"):
        run(tmp_path / "large", "rscfed", "algorithm.server.subset_size=5")


def test_other_models_than_one_for_each_training_are_refused_by_name() -> None:
    strategy = RSCFed()
    strategy.run = run_of(session(f"algorithm=fedavg {TINY}"))
    state = strategy.init_state(10, 16, torch.Generator())
    strategy.drawn = [[1, 3], [2, 3]]
    model = part("model/", state)
    once, twice = ({f"{i}/{name}": tensor for i in range(n) for name, tensor in model.items()} for n in (1, 2))
    strategy.inspect(state, Upload(3, 1, weights=twice, examples=5))
    for partition, weights, examples in ((3, once, 5), (1, twice, 5), (3, twice, None), (1, model, 5)):
        with pytest.raises(ValueError, match=f"client {partition} sent"):
            strategy.inspect(state, Upload(partition, 1, weights=weights, examples=examples))
    kept, metrics = strategy.absorb(state, [Upload(1, 1)], torch.Generator(), torch.device("cpu"))
    assert kept is state
    assert metrics == {"trainings": 0}
