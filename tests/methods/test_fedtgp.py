import math

import pytest
import torch

from task.contrastive_gradient import Targets, contrastive_gradient
from task.methods.fedtgp import (
    PrototypeNetwork,
    ServerTraining,
    adaptive_margin,
    centroids,
    contrastive_loss,
    train_prototypes,
)
from tests import oracles


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def training(**changes: object) -> ServerTraining:
    settings: dict[str, object] = {
        "epochs": 5,
        "batch_size": None,
        "optimizer": "adamw",
        "lr": 0.01,
        "schedule": "constant",
    }
    return ServerTraining(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("margin", [0.0, 0.7, 5.0])
def test_loss_is_that_of_a_slow_loop(margin: float) -> None:
    received, protos, classes = torch.randn(7, 5), torch.randn(4, 5), [0, 1, 1, 3, 2, 0, 3]
    found = contrastive_loss(received, torch.tensor(classes), protos, margin)
    assert found.item() == pytest.approx(
        oracles.contrastive_loss(received.tolist(), classes, protos.tolist(), margin), rel=1e-5
    )


def test_hand_computed_two_classes_two_clients() -> None:
    # Client A sends class 0 at 0 and class 1 at 4, client B class 0 at 1; globals at 0 and 3; margin 2.
    received, protos = torch.tensor([[0.0], [4.0], [1.0]]), torch.tensor([[0.0], [3.0]])
    terms = [math.log1p(math.exp(2.0 - 3.0)), math.log1p(math.exp(3.0 - 4.0)), math.log1p(math.exp(3.0 - 2.0))]
    found = contrastive_loss(received, torch.tensor([0, 1, 0]), protos, 2.0)
    assert found.item() == pytest.approx(sum(terms) / 3, rel=1e-6)


def test_margin_zero_is_the_plain_contrastive_loss() -> None:
    received, protos, classes = torch.randn(6, 4), torch.randn(3, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    plain = torch.nn.functional.cross_entropy(-torch.cdist(received, protos), classes)
    assert torch.allclose(contrastive_loss(received, classes, protos, 0.0), plain, atol=1e-5)


def test_margin_rules_on_a_line() -> None:
    line = torch.tensor([[0.0], [1.0], [10.0]])
    assert adaptive_margin(line, "max_pair", 100.0) == 10.0
    assert adaptive_margin(line, "max_of_min", 100.0) == 9.0
    assert adaptive_margin(line, "max_pair", 4.0) == 4.0
    for rule in ("max_pair", "max_of_min"):
        assert adaptive_margin(line[:1], rule, 100.0) == 0.0
        assert adaptive_margin(line[:0], rule, 100.0) == 0.0


def test_margin_rules_agree_with_loops() -> None:
    points = torch.randn(6, 3)
    assert adaptive_margin(points, "max_pair", 1e9) == pytest.approx(oracles.max_pair(points.tolist()), rel=1e-5)
    assert adaptive_margin(points, "max_of_min", 1e9) == pytest.approx(oracles.max_of_min(points.tolist()), rel=1e-5)


def test_centroids_are_unweighted_means_of_the_classes_received() -> None:
    received = torch.tensor([[0.0, 0.0], [2.0, 4.0], [9.0, 9.0]])
    points, ids = centroids(received, torch.tensor([5, 5, 1]))
    assert ids.tolist() == [1, 5]
    assert points.tolist() == [[9.0, 9.0], [1.0, 2.0]]


def test_zero_distance_trains_with_finite_numbers() -> None:
    network = PrototypeNetwork(3, 512, use_network=False, generator=generator())
    received = network().detach().clone()
    loss = train_prototypes(network, received, torch.arange(3), 1.0, training(), generator())
    assert math.isfinite(loss)
    assert torch.isfinite(network()).all()


def test_no_epochs_change_nothing() -> None:
    network = PrototypeNetwork(3, 8, use_network=False, generator=generator())
    before = network().detach().clone()
    train_prototypes(network, torch.randn(4, 8), torch.tensor([0, 1, 2, 0]), 1.0, training(epochs=0), generator())
    assert torch.equal(network(), before)


@pytest.mark.parametrize("changes", [{}, {"optimizer": "sgd", "batch_size": 2}, {"schedule": "cosine"}])
def test_training_lowers_the_loss_and_is_reproducible(changes: dict[str, object]) -> None:
    received, classes = torch.randn(9, 16, generator=generator()), torch.arange(9) % 3
    results = []
    for _ in range(2):
        network = PrototypeNetwork(3, 16, use_network=True, generator=generator())
        first = contrastive_loss(received, classes, network(), 1.0).item()
        last = train_prototypes(network, received, classes, 1.0, training(epochs=60, **changes), generator())
        results.append(last)
        assert last < first
    assert results[0] == results[1]


def test_unseen_classes_are_pushed_away_but_stay_finite() -> None:
    network = PrototypeNetwork(4, 8, use_network=True, generator=generator())
    before = network().detach().clone()
    train_prototypes(network, torch.randn(3, 8), torch.tensor([0, 1, 1]), 2.0, training(epochs=50), generator())
    after = network().detach()
    assert torch.isfinite(after).all()
    assert not torch.equal(after[3], before[3])


@pytest.mark.parametrize(("total", "num_classes"), [(7, 4), (60, 40)], ids=["by differences", "by products"])
@pytest.mark.parametrize("margin", [0.0, 5.0])
def test_written_gradient_is_that_of_autograd(total: int, num_classes: int, margin: float) -> None:
    received = 3 * torch.randn(total, 64, generator=generator())
    classes = torch.arange(total) % num_classes
    beside = received[:num_classes] + 0.5 * torch.randn(num_classes, 64, generator=generator())
    protos = beside.requires_grad_()
    contrastive_loss(received, classes, protos, margin).backward()
    found = contrastive_gradient(Targets.of(received, classes, num_classes, margin), protos.detach())
    assert protos.grad is not None
    assert torch.allclose(found, protos.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("total", [6, 6000], ids=["by differences", "by products"])
@pytest.mark.parametrize("distance", [0.0, 1e-7, 1e-5, 1e-3])
def test_written_gradient_is_right_and_finite_near_a_prototype(total: int, distance: float) -> None:
    # Every prototype received lies beside the global one, in one direction, with norms of about 14.
    protos = 0.6 * torch.randn(3, 512, dtype=torch.float64, generator=generator())
    classes = torch.arange(total) % 3
    received = protos[classes] + torch.eye(512, dtype=torch.float64)[0] * distance
    single = received.float()
    found = contrastive_gradient(Targets.of(single, classes, 3, 1.0), protos.float())
    exact = protos.float().double().requires_grad_()
    contrastive_loss(single.double(), classes, exact, 1.0).backward()
    assert exact.grad is not None
    assert torch.isfinite(found).all()
    assert torch.allclose(found.double(), exact.grad, atol=1e-6 if distance != 1e-7 else 1.0)


@pytest.mark.parametrize("use_network", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_training_is_that_of_torch_optimisers(
    use_network: bool, optimizer: str, batch_size: int | None, schedule: str
) -> None:
    received, classes = torch.randn(10, 16, generator=generator()), torch.arange(10) % 3
    decay = 3.0 if optimizer == "adamw" else 0.0
    changes = {"optimizer": optimizer, "batch_size": batch_size, "schedule": schedule, "epochs": 4}
    changes["weight_decay"] = decay
    networks = [PrototypeNetwork(3, 16, use_network, generator()) for _ in range(2)]
    found = train_prototypes(networks[0], received, classes, 2.0, training(**changes), generator())
    # The plain version: autograd through the loss, torch's optimiser, mini-batches in the same order.
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    plain = kinds[optimizer](networks[1].parameters(), lr=0.01, weight_decay=decay)
    rng, steps = generator(), 4 * (3 if batch_size else 1)
    rows = [r for _ in range(4) for r in (torch.randperm(10, generator=rng).split(4) if batch_size else [slice(None)])]
    for step, chosen in enumerate(rows):
        for group in plain.param_groups:
            group["lr"] = 0.01 * (0.5 * (1 + math.cos(math.pi * step / steps)) if schedule == "cosine" else 1)
        plain.zero_grad()
        contrastive_loss(received[chosen], classes[chosen], networks[1](), 2.0).backward()
        plain.step()
    for one, two in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-5)
    assert found == pytest.approx(contrastive_loss(received, classes, networks[1](), 2.0).item(), rel=1e-4)


@pytest.mark.parametrize("use_network", [True, False])
@pytest.mark.parametrize(("num_classes", "width"), [(3, 3), (3, 8), (10, 512), (200, 512)])
def test_blocks_start_orthogonal_and_of_the_asked_norm(use_network: bool, num_classes: int, width: int) -> None:
    protos = PrototypeNetwork(num_classes, width, use_network, generator(), init_norm=8.0)().detach()
    assert torch.allclose(protos @ protos.T, 64.0 * torch.eye(num_classes), atol=1e-3)
    assert (protos >= 0).all()


@pytest.mark.parametrize(("num_classes", "width"), [(9, 8), (24, 8), (100, 64), (10, 5)])
def test_more_classes_than_coordinates_start_at_least_60_degrees_apart(num_classes: int, width: int) -> None:
    protos = PrototypeNetwork(num_classes, width, True, generator(), init_norm=8.0)().detach()
    products = protos @ protos.T
    assert torch.allclose(products.diagonal(), torch.full((num_classes,), 64.0), atol=1e-3)
    assert (products - products.diagonal().diag()).max() <= 32.001  # cosine 1/2
    assert (protos >= 0).all()


def test_blocks_need_room() -> None:
    with pytest.raises(ValueError, match=r"25 classes need a larger model\.feature_dim than 8"):
        PrototypeNetwork(25, 8, True, generator(), init_norm=8.0)
