import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from client_app.trainers.fedgen import FedGenTrainer
from server_app.strategies.fedgen import FedGen
from task.config import load
from task.messages import Download, Upload
from task.methods.fedgen import (
    GeneratorTraining,
    Teacher,
    diversity_term,
    draw,
    first_generator,
    head_shares,
    label_prior,
    load_generator,
    train_generator,
)
from task.models.heads import first_head
from task.models.split import make_head, parameter_count
from tests.client_app.test_training import session
from tests.fake_grid import run_federation

CPU = torch.device("cpu")
SMALL = "partition.max_samples=160"
QUICK = "algorithm=fedgen algorithm.server.steps=3"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def heads_like(head: nn.Module, count: int) -> list[dict[str, Tensor]]:
    return [
        {f"head.{name}": torch.randn(tensor.shape, generator=rng(i)) for name, tensor in head.state_dict().items()}
        for i in range(count)
    ]


def started(clients: int = 3, **settings: Any) -> tuple[FedGen, dict[str, Tensor]]:
    strategy = FedGen(**{"noise_dim": 4, "hidden_dim": 16, "steps": 5, **settings})
    config = load("algorithm=fedgen model.feature_dim=8")
    nodes = {partition: SimpleNamespace(train_size=None) for partition in range(clients)}
    roster = SimpleNamespace(size=clients, reports=nodes)
    strategy.run = SimpleNamespace(config=config, roster=roster, num_classes=10)  # type: ignore[assignment]
    return strategy, strategy.init_state(10, 8, rng())


def upload(strategy: FedGen, state: dict[str, Tensor], partition: int, number: int, counts: bool = True) -> Upload:
    head = {name: tensor + partition for name, tensor in strategy.evaluation_downlink(state).weights.items()}  # type: ignore[union-attr]
    more = {"label_counts": torch.arange(10) * (partition + 1)} if counts else {}
    return Upload(partition, number, weights=head | more, examples=10 + partition)


def generator_of(weights: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name.startswith("generator.")}


def test_parameters_of_the_papers_table() -> None:
    """FedTGP, communication: Cifar100, HtFE8, 20 clients, K = 512; heads both ways, the generator down."""
    generator = load_generator(first_generator(32, 512, 100, 512, rng()), 100, 512)
    assert generator is not None
    head = sum(tensor.numel() for tensor in first_head(load("model=htfe8").model, 100, rng()).values())
    assert parameter_count(generator) == 331_776
    assert 2 * 20 * head + 20 * parameter_count(generator) == 8_687_520


@pytest.mark.parametrize("hidden", [[], [5]])
def test_the_teacher_against_a_slow_loop(hidden: list[int]) -> None:
    head, sizes = make_head(6, hidden, 4), [1.0, 2.0, 5.0]
    heads, counts = heads_like(head, 3), torch.tensor([[1, 0, 3, 0], [1, 2, 0, 0], [0, 2, 1, 0]])
    feats, labels = torch.randn(7, 6, generator=rng()), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    for by_label in (None, counts):
        found = Teacher.of(head, heads, sizes, by_label, CPU).logits(feats, labels)
        for b, label in enumerate(labels.tolist()):
            slow = torch.zeros(4)
            for i, tensors in enumerate(heads):
                head.load_state_dict({name.removeprefix("head."): tensor for name, tensor in tensors.items()})
                held = counts[:, label].tolist()
                share = sizes[i] / 8 if by_label is None or not sum(held) else held[i] / sum(held)
                slow = slow + share * head(feats[b])
            assert torch.allclose(found[b], slow, atol=1e-5)


def test_linear_heads_teach_like_their_mean() -> None:
    head = make_head(6, [], 4)
    heads, feats = heads_like(head, 3), torch.randn(5, 6, generator=rng())
    head.load_state_dict({n: sum(h[f"head.{n}"] for h in heads) / 3 for n in head.state_dict()})  # type: ignore[misc]
    found = Teacher.of(head, heads, [2.0, 2.0, 2.0], None, CPU).logits(feats, torch.zeros(5, dtype=torch.int64))
    assert torch.allclose(found, head(feats), atol=1e-5)


def test_shares_of_every_label_sum_to_one() -> None:
    shares = head_shares([1, 3], torch.tensor([[4, 0, 0], [4, 5, 0]]), 3)
    assert shares.tolist() == [[0.5, 0.0, 0.25], [0.5, 1.0, 0.75]]
    assert torch.allclose(head_shares([1, 3], None, 3), torch.tensor([[0.25] * 3, [0.75] * 3]))


def test_labels_are_drawn_as_often_as_they_are_held() -> None:
    assert label_prior(None, 4).tolist() == [0.25] * 4
    assert label_prior(torch.zeros(4, dtype=torch.int64), 4).tolist() == [0.25] * 4
    prior = label_prior(torch.tensor([1, 0, 3, 0]), 4)
    noise, labels = draw(prior, 4000, 3, rng())
    shares = torch.bincount(labels, minlength=4) / 4000
    assert shares.tolist() == pytest.approx([0.25, 0, 0.75, 0], abs=0.03)
    assert noise.shape == (4000, 3)
    assert noise.min() >= 0
    assert noise.max() < 1


def test_the_diversity_term_against_a_slow_loop() -> None:
    noise, feats = torch.rand(4, 3, generator=rng()), torch.randn(4, 5, generator=rng())
    total = 0.0
    for i in range(4):
        for j in range(4):
            gap = sum((float(noise[i, z]) - float(noise[j, z])) ** 2 for z in range(3)) / 3
            total += gap * sum(abs(float(feats[i, k]) - float(feats[j, k])) for k in range(5)) / 5
    assert float(diversity_term(noise, feats)) == pytest.approx(float(torch.exp(torch.tensor(-total / 16))))


def test_training_lowers_the_loss_and_goes_on_where_it_stopped() -> None:
    head = make_head(6, [], 4)
    teacher = Teacher.of(head, heads_like(head, 3), [1.0, 1.0, 1.0], None, CPU)
    prior = label_prior(None, 4)

    def train(parts: list[int]) -> tuple[dict[str, Tensor], list[float]]:
        tensors, moments, losses, stream = first_generator(3, 16, 4, 6, rng()), {}, [], rng(1)
        generator = load_generator(tensors, 4, 6)
        assert generator is not None
        for steps in parts:
            moments, loss = train_generator(
                generator, moments, teacher, prior, GeneratorTraining(steps, 10, 0.005, 0.0), stream
            )
            losses.append(loss)
        return generator.state_dict(), losses

    whole, _ = train([60])
    halves, losses = train([30, 30])
    assert losses[1] < 0.7 * losses[0]
    assert all(torch.equal(whole[name], halves[name]) for name in whole)  # the optimiser's state was kept


def test_the_trained_generator_is_kept_and_sent() -> None:
    """Public code trained a copy and dropped it: clients used the first, random generator for ever."""
    strategy, state = started()
    first = generator_of(state)
    assert not generator_of(strategy.downlink(state).weights)  # untrained: not sent
    seen = [first]
    for number in (1, 2, 3):
        uploads = [upload(strategy, state, partition, number, counts=number == 1) for partition in range(3)]
        state, metrics = strategy.absorb(state, uploads, rng(number), CPU)
        seen.append(generator_of(strategy.downlink(state).weights))
        assert metrics["generator_loss"] > 0
        assert int(state["adam.layers.0.weight.step"]) == 5 * number
    for before, after in pairwise(seen):
        assert any(not torch.equal(before[name], after[name]) for name in before)
    assert int(state["trained_rounds"]) == 3
    assert not generator_of(strategy.evaluation_downlink(state).weights)


def test_the_slip_of_the_public_code_can_be_had() -> None:
    strategy, state = started(persist_generator=False)
    first = generator_of(strategy.downlink(state).weights)
    assert first
    state, metrics = strategy.absorb(state, [upload(strategy, state, 0, 1)], rng(), CPU)
    assert "generator_loss" not in metrics
    last = generator_of(strategy.downlink(state).weights)
    assert all(torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("settings", [{}, {"teacher": "labels"}, {"label_prior": "uniform"}, {"weighting": "uniform"}])
def test_partial_participation_keeps_the_table_and_no_heads_change_nothing(settings: dict[str, str]) -> None:
    strategy, state = started(**settings)
    counts = settings.get("label_prior") != "uniform"
    assert strategy.absorb(state, [Upload(1, 1)], rng(), CPU)[0] is state
    state, _ = strategy.absorb(state, [upload(strategy, state, 2, 1, counts)], rng(), CPU)
    state, _ = strategy.absorb(state, [upload(strategy, state, 0, 2, counts), Upload(1, 2)], rng(), CPU)
    shared = strategy.downlink(state).weights
    assert shared is not None
    if counts:
        assert state["label_counts_MC"].sum(dim=1).tolist() == [45, 0, 135]
        assert torch.equal(shared["label_counts"], 4 * torch.arange(10))
    else:
        assert "label_counts" not in shared
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_uploads_that_do_not_fit_are_refused_with_the_client() -> None:
    strategy, state = started()
    good = upload(strategy, state, 1, 1)
    assert good.weights is not None
    strategy.inspect(state, good)
    strategy.inspect(state, Upload(1, 1))
    for bad, words in (
        ({"label_counts": torch.zeros(10, dtype=torch.int64)}, "malformed label_counts"),
        ({"label_counts": -torch.arange(10)}, "malformed label_counts"),
        ({"label_counts": torch.arange(9)}, r"label_counts as \(9,\)"),
        ({"label_counts": torch.ones(10)}, "label_counts as .*float32"),
        ({"head.bias": torch.zeros(3)}, r"weights\.head\.bias"),
        ({"generator.x": torch.zeros(3)}, r"generator\.x"),
    ):
        with pytest.raises(ValueError, match=f"client 1 sent .*{words}"):
            strategy.inspect(state, Upload(1, 1, weights={**good.weights, **bad}, examples=3))
    head = {name: tensor for name, tensor in good.weights.items() if name != "label_counts"}
    with pytest.raises(ValueError, match="client 1 sent no label_counts"):
        strategy.inspect(state, Upload(1, 1, weights=head, examples=3))
    after, _ = strategy.absorb(state, [good], rng(), CPU)
    strategy.inspect(after, Upload(1, 2, weights=head, examples=3))  # known from round 1


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("server.batch_size=1", "at least 2"),
        ("server.lr=0", "above 0"),
        ("server.teacher=labels algorithm.server.label_prior=uniform", "label_prior=empirical"),
        ("client.alpha=-1", "at least 0"),
        ("client.generator_mode=frozen", "eval, train"),
    ],
)
def test_bad_settings_are_refused(setting: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(f"algorithm=fedgen algorithm.{setting}")


def client(samples: int = 20, **more: Tensor) -> Any:
    of = session(samples=samples)
    weights = first_head(of.config.model, 10, rng()) | first_generator(4, 16, 10, 512, rng(1)) | more
    of.download = Download(None, weights, round=2, session="s", state_round=1)
    return of


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("samples", [0, 1, 11, 21])
def test_tiny_clients_in_both_modes_of_the_generator(mode: str, samples: int) -> None:
    of = client(samples, label_counts=torch.arange(10))
    sent = FedGenTrainer(beta=0.5, generator_mode=mode).fit(of)  # type: ignore[arg-type]
    if samples:
        assert sent.weights is not None
        assert set(sent.weights) == {"head.weight", "head.bias"}
        assert set(sent.metrics) == {"loss", "generated_loss", "latent_loss"}
        assert sent.examples == samples
    else:
        assert sent.weights is None


def test_generated_features_train_the_head_alone() -> None:
    of = client()
    trainer = FedGenTrainer()
    trainer.take_up_head(of)
    terms = trainer._extra(of)(torch.zeros(2, 10), torch.tensor([0, 1]))
    terms["generated_loss"].backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in of.model.base.parameters())
    assert all(parameter.grad is not None for parameter in of.model.head.parameters())


def test_a_generator_that_does_not_fit_is_an_error_of_the_server() -> None:
    for name, bad in (("generator.layers.0.weight", torch.zeros(16, 9)), ("generator.layers.3.bias", torch.zeros(3))):
        with pytest.raises(ValueError, match="server sent"):
            FedGenTrainer().fit(client(**{name: bad}))


def test_weight_zero_is_lg_fedavg(tmp_path: Path) -> None:
    for name, overrides in (("lg_fedavg", "algorithm=lg_fedavg"), ("fedgen", f"{QUICK} algorithm.client.alpha=0.0")):
        run_federation(f"{overrides} {SMALL} federation.rounds=3", str(tmp_path / name))
    one, two = (
        [json.loads(line)["client_accuracy"] for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        for name in ("lg_fedavg", "fedgen")
    )
    assert one == two


def test_counts_travel_once_and_the_generator_from_the_second_round_on(tmp_path: Path) -> None:
    overrides = f"{QUICK} {SMALL} federation.rounds=4 federation.participation=0.5"
    grid = run_federation(overrides, str(tmp_path / "run"))
    told: set[int] = set()
    for reply in grid.replies:
        if reply.metadata.message_type == "train":
            partition = reply.content["header"]["partition"]
            assert ("label_counts" in reply.content["weights"]) == (partition not in told)
            told.add(partition)
    for message in grid.sent:
        if message.metadata.message_type != "query":
            trained = message.metadata.message_type == "train" and message.metadata.group_id != "1"
            assert any(name.startswith("generator") for name in message.content["weights"]) == trained
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert ["train_generated_loss" in row["metrics"] for row in rows] == [False, True, True, True]
    private = run_federation(
        f"{overrides} algorithm.server.label_prior=uniform algorithm.server.weighting=uniform",
        str(tmp_path / "private"),
    )
    replies = [reply for reply in private.replies if reply.metadata.message_type == "train"]
    assert all(set(reply.content["weights"]) == {"head.weight", "head.bias"} for reply in replies)
    assert all("num-examples" not in reply.content["header"] for reply in replies)
