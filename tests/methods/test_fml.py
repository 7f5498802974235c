from typing import Any

import pytest
import torch

from client_app.trainers.fml import FMLTrainer
from client_app.trainers.supervised import SupervisedTrainer
from server_app.strategies.fml import FML
from task.config import load
from task.losses import divergence
from task.messages import Download, Upload
from task.methods.fml import mutual_losses
from task.models.split import weights_of
from tests import oracles
from tests.client_app.test_training import session
from tests.shared_model import BATCHNORM, SMALL_AUXILIARY, run_of

B, C = 6, 5
PAPER: dict[str, Any] = {"alpha": 0.5, "beta": 0.5, "kl": "batchmean", "detach": True}


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    private, shared = (3 * torch.randn(B, C, generator=generator) for _ in range(2))
    return private, shared, torch.randint(C, (B,), generator=generator)


@pytest.mark.parametrize("kl", ["batchmean", "mean"])
@pytest.mark.parametrize("detach", [True, False])
def test_losses_are_those_of_slow_loops(kl: str, detach: bool) -> None:
    private, shared, labels = batch()
    found = mutual_losses(private, shared, labels, alpha=0.3, beta=0.8, kl=kl, detach=detach)  # type: ignore[arg-type]
    one, two, y = private.tolist(), shared.tolist(), labels.tolist()
    scale = 1 if kl == "batchmean" else 1 / C
    expected = [
        0.3 * oracles.cross_entropy(one, y) + 0.7 * scale * oracles.divergence(one, two),
        0.8 * oracles.cross_entropy(two, y) + 0.2 * scale * oracles.divergence(two, one),
    ]
    assert [loss.item() for loss in found] == pytest.approx(expected, rel=1e-5)


def test_the_divergence_is_a_mean_over_samples_and_not_over_classes() -> None:
    # Public code divides by B * C, so that with 100 classes the models teach each other 100 times less.
    generator = torch.Generator().manual_seed(1)
    logits, targets = (torch.randn(10, 100, generator=generator) for _ in range(2))
    found = divergence(logits, targets, "batchmean")
    assert found.item() == pytest.approx(oracles.divergence(logits.tolist(), targets.tolist()), rel=1e-4)
    assert divergence(logits.repeat(3, 1), targets.repeat(3, 1), "batchmean").item() == pytest.approx(found.item())
    assert divergence(logits, targets, "mean").item() == pytest.approx(found.item() / 100)


@pytest.mark.parametrize("detach", [True, False])
def test_only_without_detach_do_gradients_cross(detach: bool) -> None:
    private, shared, labels = batch()
    private.requires_grad_()
    shared.requires_grad_()
    losses = mutual_losses(private, shared, labels, **(PAPER | {"detach": detach}))
    crossed = [
        torch.autograd.grad(losses[0], shared, retain_graph=True, allow_unused=True)[0],
        torch.autograd.grad(losses[1], private, allow_unused=True)[0],
    ]
    assert all(gradient is None if detach else gradient.any() for gradient in crossed)


def test_equal_models_have_nothing_to_teach() -> None:
    private, _, labels = batch()
    found = mutual_losses(private, private, labels, **PAPER)
    half = 0.5 * torch.nn.functional.cross_entropy(private, labels)
    assert torch.allclose(torch.stack(found), half.expand(2), atol=1e-6)


def fitted(trainer: FMLTrainer, overrides: str = "", **changes: Any) -> tuple[Any, Upload]:
    of = session(f"algorithm=fml {overrides}", **changes)
    of.download = Download(weights=run_of(of).auxiliary().state_dict(), round=1, session="test")
    return of, trainer.fit(of)


def test_with_labels_alone_the_private_model_is_that_of_local_training() -> None:
    of, upload = fitted(FMLTrainer(alpha=1.0, beta=1.0))
    local = session("algorithm=local")
    SupervisedTrainer().fit(local)
    assert all(
        torch.equal(a, b) for a, b in zip(weights_of(of.model).values(), weights_of(local.model).values(), strict=True)
    )
    assert upload.examples is None


def test_both_models_learn_and_the_shared_one_is_sent() -> None:
    of, upload = fitted(FMLTrainer(), "train.local_epochs=5 train.lr=0.05")
    first = of.download.weights
    assert upload.weights is not None
    assert set(upload.weights) == set(first)
    assert all(not torch.equal(upload.weights[name], first[name]) for name in first)
    assert max(upload.metrics["loss"], upload.metrics["shared_loss"]) < 1.15  # half of ln 10, and no divergence


@pytest.mark.parametrize("samples", [0, 1, 2, 11])
def test_tiny_clients_with_batchnorm_in_the_shared_model_alone(samples: int) -> None:
    of, upload = fitted(FMLTrainer(weighting="examples"), BATCHNORM, samples=samples)
    assert not of.model.has_batchnorm
    assert (upload.weights is None) == (samples == 0)
    if upload.weights is not None:
        assert upload.examples == samples
        assert all(torch.isfinite(tensor).all() for tensor in upload.weights.values())
        steps = {0: 0, 1: 0, 2: 1, 11: 1}[samples]  # one sample: in eval mode; eleven: one batch, none of one sample
        counters = [tensor for name, tensor in upload.weights.items() if name.endswith("num_batches_tracked")]
        assert counters
        assert all(int(counter) == steps for counter in counters)


def uploads(state: dict[str, torch.Tensor]) -> list[Upload]:
    def changed(value: int) -> dict[str, torch.Tensor]:
        return {name: torch.full_like(tensor, value) for name, tensor in state.items()}

    return [Upload(0, 1, weights=changed(1), examples=10), Upload(1, 1, weights=changed(4), examples=30)]


@pytest.mark.parametrize(("weighting", "mean"), [("uniform", 2.5), ("examples", 3.25)])
def test_the_server_averages_parameters_and_buffers_and_keeps_counters(weighting: Any, mean: float) -> None:
    strategy = FML(weighting)
    strategy.run = run_of(session(f"algorithm=fml {BATCHNORM}"))
    state = strategy.init_state(10, 512, torch.Generator())
    sent = [*uploads(state), Upload(2, 1)]  # the last has no data
    for upload in sent:
        strategy.inspect(state, upload)
    for order in (sent, sent[::-1]):
        found, metrics = strategy.absorb(state, order, torch.Generator(), torch.device("cpu"))
        assert metrics["models_received"] == 2
        for name, tensor in found.items():
            expected = mean if tensor.is_floating_point() else 4
            assert tensor.dtype == state[name].dtype
            assert torch.allclose(tensor, torch.full_like(tensor, expected)), name
    assert any(name.endswith("running_var") for name in found)
    assert strategy.absorb(state, [Upload(2, 1)], torch.Generator(), torch.device("cpu"))[0] is state
    assert strategy.evaluation_downlink(state).weights is None


def test_bad_uploads_are_refused_by_name() -> None:
    strategy = FML("examples")
    strategy.run = run_of(session(f"algorithm=fml {SMALL_AUXILIARY}"))
    state = strategy.init_state(10, 512, torch.Generator())
    bad: dict[str, tuple[dict[str, torch.Tensor], int | None]] = {
        "num-examples": (dict(state), None),
        "head.bias": (state | {"head.bias": torch.zeros(11)}, 5),
        "head.weight": ({name: tensor for name, tensor in state.items() if name != "head.weight"}, 5),
        "extra": (state | {"extra": torch.zeros(1)}, 5),
    }
    for word, (weights, examples) in bad.items():
        with pytest.raises(ValueError, match=f"client 3 sent .*{word}"):
            strategy.inspect(state, Upload(3, 1, weights=weights, examples=examples))


def test_a_client_refuses_another_shared_model() -> None:
    of = session("algorithm=fml")
    of.download = Download(weights={"head.bias": torch.zeros(3)}, round=1, session="test")
    with pytest.raises(ValueError, match="server sent other weights"):
        FMLTrainer().fit(of)


@pytest.mark.parametrize("setting", ["client.alpha=1.5", "client.beta=-1", "client.clip=0", "inference=prototype"])
def test_settings_out_of_range_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=setting.split("=")[0].split(".")[-1]):
        load(f"algorithm=fml algorithm.{setting}")


def test_clipping_bounds_each_models_step() -> None:
    of, upload = fitted(FMLTrainer(clip=1e-3), "train.lr=1.0", samples=10)
    first = of.download.weights
    moved = sum((upload.weights[name] - first[name]).square().sum() for name in first).sqrt()  # type: ignore[index]
    assert moved.item() == pytest.approx(1e-3, rel=1e-2)
