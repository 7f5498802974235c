"""The losses of DCCFSSL's clients and the samples that make their prototypes."""

import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from task.messages import Download, Expected, PrototypeSet, Upload
from task.methods.dccfssl import (
    LccUnlabelled,
    dual_contrast,
    global_contrast,
    local_contrast,
    prototype_samples,
    representations,
)
from task.payload import decode_download, decode_upload, encode_download, encode_upload
from task.prototypes import means_over
from tests import oracles

torch.set_num_threads(1)
RULES = get_args(LccUnlabelled)
Rows = Sequence[Sequence[float]]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def slow_local(
    first: Rows, second: Rows, labels: Sequence[int], conf: Sequence[float], trusted: Sequence[int], t: float, rule: str
) -> list[float]:
    """L_lcc of each anchor, written from the formula; None of the ``drop`` rule is left out here."""
    z, size = [*first, *second], len(first)
    found = []
    for a in range(2 * size):
        i, weight = a % size, [0.0] * (2 * size)
        for p in range(2 * size):
            j = p % size
            if a != p and i == j:
                weight[p] = 1.0
            elif i != j and labels[i] == labels[j]:
                product, both = conf[i] * conf[j], trusted[i] * trusted[j]
                weight[p] = {"ccssl_push": product * both, "ccssl": product, "hard": both, "drop": both}[rule]
        bottom = math.log(sum(math.exp(dot(z[a], z[k]) / t) for k in range(2 * size) if k != a))
        terms = sum(weight[p] * (dot(z[a], z[p]) / t - bottom) for p in range(2 * size))
        found.append(-terms / sum(weight))
    return found


def slow_supcon(z: Rows, labels: Sequence[int], t: float) -> float:
    """The supervised contrastive loss as its own paper writes it, over all 2B views."""
    total = 0.0
    for a in range(len(z)):
        positives = [p for p in range(len(z)) if p != a and labels[p] == labels[a]]
        bottom = sum(math.exp(dot(z[a], z[k]) / t) for k in range(len(z)) if k != a)
        total -= sum(math.log(math.exp(dot(z[a], z[p]) / t) / bottom) for p in positives) / len(positives)
    return total / len(z)


def local(
    first: Rows,
    second: Rows,
    labels: Sequence[int],
    conf: Sequence[float] | None = None,
    threshold: float = 0.0,
    t: float = 1.0,
    rule: Any = "ccssl_push",
) -> float:
    confidence = torch.tensor(conf or [1.0] * len(labels))
    views = torch.tensor([first, second])
    return local_contrast(views, torch.tensor(labels), confidence, confidence >= threshold, t, rule).item()


EYE = [[1.0, 0.0], [0.0, 1.0]]
FIRST, SECOND = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [[0.6, 0.8], [0.0, 1.0], [0.8, 0.6]]


@pytest.mark.parametrize(
    ("labels", "conf", "threshold", "temperature", "expected"),
    [
        ([0, 1], None, 0.0, 1.0, 0.551445),
        ([0, 1], None, 0.0, 0.5, 0.239545),
        ([0, 0], None, 0.0, 1.0, 1.218111),
        ([0, 0], [0.9, 0.8], 0.0, 1.0, 1.141609),
        ([0, 0], [0.9, 0.8], 0.95, 1.0, 0.551445),
    ],
)
def test_local_contrast_of_two_images(
    labels: list[int], conf: list[float] | None, threshold: float, temperature: float, expected: float
) -> None:
    assert local(EYE, EYE, labels, conf, threshold, temperature) == pytest.approx(expected, abs=1e-6)


def test_local_contrast_of_three_images() -> None:
    anchors = slow_local(FIRST, SECOND, [0, 1, 0], [1.0] * 3, [1] * 3, 1.0, "ccssl_push")
    assert anchors == pytest.approx([1.370874, 1.170874, 1.370874, 1.650899, 1.170874, 1.517566], abs=5e-7)
    assert local(FIRST, SECOND, [0, 1, 0]) == pytest.approx(1.375327, abs=1e-6)
    conf = [1.0, 0.6, 0.96]
    anchors = slow_local(FIRST, SECOND, [0, 1, 0], conf, [1, 0, 1], 1.0, "ccssl_push")
    assert anchors == pytest.approx([1.373614, 1.170874, 1.370874, 1.652543, 1.170874, 1.518296], abs=3e-6)
    assert local(FIRST, SECOND, [0, 1, 0], conf, 0.95) == pytest.approx(1.376179, abs=1e-6)


def batch(seed: int, size: int = 7, width: int = 4, classes: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    views = representations(torch.randn(3, size, width, generator=generator, dtype=torch.float64))
    confidence = torch.rand(size, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (size,), generator=generator)
    return {"z_VBK": views, "labels_B": labels, "confidence_B": confidence, "trusted_B": confidence >= 0.4}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [1.0, 0.07])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_local_contrast_is_that_of_a_slow_loop(rule: Any, temperature: float, size: int) -> None:
    of = batch(size, size)
    strong = of["z_VBK"][1:]
    found = local_contrast(strong, of["labels_B"], of["confidence_B"], of["trusted_B"], temperature, rule)
    trusted = [int(value) for value in of["trusted_B"].tolist()]
    anchors = slow_local(
        strong[0].tolist(),
        strong[1].tolist(),
        of["labels_B"].tolist(),
        of["confidence_B"].tolist(),
        trusted,
        temperature,
        rule,
    )
    kept = [loss for loss, own in zip(anchors, 2 * trusted, strict=True) if own or rule != "drop"]
    assert found.item() == pytest.approx(sum(kept) / max(len(kept), 1), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_with_true_labels_it_is_supervised_contrast(rule: Any) -> None:
    of, ones = batch(5), torch.ones(7)
    strong, labels = of["z_VBK"][1:], of["labels_B"]
    found = local_contrast(strong, labels, ones, ones.bool(), 0.5, rule).item()
    assert found == pytest.approx(slow_supcon(strong.flatten(0, 1).tolist(), 2 * labels.tolist(), 0.5), rel=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_neither_the_order_of_images_nor_that_of_views_matters(rule: Any) -> None:
    of = batch(8)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    rest = [of["labels_B"], of["confidence_B"], of["trusted_B"]]
    strong = of["z_VBK"][1:]
    found = local_contrast(strong, *rest, 0.2, rule)
    for views, fields in ((strong.flip(0), rest), (strong[:, order], [tensor[order] for tensor in rest])):
        assert torch.allclose(local_contrast(views, *fields, 0.2, rule), found, atol=1e-5)


def test_images_that_are_not_trusted_are_contrasted_with_themselves_alone_or_not_at_all() -> None:
    of, never = batch(9), torch.zeros(7, dtype=torch.bool)
    strong, labels, confidence = of["z_VBK"][1:].clone().requires_grad_(), of["labels_B"], of["confidence_B"]
    alone = local_contrast(strong, torch.arange(7), torch.ones(7), ~never, 0.2, "hard")
    for rule in ("ccssl_push", "hard"):
        assert torch.allclose(local_contrast(strong, labels, confidence, never, 0.2, rule), alone)  # type: ignore[arg-type]
    dropped = local_contrast(strong, labels, confidence, never, 0.2, "drop")
    (gradient,) = torch.autograd.grad(dropped, strong)
    assert dropped.item() == 0
    assert not gradient.any()


def slow_global(
    views: Sequence[Rows], labels: Sequence[int], trusted: Sequence[bool], protos: dict[int, Sequence[float]], t: float
) -> float:
    unit = {c: [x / math.sqrt(dot(row, row)) for x in row] for c, row in protos.items()}
    total = 0.0
    for view in views:
        for z, label, counts in zip(view, labels, trusted, strict=True):
            if counts and label in unit:
                total += math.log(sum(math.exp(dot(z, row) / t) for row in unit.values())) - dot(z, unit[label]) / t
    return total / (len(views) * len(labels))


PROTOS = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
BOTH = torch.tensor([True, True])


@pytest.mark.parametrize(
    ("feature", "label", "temperature", "expected"),
    [
        ([1.0, 0.0], 0, 1.0, 0.313262),
        ([1.0, 0.0], 0, 0.5, 0.126928),
        ([1.0, 0.0], 1, 0.07, 14.285715),
        ([3.0, 4.0], 0, 1.0, 0.798139),
    ],
)
def test_global_contrast_of_one_feature(feature: list[float], label: int, temperature: float, expected: float) -> None:
    z = representations(torch.tensor([[feature]]))
    found = global_contrast(z, torch.tensor([label]), torch.tensor([True]), PROTOS, BOTH, temperature)
    assert found.item() == pytest.approx(expected, abs=1.5e-6)


@pytest.mark.parametrize("known", [[True, False], [False, False]])
@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.07, 1e-3])
def test_with_fewer_than_two_prototypes_it_is_exactly_zero(known: list[bool], label: int, temperature: float) -> None:
    z = torch.tensor([[[0.6, 0.8]]], requires_grad=True)
    # what a class without prototype holds does not matter
    protos = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    found = global_contrast(z, torch.tensor([label]), torch.tensor([True]), protos, torch.tensor(known), temperature)
    (gradient,) = torch.autograd.grad(found, z)
    assert found.item() == 0
    assert not gradient.any()


@pytest.mark.parametrize("temperature", [1.0, 0.07])
def test_global_contrast_is_that_of_a_slow_loop(temperature: float) -> None:
    of, known = batch(2, classes=4), torch.tensor([True, False, True, True])
    protos = 3 * torch.randn(4, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    held = {c: row for c, row in enumerate(protos.tolist()) if known[c]}
    assert 1 in of["labels_B"]
    assert not of["trusted_B"].all()
    for views in (of["z_VBK"], of["z_VBK"][1:], of["z_VBK"][:1]):
        found = global_contrast(views, of["labels_B"], of["trusted_B"], protos, known, temperature)
        rows, labels, trusted = views.tolist(), of["labels_B"].tolist(), of["trusted_B"].tolist()
        assert found.item() == pytest.approx(slow_global(rows, labels, trusted, held, temperature), rel=1e-5)


def test_prototypes_get_no_gradient_and_their_length_does_not_matter() -> None:
    of = batch(3, width=2, classes=2)
    protos = PROTOS.clone().requires_grad_()
    z = of["z_VBK"].float().requires_grad_()
    found = global_contrast(z, of["labels_B"], of["trusted_B"], protos, BOTH, 0.5)
    found.backward()  # type: ignore[no-untyped-call]
    assert protos.grad is None
    assert z.grad is not None
    assert z.grad.any()
    assert torch.allclose(global_contrast(z, of["labels_B"], of["trusted_B"], 10 * PROTOS, BOTH, 0.5), found)


def test_representations_have_length_one_and_finite_gradients_at_zero() -> None:
    feats = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0]], requires_grad=True)
    found = representations(feats)
    assert torch.allclose(found, torch.tensor([[0.6, 0.8], [0, 0], [1, 0]]))
    (gradient,) = torch.autograd.grad(found.sum(), feats)
    assert gradient[1].tolist() == [1, 1]  # division by a small constant would give 1e12
    assert gradient[0].tolist() == pytest.approx([0.2 - 0.6 * 0.28, 0.2 - 0.8 * 0.28], abs=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_those_of_finite_differences(rule: Any) -> None:
    of = batch(6, 3)
    protos = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rest = (of["labels_B"], of["confidence_B"], of["trusted_B"], protos, torch.tensor([True, True, False]))

    def total(feats: Tensor) -> Tensor:
        found = dual_contrast(representations(feats), *rest, **(SETTINGS | {"lcc_unlabelled": rule}))
        return torch.stack(list(found.values())).sum()

    assert torch.autograd.gradcheck(total, of["z_VBK"].requires_grad_())


def test_mixed_precision_does_not_blur_similarities() -> None:
    of = batch(1)
    z, labels, confidence = of["z_VBK"].float(), of["labels_B"], of["confidence_B"].float()
    protos, known = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), torch.ones(3, dtype=torch.bool)
    plain = dual_contrast(z, labels, confidence, of["trusted_B"], protos, known, **SETTINGS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = dual_contrast(z, labels, confidence, of["trusted_B"], protos, known, **SETTINGS)
    assert {name: value.item() for name, value in mixed.items()} == {name: v.item() for name, v in plain.items()}


SETTINGS: dict[str, Any] = {
    "lambda_lcc": 1.0,
    "lambda_gcc": 1.0,
    "temperature": 0.5,
    "lcc_unlabelled": "ccssl_push",
    "gcc_views": "strong",
}


def terms(**changes: Any) -> dict[str, float]:
    of, protos = batch(4, classes=2, width=2), PROTOS.double()
    found = dual_contrast(**of, protos_CK=protos, known_C=BOTH, **(SETTINGS | changes))  # type: ignore[arg-type]
    return {name: value.item() for name, value in found.items()}


def test_each_term_is_linear_in_its_weight_and_absent_without_it() -> None:
    one = terms()
    assert set(one) == {"lcc_loss", "gcc_loss"}
    assert terms(lambda_lcc=3.0, lambda_gcc=10.0) == pytest.approx(
        {"lcc_loss": 3 * one["lcc_loss"], "gcc_loss": 10 * one["gcc_loss"]}
    )
    assert terms(lambda_lcc=0.0) == {"gcc_loss": one["gcc_loss"]}
    assert terms(lambda_gcc=0.0) == {"lcc_loss": one["lcc_loss"]}
    assert terms(lambda_lcc=0.0, lambda_gcc=0.0) == {}
    of = batch(4, classes=2, width=2)
    assert set(dual_contrast(**of, protos_CK=None, known_C=None, **SETTINGS)) == {"lcc_loss"}


def test_the_views_of_each_term() -> None:
    of = batch(4, classes=2, width=2)
    z, fields = of["z_VBK"], (of["labels_B"], of["trusted_B"], PROTOS.double(), BOTH, 0.5)
    means = {"weak": z[:1], "strong": z[1:], "all": z}
    for views, chosen in means.items():
        assert terms(gcc_views=views)["gcc_loss"] == pytest.approx(global_contrast(chosen, *fields).item())
    assert len({terms(gcc_views=views)["gcc_loss"] for views in means}) == 3
    rest = (of["labels_B"], of["confidence_B"], of["trusted_B"], 0.5)
    for rule in RULES:
        assert terms(lcc_unlabelled=rule)["lcc_loss"] == pytest.approx(local_contrast(z[1:], *rest, rule).item())


def logits_for(predicted: Sequence[int], probabilities: Sequence[float], classes: int = 2) -> Tensor:
    """Logits whose softmax gives ``predicted`` with these probabilities and shares the rest equally."""
    rows = torch.full((len(predicted), classes), 0.0, dtype=torch.float64)
    for row, c, p in zip(rows, predicted, probabilities, strict=True):
        row.fill_(math.log((1 - p) / (classes - 1)))
        row[c] = math.log(p)
    return rows


def test_authentication_of_a_labelled_client() -> None:
    feats, labels = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]), torch.tensor([0, 0, 1])
    # the confidence does not matter where labels are known
    samples = prototype_samples(feats, logits_for([0, 0, 0], [0.6, 0.99, 0.99]), labels, threshold=0.95)
    means, counts = means_over([samples], 2, 2)
    assert counts.tolist() == [2, 0]
    assert counts.dtype == torch.int64
    assert means.dtype == torch.float32
    assert means.tolist() == [pytest.approx([0.8, 0.4]), [0, 0]]


def test_authentication_of_a_client_without_labels() -> None:
    feats, logits = torch.eye(3), logits_for([0, 0, 1], [0.95, 0.9499, 0.99])
    vectors, classes = prototype_samples(feats, logits, None, threshold=0.95 - 1e-6)
    _, counts = means_over([(vectors, classes)], 2, 3)
    assert counts.tolist() == [1, 1]
    assert torch.equal(vectors, feats[[0, 2]])
    # softmax of (log 3, 0) is 3/4; of (0, 0) exactly 1/2, and a confidence equal to the threshold counts
    half = prototype_samples(torch.ones(1, 3), torch.zeros(1, 2), None, threshold=0.5)
    assert len(half[1]) == 1


def sums_of(parts: Sequence[Tensor], **changes: Any) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    feats, logits = torch.randn(40, 6, generator=generator), 2 * torch.randn(40, 5, generator=generator)
    labels = torch.randint(5, (40,), generator=generator) if changes.pop("labelled", False) else None
    batches = [
        prototype_samples(feats[i], logits[i], None if labels is None else labels[i], threshold=0.6, **changes)
        for i in parts
    ]
    return means_over(batches, 5, 6)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("authenticate", [True, False])
@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_neither_batches_nor_their_order_change_the_prototypes(labelled: bool, authenticate: bool, size: int) -> None:
    settings = {"labelled": labelled, "authenticate": authenticate}
    means, counts = sums_of([torch.arange(40)], **settings)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(size))
    other_means, other_counts = sums_of(order.split(size), **settings)
    assert torch.equal(counts, other_counts)
    assert torch.allclose(means, other_means, atol=1e-6)
    assert (counts.sum() == 40) == (not authenticate)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("authenticate", [True, False])
def test_prototypes_are_those_of_a_slow_loop(labelled: bool, normalise: bool, authenticate: bool) -> None:
    generator = torch.Generator().manual_seed(12)
    feats, logits = torch.randn(30, 3, generator=generator), 2 * torch.randn(30, 4, generator=generator)
    labels = torch.randint(4, (30,), generator=generator)
    groups: dict[int, list[list[float]]] = {c: [] for c in range(4)}
    for feat, row, label in zip(feats.tolist(), logits.tolist(), labels.tolist(), strict=True):
        probabilities = [math.exp(value) for value in oracles.log_softmax(row)]
        predicted = probabilities.index(max(probabilities))
        length = math.sqrt(dot(feat, feat)) if normalise else 1.0
        authentic = predicted == label if labelled else max(probabilities) >= 0.7
        if authentic or not authenticate:
            groups[label if labelled else predicted].append([x / length for x in feat])
    samples = prototype_samples(
        feats,
        logits,
        labels if labelled else None,
        threshold=0.7,
        authenticate=authenticate,
        normalise=normalise,
    )
    means, counts = means_over([samples], 4, 3)
    assert counts.tolist() == [len(groups[c]) for c in range(4)]
    for c, group in groups.items():
        expected = oracles.mean(group) if group else [0.0] * 3
        assert means[c].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_prototypes_and_counts_survive_the_wire_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 3, (100,), generator=generator) * torch.randint(1, 2**30, (100,), generator=generator)
    means = torch.randn(100, 128, generator=generator) * (counts > 0).unsqueeze(1)
    held = counts.nonzero().flatten()
    sent = Upload(4, 2, prototypes=PrototypeSet(held, means[held], counts[held]))
    came = decode_upload(encode_upload(sent), Expected(4, 2, 100, 128)).prototypes
    assert came is not None
    assert came.counts is not None
    vectors, known = came.dense(100)
    assert torch.equal(vectors, means)
    assert torch.equal(known, counts > 0)
    assert torch.equal(torch.zeros(100, dtype=torch.int64).index_put((came.class_ids,), came.counts), counts)
    assert came.counts.sum() == counts.sum()  # A_i
    down = Download(PrototypeSet(held, means[held]), round=3, session="test")
    back = decode_download(encode_download(down), 100, 128).prototypes
    assert back is not None
    assert torch.equal(back.dense(100)[0], means)
    assert torch.equal(back.dense(100)[1], known)
