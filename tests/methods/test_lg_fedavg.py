from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from server_app.strategies.lg_fedavg import LgFedAvg
from task.config import load
from task.messages import Upload
from task.methods.lg_fedavg import average_heads
from task.models.heads import first_head, read_head, replace_head
from task.schema import ModelConfig
from tests.client_app.test_training import session
from tests.fake_grid import FakeGrid, run_federation

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_heads(count: int) -> list[dict[str, Tensor]]:
    return [{"head.weight": torch.randn(3, 4), "head.bias": torch.randn(3)} for _ in range(count)]


def started(overrides: str = "", **settings: str) -> tuple[LgFedAvg, dict[str, Tensor]]:
    strategy = LgFedAvg(**settings)  # type: ignore[arg-type]
    config = load(f"algorithm=lg_fedavg {overrides}")
    strategy.run = SimpleNamespace(config=config)  # type: ignore[assignment]
    return strategy, strategy.init_state(10, config.model.feature_dim, rng())


def test_the_global_head_is_the_mean_weighted_by_samples() -> None:
    heads, sizes = some_heads(3), [1, 2, 5]
    found = average_heads(heads, sizes)
    for c in range(3):
        for k in range(4):
            slow = sum(n / 8 * float(head["head.weight"][c, k]) for n, head in zip(sizes, heads, strict=True))
            assert float(found["head.weight"][c, k]) == pytest.approx(slow, abs=1e-6)


@pytest.mark.parametrize(("weighting", "weights"), [("examples", (0.25, 0.75)), ("uniform", (0.5, 0.5))])
def test_both_weightings(weighting: str, weights: tuple[float, float]) -> None:
    strategy, state = started(weighting=weighting)
    heads = [{name: torch.full_like(tensor, value) for name, tensor in state.items()} for value in (4.0, 8.0)]
    uploads = [Upload(i, 1, weights=head, examples=n) for i, (head, n) in enumerate(zip(heads, (1, 3), strict=True))]
    new, metrics = strategy.absorb(state, uploads, rng(), CPU)
    assert torch.allclose(new["head.bias"], torch.full((10,), 4 * weights[0] + 8 * weights[1]))
    assert metrics == {"heads_received": 2.0}


def test_one_client_keeps_its_head_and_a_round_without_heads_changes_nothing() -> None:
    strategy, state = started()
    own = {name: torch.randn_like(tensor) for name, tensor in state.items()}
    new, _ = strategy.absorb(state, [Upload(3, 1, weights=own, examples=7), Upload(4, 1)], rng(), CPU)
    assert all(torch.equal(new[name], own[name]) for name in own)
    assert strategy.absorb(state, [Upload(4, 1)], rng(), CPU)[0] is state
    assert strategy.absorb(state, [], rng(), CPU)[0] is state


@pytest.mark.parametrize("algorithm", ["lg_fedavg", "fedgen"])
@pytest.mark.parametrize("model", ["res34_htc4", "htfe8_htc4"])
def test_unequal_heads_are_refused_in_one_line(algorithm: str, model: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.heads=.*{algorithm} averages the heads") as caught:
        load(f"algorithm={algorithm} model={model}")
    assert "\n" not in str(caught.value)
    load(f"algorithm={algorithm} model={model} model.heads=[[64],[64]]")


@pytest.mark.parametrize("algorithm", ["lg_fedavg", "fedgen", "feddistill"])
def test_inference_by_prototypes_is_refused(algorithm: str) -> None:
    with pytest.raises(ValueError, match=r"algorithm\.inference='prototype'"):
        load(f"algorithm={algorithm} algorithm.inference=prototype")


def test_uploads_that_do_not_fit_are_refused_with_the_client() -> None:
    strategy, state = started()
    strategy.inspect(state, Upload(2, 1, weights=state, examples=3))
    strategy.inspect(state, Upload(2, 1))  # nothing to train on
    with pytest.raises(ValueError, match=r"client 2 sent weights\.head\.bias as \(3,\)"):
        strategy.inspect(state, Upload(2, 1, weights=state | {"head.bias": torch.zeros(3)}, examples=3))
    with pytest.raises(ValueError, match=r"client 2 .*base"):
        strategy.inspect(state, Upload(2, 1, weights=state | {"base.weight": torch.zeros(3)}, examples=3))
    for size in (None, 0):
        with pytest.raises(ValueError, match="client 2 sent num-examples="):
            strategy.inspect(state, Upload(2, 1, weights=state, examples=size))


def test_heads_with_hidden_layers_are_shared_too() -> None:
    settings = ModelConfig("m", [{}], feature_dim=6, heads=[[5], [5]])
    head = first_head(settings, 3, rng())
    assert {name: tuple(tensor.shape) for name, tensor in head.items()} == {
        "head.0.weight": (5, 6),
        "head.0.bias": (5,),
        "head.2.weight": (3, 5),
        "head.2.bias": (3,),
    }
    assert all(torch.equal(tensor, first_head(settings, 3, rng())[name]) for name, tensor in head.items())


def test_the_head_alone_is_replaced_and_another_one_refused() -> None:
    model = session(samples=10).model
    base = {name: tensor.clone() for name, tensor in model.base.state_dict().items()}
    new = {name: torch.randn_like(tensor) for name, tensor in read_head(model).items()}
    replace_head(model, new)
    assert all(torch.equal(tensor, new[name]) for name, tensor in read_head(model).items())
    assert all(torch.equal(tensor, base[name]) for name, tensor in model.base.state_dict().items())
    with pytest.raises(ValueError, match=r"server sent weights\.head\.weight as \(3, 512\)"):
        replace_head(model, new | {"head.weight": torch.zeros(3, 512)})


def test_parameters_of_the_papers_table() -> None:
    """FedTGP, communication: Cifar100, HtFE8, 20 clients, K = 512."""
    head = first_head(load("model=htfe8").model, 100, rng())
    assert 2 * 20 * sum(tensor.numel() for tensor in head.values()) == 2_052_000


def weights_in(grid: FakeGrid, kind: str, number: int) -> list[dict[str, Tensor]]:
    messages = grid.replies if kind == "reply" else grid.sent
    wanted = "evaluate" if kind == "evaluate" else "train"
    return [
        {name: torch.from_numpy(message.content["weights"][name].numpy()) for name in message.content["weights"]}
        for message in messages
        if message.metadata.message_type == wanted and message.metadata.group_id == str(number)
    ]


def test_everyone_is_tested_with_the_newest_head_and_only_participants_train_on_it(tmp_path: Path) -> None:
    small = "partition.max_samples=160 federation.rounds=2 federation.participation=0.5"
    grid = run_federation(f"algorithm=lg_fedavg {small}", str(tmp_path / "run"))
    sent = {number: weights_in(grid, "train", number) for number in (1, 2)}
    tested = {number: weights_in(grid, "evaluate", number) for number in (1, 2)}
    assert [len(sent[1]), len(tested[1]), len(sent[2]), len(tested[2])] == [2, 4, 2, 4]
    for number in (1, 2):
        replies = [r for r in grid.replies if r.metadata.message_type == "train"][2 * number - 2 : 2 * number]
        sizes = [reply.content["header"]["num-examples"] for reply in replies]
        heads = [torch.from_numpy(reply.content["weights"]["head.weight"].numpy()) for reply in replies]
        mean = sum(n * head for n, head in zip(sizes, heads, strict=True)) / sum(sizes)
        assert all(torch.allclose(each["head.weight"], mean, atol=1e-6) for each in tested[number])
        assert set(replies[0].content["weights"]) == {"head.weight", "head.bias"}
    assert all(torch.equal(each["head.weight"], tested[1][0]["head.weight"]) for each in sent[2])


def test_without_weights_by_size_no_size_is_told(tmp_path: Path) -> None:
    overrides = "algorithm=lg_fedavg algorithm.server.weighting=uniform federation.report_sizes=false"
    grid = run_federation(f"{overrides} partition.max_samples=160 federation.rounds=1", str(tmp_path / "run"))
    assert all("num-examples" not in reply.content["header"] for reply in grid.replies)
