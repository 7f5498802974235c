import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from task.averaging import weighted_mean
from task.methods.rscfed import (
    consistency_loss,
    distance,
    draw_subsets,
    sharpen,
    sub_consensus,
    teacher_decay,
    update_teacher,
)
from task.seeding import stream
from tests import oracles

torch.set_num_threads(1)
TEN: dict[str, Any] = {"labelled_factor": 6.0, "labelled_scale": 10.0, "unlabelled_scale": 10.0}
SCALARS = [{"w": torch.tensor(value, dtype=torch.float64)} for value in (1.0, 2.0, 4.0)]
SIZES = [100, 100, 50]


def test_sharpening_of_three_probabilities() -> None:
    found = sharpen(torch.tensor([[0.6, 0.3, 0.1]]))
    assert found[0].tolist() == pytest.approx([0.782609, 0.195652, 0.021739], abs=5e-7)
    assert torch.equal(sharpen(torch.tensor([[0.5, 0.5]]), 1.0), torch.tensor([[0.5, 0.5]]))


def test_a_subset_with_a_labelled_client() -> None:
    model, betas = sub_consensus(SCALARS, SIZES, [True, False, False], **TEN)
    assert betas == pytest.approx([0.965912, 0.025951, 0.008137], abs=5e-7)
    assert model["w"].item() == pytest.approx(1.050362, abs=2e-6)


def test_a_subset_without_a_labelled_client() -> None:
    model, betas = sub_consensus(SCALARS, SIZES, [False] * 3, **TEN)
    assert betas == pytest.approx([0.403946, 0.446429, 0.149625], abs=5e-7)
    assert model["w"].item() == pytest.approx(1.895305, abs=2e-6)


def test_each_kind_of_subset_has_a_scale_of_its_own() -> None:
    other = TEN | {"unlabelled_scale": 0.0}
    assert sub_consensus(SCALARS, SIZES, [False] * 3, **other)[1] == pytest.approx([0.4, 0.4, 0.2])
    labelled = [True, False, False]
    assert sub_consensus(SCALARS, SIZES, labelled, **other)[1] == sub_consensus(SCALARS, SIZES, labelled, **TEN)[1]


def test_distances_however_large_give_weights() -> None:
    # no model is the mean, so that exp(-s D / N) is 0 for all three: the nearest must win, without division by 0
    huge = TEN | {"unlabelled_scale": 1e8}
    model, betas = sub_consensus(SCALARS, [100] * 3, [False] * 3, **huge)
    assert betas == [0, 1, 0]
    assert model["w"].item() == 2


def slow_sub_consensus(
    models: list[list[list[float]]], sizes: list[int], labelled: list[bool], lam: float, scale: float
) -> tuple[list[list[float]], list[float]]:
    """The formulas word by word; a model is a list of tensors, a tensor a list of numbers."""
    f = [n * (lam if own else 1) for n, own in zip(sizes, labelled, strict=True)]
    f = [value / sum(f) for value in f]

    def mixed(weights: list[float]) -> list[list[float]]:
        return [
            [sum(w * model[k][j] for w, model in zip(weights, models, strict=True)) for j in range(len(models[0][k]))]
            for k in range(len(models[0]))
        ]

    mean, u = mixed(f), []
    for i, model in enumerate(models):
        d = sum(oracles.distance(one, two) for one, two in zip(model, mean, strict=True))
        u.append(f[i] * math.exp(-scale * d / sizes[i]) * (lam if labelled[i] else 1))
    beta = [value / sum(u) for value in u]
    return mixed(beta), beta


@pytest.mark.parametrize("labelled", [[False, True, False, True], [False] * 4])
def test_sub_consensus_is_that_of_a_slow_loop(labelled: list[bool]) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes, sizes = {"a": (2, 3), "b": (4,), "c": (1,)}, [30, 7, 120, 55]
    states = [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        for _ in sizes
    ]
    settings = {"labelled_factor": 3.0, "labelled_scale": 4.0, "unlabelled_scale": 9.0}
    model, betas = sub_consensus(states, sizes, labelled, **settings)
    plain = [[tensor.flatten().tolist() for tensor in state.values()] for state in states]
    expected, weights = slow_sub_consensus(plain, sizes, labelled, 3.0, 4.0 if any(labelled) else 9.0)
    assert betas == pytest.approx(weights, rel=1e-5)
    for tensor, row in zip(model.values(), expected, strict=True):
        assert tensor.flatten().tolist() == pytest.approx(row, rel=1e-5, abs=1e-6)


def test_the_distance_sums_norms_of_tensors_and_leaves_counters_out() -> None:
    one = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[0.0], [2.0]]), "n": torch.tensor(7)}
    other = {"a": torch.zeros(2), "b": torch.zeros(2, 1), "n": torch.tensor(900)}
    assert distance(one, other) == pytest.approx(5 + 2)


def test_counters_come_from_the_model_that_counts_most() -> None:
    states = [{"w": torch.tensor(float(i)), "n": torch.tensor(count)} for i, count in enumerate((9, 4))]
    model, betas = sub_consensus(states, [1, 5], [False, False], **TEN)
    assert betas[1] > betas[0]
    assert model["n"].dtype == torch.int64
    assert int(model["n"]) == 4


def test_consistency_is_that_of_a_slow_loop_and_a_short_batch_counts_less() -> None:
    generator = torch.Generator().manual_seed(2)
    student, teacher = (torch.randn(5, 4, generator=generator) for _ in range(2))
    total = 0.0
    for own, other in zip(student.tolist(), teacher.tolist(), strict=True):
        g = [math.exp(value) for value in oracles.log_softmax(other)]
        p = [math.exp(value) for value in oracles.log_softmax(own)]
        total += sum((p[k] - g[k] ** 2 / sum(value**2 for value in g)) ** 2 for k in range(4))
    assert consistency_loss(student, teacher, 5).item() == pytest.approx(total / 5, rel=1e-5)
    assert consistency_loss(student, teacher, 64).item() == pytest.approx(total / 64, rel=1e-5)


def test_only_the_student_learns_from_consistency() -> None:
    student, teacher = torch.tensor([[1.0, 0]], requires_grad=True), torch.tensor([[0.0, 1]], requires_grad=True)
    consistency_loss(student, teacher, 1).backward()  # type: ignore[no-untyped-call]
    assert teacher.grad is None
    assert student.grad is not None
    assert student.grad[0, 0] > 0 > student.grad[0, 1]


def test_the_decay_rises_to_its_limit() -> None:
    assert [teacher_decay(step) for step in (0, 1, 3)] == [0, 0.5, 0.75]
    assert teacher_decay(998) == pytest.approx(1 - 1 / 999)
    assert teacher_decay(10**6) == 0.999


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    pair = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    pair[1](torch.randn(8, 2))
    return pair[0], pair[1]


def test_at_the_first_step_the_teacher_becomes_the_student() -> None:
    teacher, student = networks()
    update_teacher(teacher, student, 0)
    assert all(
        torch.equal(a, b) for a, b in zip(teacher.state_dict().values(), student.state_dict().values(), strict=True)
    )


def test_later_the_teacher_follows_slowly_and_may_keep_its_buffers() -> None:
    teacher, student = networks()
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    learned = student.state_dict()
    update_teacher(teacher, student, 9, copy_buffers=False)
    for name, tensor in teacher.named_parameters():
        assert torch.allclose(tensor, 0.9 * before[name] + 0.1 * learned[name], atol=1e-6)
        assert tensor.requires_grad
    assert all(torch.equal(buffer, before[name]) for name, buffer in teacher.named_buffers())
    update_teacher(teacher, student, 9)
    assert all(torch.equal(buffer, learned[name]) for name, buffer in teacher.named_buffers())


def test_subsets_are_drawn_from_a_named_stream() -> None:
    partitions = [3, 5, 8, 9, 12, 20]

    def draw(number: int) -> list[list[int]]:
        return draw_subsets(partitions, 4, 3, stream(7, "sample", number))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    for subset in draw(1):
        assert len(set(subset)) == 3
        assert subset == sorted(subset)
        assert set(subset) <= set(partitions)
    many = [one for each in draw_subsets(partitions, 3000, 2, stream(1, "x")) for one in each]
    assert all(many.count(partition) == pytest.approx(1000, abs=120) for partition in partitions)
    assert draw_subsets(partitions, 1, 6, stream(0, "x")) == [partitions]


@pytest.mark.parametrize("size", [0, 7])
def test_subsets_of_impossible_size_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"subsets of {size} clients cannot be drawn from 6"):
        draw_subsets(range(6), 1, size, stream(0, "x"))


def test_the_global_model_is_the_plain_mean_of_the_subsets() -> None:
    models: list[dict[str, Tensor]] = [{"w": torch.tensor(value)} for value in (1.0, 2.0, 6.0)]
    assert weighted_mean(models, [1.0] * 3)["w"].item() == pytest.approx(3)
