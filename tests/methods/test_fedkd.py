from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from client_app.session import Session
from client_app.trainers.fedkd import FedKDTrainer
from server_app.strategies.fedkd import FedKD
from task.averaging import labelled, part
from task.config import load
from task.messages import Download, Upload
from task.methods.fedkd import (
    CHANGE,
    MODEL,
    SKETCH,
    Compression,
    apply_change,
    change,
    compress,
    decompress,
    distillation_losses,
)
from tests import oracles
from tests.client_app.test_training import session
from tests.shared_model import BATCHNORM, SMALL_AUXILIARY, run_of

CPU, SOME = torch.device("cpu"), torch.Generator()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decaying(rows: int, columns: int) -> Tensor:
    """A matrix whose singular values fall geometrically, as those of trained layers do."""
    u, s, v = torch.linalg.svd(random(rows, columns, seed=7), full_matrices=False)
    return (u * 0.8 ** torch.arange(len(s))) @ v


def restored(tensor: Tensor, energy: float) -> Tensor:
    return decompress(compress({"w": tensor}, energy, "flat"), {"w": tensor}, "flat", "client 0")["w"]


def size(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("kl", ["batchmean", "mean"])
@pytest.mark.parametrize("least", [1e-6, 50.0])
def test_losses_are_those_of_slow_loops(kl: Any, least: float) -> None:
    teacher, student, features, aligned = random(6, 5), random(6, 5, seed=1), random(6, 4, seed=2), random(6, 4, seed=3)
    labels = [0, 1, 2, 3, 4, 0]
    settings: dict[str, Any] = {"kl": kl, "least_divisor": least, "detach_divisor": False}
    found = distillation_losses(teacher, student, features, aligned, torch.tensor(labels), **settings)
    one, two = teacher.tolist(), student.tolist()
    tasks = [oracles.cross_entropy(logits, labels) for logits in (one, two)]
    hidden = oracles.mean_squared_error(features.tolist(), aligned.tolist())
    scale = 1 if kl == "batchmean" else 1 / 5
    divisor = max(sum(tasks), least)
    distilled = [scale * oracles.divergence(a, b) + hidden for a, b in ((one, two), (two, one))]
    expected = [task + extra / divisor for task, extra in zip(tasks, distilled, strict=True)]
    assert [loss.item() for loss in found] == pytest.approx(expected, rel=1e-5)


def test_two_perfect_models_do_not_divide_by_zero() -> None:
    sure = (200 * torch.eye(3)).requires_grad_()
    features, aligned = random(3, 4), random(3, 4, seed=1).requires_grad_()
    settings: dict[str, Any] = {"kl": "batchmean", "least_divisor": 0.5, "detach_divisor": False}
    losses = distillation_losses(sure, sure.detach(), features, aligned, torch.arange(3), **settings)
    torch.stack(losses).sum().backward()
    assert torch.isfinite(torch.stack(losses)).all()
    assert sure.grad is not None
    assert torch.isfinite(sure.grad).all()


def test_the_divisor_is_pushed_up_unless_it_is_taken_as_given() -> None:
    # Equal outputs: the divergence is 0 and flat, so that what is left is CE + MSE / divisor for both.
    slopes = []
    for given in (True, False):
        logits, features, labels = random(3, 4).requires_grad_(), 3 * random(3, 5), torch.arange(3)
        settings: dict[str, Any] = {"kl": "batchmean", "least_divisor": 1e-6, "detach_divisor": given}
        loss, _ = distillation_losses(logits, logits.detach(), features, -features, labels, **settings)
        slopes.append(torch.autograd.grad(loss, logits)[0])
    task = torch.nn.functional.cross_entropy(logits, labels)
    plain = torch.autograd.grad(task, logits)[0]
    hidden = (2 * features).square().mean()
    assert torch.allclose(slopes[0], plain, atol=1e-6)
    assert torch.allclose(slopes[1], (1 - hidden / (2 * task) ** 2) * plain, atol=1e-5)


@pytest.mark.parametrize("factor", [1e-20, 1e-8, 1e8, 1e15])
def test_matrices_of_any_scale_can_be_compressed(factor: float) -> None:
    matrix = decaying(40, 60) * factor
    assert "w" not in compress({"w": matrix}, 0.95, "flat")
    assert torch.allclose(restored(matrix, 0.999) / factor, matrix / factor, atol=0.05)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (8, 4, 3, 3), (9, 9), (150, 300), (300, 150)])
@pytest.mark.parametrize("energy", [0.5, 0.95, 0.98, 0.9999])
def test_the_rank_is_the_least_that_holds_the_energy(shape: tuple[int, ...], energy: float) -> None:
    matrix = decaying(shape[0], int(np.prod(shape[1:])))
    packed = compress({"w": matrix.reshape(shape)}, energy, "flat")
    values = np.linalg.svd(matrix.numpy(), compute_uv=False).tolist()
    rank, (rows, columns) = oracles.smallest_rank(values, energy), matrix.shape
    if rank * (rows + columns + 1) < matrix.numel():
        assert packed["w/s"].tolist() == pytest.approx(values[:rank], rel=1e-4)
        assert [tuple(packed[f"w/{key}"].shape) for key in "usv"] == [(rows, rank), (rank,), (rank, columns)]
    else:
        assert torch.equal(packed["w"], matrix.reshape(shape))
    held = restored(matrix.reshape(shape), energy).square().sum() / matrix.square().sum()
    assert energy - 1e-5 <= held.item() <= 1 + 1e-5
    u, s, v = np.linalg.svd(matrix.numpy(), full_matrices=False)
    if "w" not in packed:
        best = (u[:, :rank] * s[:rank]) @ v[:rank]
        assert np.allclose(restored(matrix.reshape(shape), energy).reshape(matrix.shape), best, atol=1e-5)


@pytest.mark.parametrize(("matrix", "whole"), [(decaying(150, 300), False), (random(150, 300), True)])
def test_a_large_matrix_of_few_directions_is_not_decomposed_whole(
    monkeypatch: pytest.MonkeyPatch, matrix: Tensor, whole: bool
) -> None:
    eigh, sizes = torch.linalg.eigh, []
    monkeypatch.setattr(torch.linalg, "eigh", lambda values: (sizes.append(len(values)), eigh(values))[1])
    held = restored(matrix, 0.95).square().sum() / matrix.square().sum()
    assert sizes == ([SKETCH, 150] if whole else [SKETCH])
    assert held.item() >= 0.95 - 1e-5


def test_a_matrix_of_rank_one_is_exact() -> None:
    matrix = torch.outer(random(20), random(30, seed=1))
    packed = compress({"w": matrix}, 0.95, "flat")
    assert packed["w/s"].shape == (1,)
    assert torch.allclose(restored(matrix, 0.95), matrix, atol=1e-5)


@pytest.mark.parametrize("shape", [(10, 512), (16, 8, 1, 1), (8, 4, 3, 3), (4, 1, 5, 5)])
@pytest.mark.parametrize("energy", [0.95, 0.98])
def test_no_layer_is_set_to_zero_where_the_public_code_does(shape: tuple[int, ...], energy: float) -> None:
    fresh = random(*shape) / 20
    kept = restored(fresh, energy)
    assert (kept - fresh).square().sum() <= (1 - energy + 1e-5) * fresh.square().sum()
    assert size(compress({"w": fresh}, energy, "flat")) <= fresh.numel()
    rank = oracles.rank_of_the_public_code(np.linalg.svd(random(10, 512).numpy(), compute_uv=False).tolist(), energy)
    assert rank == 0


def test_the_public_codes_compression_can_be_studied() -> None:
    head, kernel = random(10, 512), random(6, 3, 5, 5)
    packed = compress({"head": head, "conv": kernel}, 0.95, "htfllib")
    back = decompress(packed, {"head": head, "conv": kernel}, "htfllib", "client 0")
    assert not back["head"].any()  # rank 0
    slices = np.linalg.svd(kernel.numpy(), full_matrices=False)
    rank = oracles.rank_of_the_public_code(np.sqrt((slices[1] ** 2).sum(axis=(0, 1))).tolist(), 0.95)
    assert packed["conv/s"].shape == (6, 3, rank)
    best = (slices[0][..., :rank] * slices[1][..., None, :rank]) @ slices[2][..., :rank, :]
    assert np.allclose(back["conv"].numpy(), best, atol=1e-5)
    assert sum(packed[f"conv/{key}"].numel() for key in "usv") > kernel.numel()


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 2, 3, 3), (1, 1)])
def test_the_payload_is_never_above_dense_and_full_rank_is_allowed(shape: tuple[int, ...]) -> None:
    tensor = random(*shape)
    for energy in (0.01, 0.5, 0.95, 1.0):
        assert size(compress({"w": tensor}, energy, "flat")) <= tensor.numel()
    assert torch.allclose(restored(tensor, 1.0), tensor, atol=1e-5)


def test_vectors_and_counters_travel_as_they_are_and_zeros_survive() -> None:
    tensors = {"bias": random(5), "count": torch.tensor(7), "scale": torch.tensor(0.5), "none": torch.zeros(6, 8)}
    back = decompress(compress(tensors, 0.95, "flat"), tensors, "flat", "client 0")
    assert list(back) == list(tensors)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_has_diverged_is_sent_as_it_is(value: float) -> None:
    packed = compress({"w": torch.full((4, 9), value)}, 0.95, "flat")
    assert list(packed) == ["w"]


def test_a_change_leads_from_one_state_to_the_other() -> None:
    before, after = ({"w": random(3, 4, seed=s), "n": torch.tensor(s)} for s in (1, 5))
    found = apply_change(before, change(after, before))
    assert torch.allclose(found["w"], after["w"], atol=1e-6)
    assert found["n"].item() == 5
    assert found["n"].data_ptr() != after["n"].data_ptr()  # a checkpoint refuses tensors that share memory


def test_the_energy_rises_in_even_steps_to_its_end() -> None:
    found = [Compression().energy(number, 3) for number in (1, 2, 3, 4)]
    assert found == pytest.approx([0.96, 0.97, 0.98, 0.98])


WANTED = {"w": torch.zeros(4, 3, 2, 2), "b": torch.zeros(4), "n": torch.tensor(0)}


def test_a_decomposition_that_does_not_converge_is_done_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = {"w": decaying(12, 40)}
    expected = decompress(compress(matrix, 0.95, "flat"), matrix, "flat", "client 0")["w"]
    eigh = torch.linalg.eigh

    def only_in_double(values: Tensor) -> Any:
        if values.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return eigh(values)

    monkeypatch.setattr(torch.linalg, "eigh", only_in_double)
    found = decompress(compress(matrix, 0.95, "flat"), matrix, "flat", "client 0")["w"]
    assert torch.allclose(found, expected, atol=1e-5)


GOOD = {"w/u": torch.ones(4, 2), "w/s": torch.ones(2), "w/v": torch.ones(2, 12)} | {"b": WANTED["b"], "n": WANTED["n"]}
BAD: dict[str, tuple[dict[str, Tensor], str]] = {
    "another number of rows": (GOOD | {"w/u": torch.ones(5, 2)}, "weights.w as factors"),
    "another number of columns": (GOOD | {"w/v": torch.ones(2, 11)}, "weights.w as factors"),
    "ranks that differ": (GOOD | {"w/s": torch.ones(1)}, "weights.w as factors"),
    "a scalar": (GOOD | {"w/s": torch.tensor(1.0)}, "weights.w as factors"),
    "rank zero": (GOOD | {"w/u": torch.ones(4, 0), "w/s": torch.ones(0), "w/v": torch.ones(0, 12)}, "as factors"),
    "more than full rank": (
        GOOD | {"w/u": torch.ones(4, 5), "w/s": torch.ones(5), "w/v": torch.ones(5, 12)},
        "weights.w as factors",
    ),
    "whole numbers": (GOOD | {"w/s": torch.ones(2, dtype=torch.int64)}, "weights.w as factors"),
    "a product too large": (GOOD | {"w/u": torch.full((4, 2), 1e30), "w/s": torch.full((2,), 1e30)}, "not finite"),
    "a missing factor": ({name: tensor for name, tensor in GOOD.items() if name != "w/s"}, "w"),
    "both forms": (GOOD | {"w": WANTED["w"]}, "w/"),
    "factors of a vector": (
        {name: tensor for name, tensor in GOOD.items() if name != "b"}
        | {"b/u": torch.ones(4, 1), "b/s": torch.ones(1), "b/v": torch.ones(1, 1)},
        "weights.b as factors",
    ),
    "another shape": (GOOD | {"b": torch.zeros(5)}, "weights.b"),
    "an unknown name": (GOOD | {"z": torch.zeros(1)}, "z"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_malformed_factors_are_refused_by_name(name: str) -> None:
    assert decompress(GOOD, WANTED, "flat", "client 3")["w"].shape == (4, 3, 2, 2)
    weights, word = BAD[name]
    with pytest.raises(ValueError, match="client 3 sent") as caught:
        decompress(weights, WANTED, "flat", "client 3")
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def strategy_of(of: Session, rounds_done: int = 0, **settings: Any) -> FedKD:
    strategy = FedKD(**settings)
    strategy.run = run_of(of, rounds_done)
    return strategy


def opened(overrides: str = SMALL_AUXILIARY, partition: int = 0, **changes: Any) -> Session:
    return session(f"algorithm=fedkd {overrides}", partition, **changes)


def trained(of: Session, trainer: FedKDTrainer, sent: dict[str, Tensor], number: int = 1) -> Upload:
    of.download = Download(weights=sent, round=number, session="test")
    return trainer.fit(of)


@pytest.mark.parametrize("what", ["update", "params"])
def test_three_rounds_of_two_clients_keep_everyone_in_step(what: Any) -> None:
    clients, trainer = [opened(partition=partition) for partition in (0, 1)], FedKDTrainer(what=what)
    strategy = strategy_of(clients[0], what=what)
    state = strategy.init_state(10, 512, SOME)
    for number in (1, 2, 3):
        shared = strategy.downlink(state)
        sent = [strategy.personal(state, partition, shared).weights or {} for partition in (0, 1)]
        kinds = [{name.split("/")[0] + "/" for name in each} for each in sent]
        # Client 1 misses the second round, and gets the whole student in the third.
        change_now = what == "update" and number > 1
        assert kinds == [{CHANGE if change_now else MODEL}, {CHANGE if change_now and number == 2 else MODEL}]
        taking_part = (0,) if number == 2 else (0, 1)
        uploads = [trained(clients[i], trainer, sent[i], number) for i in taking_part]
        shapes = clients[0].auxiliary_shapes()
        student = decompress(part(MODEL, state), shapes, "flat", "server")
        if what == "update":
            for i in taking_part:
                held = part("held/", clients[i].kept)
                assert all(torch.allclose(held[name], student[name], atol=1e-6) for name in shapes), (number, i)
        for upload in uploads:
            strategy.inspect(state, upload)
        state, metrics = strategy.absorb(state, uploads, SOME, CPU)
        assert 0 < metrics["ratio_down"] <= 1
        assert metrics["ratio_up"] < (0.5 if what == "update" else 1.01)  # fresh weights have full rank
        strategy.run.done = number
        strategy.run.state_rounds |= dict.fromkeys(taking_part, number)


def test_with_all_energy_the_server_takes_the_mean_of_the_students() -> None:
    clients, whole = [opened(partition=partition) for partition in (0, 1)], {"energy_start": 1.0, "energy_end": 1.0}
    strategy = strategy_of(clients[0], **whole)
    state = strategy.init_state(10, 512, SOME)
    first = part(MODEL, state)
    uploads = [trained(of, FedKDTrainer(**whole), strategy.downlink(state).weights) for of in clients]  # type: ignore[arg-type]
    after, metrics = strategy.absorb(state, uploads, SOME, CPU)
    shapes = clients[0].auxiliary_shapes()
    changes = [decompress(part(CHANGE, upload.weights or {}), shapes, "flat", "client") for upload in uploads]
    for name, tensor in part(MODEL, after).items():
        mean = first[name] + (changes[0][name] + changes[1][name]) / 2
        assert torch.allclose(tensor, mean, atol=1e-5), name
    assert metrics["energy"] == 1.0
    backwards, _ = strategy.absorb(state, uploads[::-1], SOME, CPU)
    assert all(torch.allclose(backwards[f"{MODEL}{name}"], after[f"{MODEL}{name}"], atol=1e-6) for name in shapes)


def test_a_round_without_students_changes_nothing_and_everyone_gets_the_whole_one() -> None:
    of = opened(samples=0)
    strategy = strategy_of(of)
    state = strategy.init_state(10, 512, SOME) | labelled(CHANGE, {"head.bias": torch.ones(10)})
    upload = trained(of, FedKDTrainer(), strategy.downlink(state).weights)  # type: ignore[arg-type]
    assert upload.weights is None
    assert upload.metrics == {}
    assert len(part("held/", of.kept)) == len(of.auxiliary_shapes())  # it can take up a change all the same
    after, _ = strategy.absorb(state, [upload], SOME, CPU)
    assert after == {name: tensor for name, tensor in state.items() if name.startswith(MODEL)}


@pytest.mark.parametrize("samples", [1, 2, 11])
def test_tiny_clients_with_batchnorm_in_the_student_alone(samples: int) -> None:
    of = opened(BATCHNORM, samples=samples)
    strategy = strategy_of(of)
    state = strategy.init_state(10, 512, SOME)
    upload = trained(of, FedKDTrainer(), strategy.downlink(state).weights)  # type: ignore[arg-type]
    strategy.inspect(state, upload)
    after, _ = strategy.absorb(state, [upload], SOME, CPU)
    student = part(MODEL, after)
    assert all(torch.isfinite(tensor).all() for tensor in student.values())
    assert all(float(tensor.min()) > 0 for name, tensor in student.items() if name.endswith("running_var"))
    counters = [int(tensor) for name, tensor in student.items() if name.endswith("num_batches_tracked")]
    assert counters
    assert set(counters) == {0 if samples == 1 else 1}


def test_a_client_that_holds_nothing_refuses_a_change() -> None:
    of = opened()
    with pytest.raises(ValueError, match="client 0: the server sent a change of a model it never had"):
        trained(of, FedKDTrainer(), {f"{CHANGE}head.bias": torch.zeros(10)})


def test_uploads_of_the_other_kind_are_refused() -> None:
    of = opened()
    strategy = strategy_of(of, what="params")
    state = strategy.init_state(10, 512, SOME)
    upload = trained(of, FedKDTrainer(what="update"), strategy.downlink(state).weights)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"client 0 sent weights.change/.*{MODEL}"):
        strategy.inspect(state, upload)


def test_the_student_has_a_learning_rate_of_its_own_and_the_alignment_stays_private() -> None:
    def changes(rate: float | None) -> tuple[Tensor, Tensor, Upload]:
        of = opened(samples=10)
        state = strategy_of(of).init_state(10, 512, SOME)
        first = next(of.model.parameters()).detach().clone()
        upload = trained(of, FedKDTrainer(student_lr=rate, what="params", energy_start=1.0, energy_end=1.0), state)
        moved = decompress(part(MODEL, upload.weights or {}), of.auxiliary_shapes(), "flat", "client")
        return next(of.model.parameters()) - first, moved["head.bias"] - state[f"{MODEL}head.bias"], upload

    (teacher, student, upload), (same_teacher, slow_student, _) = changes(None), changes(0.001)
    assert torch.allclose(teacher, same_teacher, atol=1e-6)
    assert torch.allclose(slow_student, 0.1 * student, atol=1e-5)
    assert all(name.startswith(MODEL) for name in upload.weights or {})


def test_the_alignment_is_kept_and_goes_on() -> None:
    one, trainer = opened(samples=10), FedKDTrainer()
    strategy = strategy_of(one)
    sent = strategy.downlink(strategy.init_state(10, 512, SOME)).weights or {}
    trained(one, trainer, dict(sent))
    first = one.kept["alignment.weight"].clone()
    two = opened(samples=10)
    two.restore(one.state())
    trained(two, trainer, dict(sent), 2)
    assert not torch.equal(first, two.kept["alignment.weight"])
    assert (first - two.kept["alignment.weight"]).abs().max() < 0.1 * first.abs().max()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("client.what=params", ["algorithm.client.what", "algorithm.server"]),
        ("server.energy_start=0", ["energy_start", "at most 1"]),
        ("server.energy_end=1.1", ["energy_end", "at most 1"]),
        ("client.student_lr=0", ["student_lr", "above 0"]),
        ("client.least_divisor=0", ["least_divisor", "above 0"]),
        ("client.clip=-1", ["clip", "above 0"]),
        ("server.svd=full", ["svd", "flat, htfllib"]),
        ("inference=prototype", ["inference", "head"]),
    ],
)
def test_bad_settings_are_refused(setting: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        load(f"algorithm=fedkd algorithm.{setting}")
    assert all(word in str(caught.value) for word in words), caught.value


def test_one_setting_reaches_both_halves() -> None:
    algorithm = load("algorithm=fedkd algorithm.server.what=params algorithm.server.energy_end=0.99").algorithm
    assert (algorithm.client["what"], algorithm.client["energy_end"]) == ("params", 0.99)
