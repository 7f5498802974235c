import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from client_app.trainers.feddistill import FedDistillTrainer
from server_app.strategies.feddistill import FedDistill
from task.messages import Download, PrototypeSet, Upload
from task.methods.feddistill import (
    average_outputs,
    distillation_loss,
    leave_own_out,
    make_targets,
    require_probabilities,
    shared_outputs,
)
from tests import contents
from tests.client_app.test_training import session
from tests.fake_grid import run_federation

CPU = torch.device("cpu")
EVERY = ["probabilities", "softmax_of_mean_logits", "mse_logits", "raw_logits"]
BOUNDED = EVERY[:3]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def probabilities(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).softmax(dim=-1)


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def upload(partition: int, number: int, rows: dict[int, Tensor]) -> Upload:
    return Upload(partition, number, PrototypeSet(torch.tensor(list(rows)), torch.stack(list(rows.values()))))


def test_two_holders_swap_their_outputs_and_a_single_holder_gets_none() -> None:
    one, two, alone = probabilities(3, 3)
    means, holders = average_outputs(torch.stack([one, two, alone]), torch.tensor([0, 0, 2]), 3)
    assert holders.tolist() == [2, 0, 1]
    for own, other in ((one, two), (two, one)):
        own_CC = torch.stack([own, torch.zeros(3), alone])
        targets, known = leave_own_out(means, holders, own_CC, torch.tensor([True, False, True]))
        assert torch.allclose(targets[0], other, atol=1e-6)
        assert known.tolist() == [True, False, False]
    targets, known = leave_own_out(means, holders, torch.zeros(3, 3), torch.zeros(3, dtype=torch.bool))
    assert torch.equal(targets, means)
    assert known.tolist() == [True, False, True]


def test_targets_are_the_mean_of_all_others_and_rows_of_probabilities() -> None:
    sent = probabilities(6, 4)
    means, holders = average_outputs(sent, torch.tensor([1] * 6), 4)
    for client in range(6):
        own = torch.zeros(4, 4).index_put((torch.tensor([1]),), sent[client])
        targets, known = leave_own_out(means, holders, own, torch.tensor([False, True, False, False]))
        slow = [sum(float(sent[j, c]) for j in range(6) if j != client) / 5 for c in range(4)]
        row = make_targets(targets, "probabilities")[1]
        assert row.tolist() == pytest.approx(slow, abs=1e-6)
        assert float(row.sum()) == pytest.approx(1)
        assert known.tolist() == [False, True, False, False]


@pytest.mark.parametrize("target", EVERY)
def test_the_loss_against_a_slow_loop(target: str) -> None:
    logits, labels = torch.randn(5, 3, generator=rng()), torch.tensor([0, 1, 2, 1, 1])
    means = probabilities(3, 3) if target == "probabilities" else 2 * torch.randn(3, 3, generator=rng())
    known = torch.tensor([True, True, False])
    total = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        if not known[label]:
            continue  # no other holder: no term, and the mean is still over all samples
        wanted = means[label].tolist()
        if target == "softmax_of_mean_logits":
            wanted = [math.exp(value) / sum(math.exp(v) for v in wanted) for value in wanted]
        if target == "mse_logits":
            total += sum((x - t) ** 2 for x, t in zip(row, wanted, strict=True)) / 3
        else:
            norm = math.log(sum(math.exp(x) for x in row))
            total -= sum(t * (x - norm) for x, t in zip(row, wanted, strict=True))
    found = distillation_loss(logits, labels, make_targets(means, target), known, target)
    assert float(found) == pytest.approx(total / 5, rel=1e-5)


def test_targets_that_are_the_labels_give_plain_cross_entropy() -> None:
    logits, labels = torch.randn(8, 4, generator=rng()), torch.arange(8) % 4
    found = distillation_loss(logits, labels, torch.eye(4), torch.ones(4, dtype=torch.bool), "probabilities")
    assert torch.allclose(found, functional.cross_entropy(logits, labels))


@pytest.mark.parametrize("target", BOUNDED)
def test_the_target_bounds_the_loss_from_below(target: str) -> None:
    """Public code gave the cross-entropy mean logits as its target: the loss fell for ever and ended in NaN."""
    labels, known = torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool)
    means = torch.tensor([[0.2, 0.8], [0.7, 0.3]]) if target == "probabilities" else torch.tensor([[-3.0, 2], [5, -4]])
    for scale in (1e2, 1e4):
        for sign in (1, -1):
            logits = scale * sign * torch.tensor([[1.0, -1.0], [1.0, 1.0]])
            assert float(distillation_loss(logits, labels, make_targets(means, target), known, target)) >= 0
    raw = [
        float(distillation_loss(scale * torch.tensor([[1.0, -1.0]]), labels[:1], means - 4, known, "raw_logits"))
        for scale in (-1e2, -1e4)
    ]
    assert raw[1] < 50 * raw[0] < 0


@pytest.mark.parametrize("target", BOUNDED)
def test_a_large_learning_rate_ends_in_no_nan(target: str, tmp_path: Path) -> None:
    overrides = f"algorithm=feddistill algorithm.client.target={target} train.lr=0.1 partition.max_samples=400"
    grid = run_federation(f"{overrides} federation.rounds=4", str(tmp_path / "run"))
    assert not any(reply.has_error() for reply in grid.replies)
    last = [reply for reply in grid.replies if reply.metadata.message_type == "train"][-4:]
    for reply in last:
        assert math.isfinite(contents.metrics(reply)["distillation_loss"])
        assert 0 <= contents.metrics(reply)["distillation_loss"] < 100
        assert torch.isfinite(torch.from_numpy(contents.vectors(reply))).all()


def test_only_probabilities_are_accepted_where_targets_are_made_of_them() -> None:
    require_probabilities("client 1", probabilities(4, 10))
    require_probabilities("client 1", torch.zeros(0, 10))
    for bad in (torch.tensor([[1.5, -0.5]]), torch.tensor([[0.9, 0.9]])):
        with pytest.raises(ValueError, match="client 1 sent prototypes with values from"):
            require_probabilities("client 1", bad)
        with pytest.raises(ValueError, match="client 7"):
            FedDistill().inspect({}, upload(7, 1, {0: bad[0]}))
        FedDistill(target="mse_logits").inspect({}, upload(7, 1, {0: bad[0]}))


@pytest.mark.parametrize("forget", [False, True])
def test_classes_that_nobody_sent_keep_their_mean_unless_told_to_forget(forget: bool) -> None:
    strategy = FedDistill(forget=forget)
    state = strategy.init_state(3, 512, rng())
    assert strategy.downlink(state).prototypes is None
    a, b, c = probabilities(3, 3)
    state, _ = strategy.absorb(state, [upload(0, 1, {0: a, 1: b}), upload(1, 1, {0: c})], rng(), CPU)
    state, _ = strategy.absorb(state, [upload(1, 2, {0: a})], rng(), CPU)
    shared = strategy.downlink(state)
    assert shared.prototypes is not None
    assert shared.prototypes.counts is not None
    assert shared.weights is not None
    assert shared.prototypes.class_ids.tolist() == ([0] if forget else [0, 1])
    assert shared.prototypes.counts.tolist() == ([1] if forget else [1, 1])
    assert shared.weights["rounds"].tolist() == ([2] if forget else [2, 1])
    assert torch.equal(shared.prototypes.vectors[0], a)
    same, metrics = strategy.absorb(state, [Upload(0, 3)], rng(), CPU)
    assert same is state
    assert metrics == {"outputs_received": 0.0}


def test_order_of_clients_does_not_matter() -> None:
    rows = probabilities(4, 3)
    uploads = [upload(i, 1, {0: rows[i], i % 3: rows[i]} if i % 3 else {0: rows[i]}) for i in range(4)]
    strategy = FedDistill()
    one, _ = strategy.absorb(strategy.init_state(3, 8, rng()), uploads, rng(), CPU)
    two, _ = strategy.absorb(strategy.init_state(3, 8, rng()), uploads[::-1], rng(), CPU)
    assert all(torch.allclose(one[name].float(), two[name].float(), atol=1e-6) for name in one)


@pytest.mark.parametrize(("mean_of_round", "left_out"), [(3, True), (4, False)])
def test_the_own_output_is_left_out_only_of_a_mean_that_holds_it(mean_of_round: int, left_out: bool) -> None:
    of = session(samples=20)
    own, other = probabilities(2, 10)
    of.kept = {"class_ids": torch.tensor([0]), "vectors": own.unsqueeze(0)}
    mean = (own + other) / 2
    received = PrototypeSet(torch.tensor([0]), mean.unsqueeze(0), torch.tensor([2]))
    of.download = Download(received, {"rounds": torch.tensor([mean_of_round])}, round=5, session="s", state_round=3)
    targets, known = FedDistillTrainer()._others(of, received, received.dense(10)[0])
    assert known.tolist() == [True] + [False] * 9
    assert torch.allclose(targets[0], other if left_out else mean, atol=1e-6)
    of.download = replace(of.download, weights=None)
    with pytest.raises(ValueError, match="server sent means without the counts and rounds"):
        FedDistillTrainer().fit(of)


@pytest.mark.parametrize("samples", [0, 1, 11])
def test_tiny_clients_send_what_they_hold(samples: int) -> None:
    of = session(samples=samples)
    of.download = Download(round=1, session="s")
    sent = FedDistillTrainer().fit(of).prototypes
    if not samples:
        assert sent is None
        assert of.kept == {}
        return
    assert sent is not None
    assert sent.vectors.shape == (len(sent.class_ids), 10)  # C numbers for each class held
    assert sorted(set(of.dataset.labels[of.split.train].tolist())) == sent.class_ids.tolist()
    require_probabilities("client 0", sent.vectors)
    assert torch.equal(of.kept["vectors"], sent.vectors)


def test_what_is_sent_is_the_mean_answer_of_the_trained_model() -> None:
    of = session("model=resnet10", samples=30)
    of.download = Download(round=1, session="s")
    sent = FedDistillTrainer().fit(of).prototypes
    assert sent is not None
    of.model.eval()
    answers: dict[int, list[Tensor]] = {}
    with torch.no_grad():
        for images, labels in of.all_train_batches():
            for image, label in zip(images, labels.tolist(), strict=True):
                answers.setdefault(label, []).append(shared_outputs(of.model(image[None]), "probabilities")[0])
    for class_id, row in zip(sent.class_ids.tolist(), sent.vectors, strict=True):
        assert torch.allclose(row, torch.stack(answers[class_id]).mean(dim=0), atol=1e-5)


def test_nothing_is_sent_for_a_test_and_the_first_round_is_plain(tmp_path: Path) -> None:
    grid = run_federation("algorithm=feddistill partition.max_samples=160 federation.rounds=2", str(tmp_path / "run"))
    for message in grid.sent:
        first = message.metadata.group_id == "1"
        has_means = contents.has_prototypes(message)
        assert has_means == (message.metadata.message_type == "train" and not first)
    replies = [reply for reply in grid.replies if reply.metadata.message_type == "train"]
    assert ["distillation_loss" in contents.metrics(reply) for reply in replies] == [False] * 4 + [True] * 4
    assert all(set(contents.prototypes(reply)) == {"class-ids", "vectors"} for reply in replies)


def test_raw_logits_are_warned_about(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    overrides = "algorithm=feddistill algorithm.client.target=raw_logits partition.max_samples=160"
    with caplog.at_level("WARNING", logger="flwr"):
        run_federation(f"{overrides} federation.rounds=1", str(tmp_path / "run"))
    assert any("unbounded below" in record.message for record in caplog.records)
