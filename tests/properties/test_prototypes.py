"""Prototype functions for any features: against slow loops, and what must hold whatever the numbers are."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from task.losses import class_mean_distance, prototype_cross_entropy, sample_squared_error
from task.messages import PrototypeSet
from task.methods.fedtgp import adaptive_margin, centroids, contrastive_loss
from task.prototypes import class_means, class_sums, means_over, nearest_prototype, pairwise_distance, smallest_gap

EXAMPLES = settings(max_examples=60, deadline=None)
C = 4


@st.composite
def features(draw: Any) -> tuple[Tensor, Tensor]:
    """Draw ``(B, K)`` features and ``(B,)`` labels of C classes; several rows may be the same."""
    rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    scale = draw(st.sampled_from([0.0, 1e-20, 1.0, 1e4]))
    numbers = st.lists(st.floats(-1, 1, width=32), min_size=rows * width, max_size=rows * width)
    labels = draw(st.lists(st.integers(0, C - 1), min_size=rows, max_size=rows))
    return scale * torch.tensor(draw(numbers)).view(rows, width), torch.tensor(labels)


def by_hand(feats_BK: Tensor, labels_B: Tensor) -> list[list[float] | None]:
    """Return the mean of each class by a loop, None of those without a sample."""
    found: list[list[float] | None] = []
    for label in range(C):
        rows = [row for row, other in zip(feats_BK.tolist(), labels_B.tolist(), strict=True) if other == label]
        found.append([sum(column) / len(rows) for column in zip(*rows, strict=True)] if rows else None)
    return found


@EXAMPLES
@given(batch=features(), cut=st.integers(0, 9))
def test_class_means_are_those_of_a_loop_however_the_samples_are_batched(
    batch: tuple[Tensor, Tensor], cut: int
) -> None:
    feats_BK, labels_B = batch
    means_CK, present_C = class_means(feats_BK, labels_B, C)
    parts = [(feats_BK[:cut], labels_B[:cut]), (feats_BK[cut:], labels_B[cut:])]
    batched_CK, counts_C = means_over(parts, C, feats_BK.shape[1])
    for label, wanted in enumerate(by_hand(feats_BK, labels_B)):
        assert bool(present_C[label]) == (wanted is not None) == bool(counts_C[label])
        for means in (means_CK, batched_CK):
            assert means[label].tolist() == pytest.approx(wanted or [0.0] * feats_BK.shape[1], rel=1e-3, abs=1e-3)
    assert int(class_sums(feats_BK, labels_B, C)[1].sum()) == len(labels_B)


@EXAMPLES
@given(batch=features(), known=st.lists(st.booleans(), min_size=C, max_size=C), seed=st.integers(0, 9))
def test_the_nearest_prototype_is_known_and_nearest(batch: tuple[Tensor, Tensor], known: list[bool], seed: int) -> None:
    feats_BK, known_C = batch[0].clamp(-1, 1), torch.tensor(known)
    if not known_C.any():
        return
    protos_CK = torch.randn(C, feats_BK.shape[1], generator=torch.Generator().manual_seed(seed))
    found_B = nearest_prototype(feats_BK, protos_CK, known_C)
    distances_BC = pairwise_distance(feats_BK, protos_CK).masked_fill(~known_C, math.inf)
    assert bool(known_C[found_B].all())
    chosen_B = distances_BC.gather(1, found_B.unsqueeze(1)).squeeze(1)
    assert torch.allclose(chosen_B, distances_BC.min(dim=1).values, atol=1e-3)


@EXAMPLES
@given(batch=features(), known=st.lists(st.booleans(), min_size=C, max_size=C), on_top=st.booleans())
def test_losses_and_gradients_are_finite_also_on_top_of_a_prototype(
    batch: tuple[Tensor, Tensor], known: list[bool], on_top: bool
) -> None:
    feats_BK, labels_B = batch[0].clone().requires_grad_(), batch[1]
    protos_CK = torch.zeros(C, feats_BK.shape[1])
    if on_top:
        protos_CK[labels_B] = feats_BK.detach()
    known_C = torch.tensor(known)
    for loss in (class_mean_distance, sample_squared_error, prototype_cross_entropy):
        value = loss(feats_BK, labels_B, protos_CK, known_C)
        assert math.isfinite(float(value))
        assert float(value) >= -1e-6
        if value.requires_grad:
            [gradient] = torch.autograd.grad(value, feats_BK, allow_unused=True)
            assert gradient is None or bool(torch.isfinite(gradient).all())
        if not known_C[labels_B].any():
            assert float(value) == 0


@EXAMPLES
@given(batch=features(), cap=st.floats(0, 1e4))
def test_margins_are_ordered_bounded_and_do_not_know_the_order_of_clients(
    batch: tuple[Tensor, Tensor], cap: float
) -> None:
    feats_NK, classes_N = batch
    centres, ids = centroids(feats_NK, classes_N)
    wide, narrow = (adaptive_margin(centres, rule, cap) for rule in ("max_pair", "max_of_min"))
    assert 0 <= narrow <= wide + 1e-6 <= cap + 2e-6
    assert ids.tolist() == sorted(set(classes_N.tolist()))
    flipped, _ = centroids(feats_NK.flip(0), classes_N.flip(0))
    assert torch.allclose(centres, flipped, rtol=1e-4, atol=1e-3)
    if len(ids) < 2:
        assert wide == narrow == 0


@EXAMPLES
@given(batch=features(), margin=st.floats(0, 1e3))
def test_the_servers_loss_is_finite_and_grows_with_the_margin(batch: tuple[Tensor, Tensor], margin: float) -> None:
    protos_CK = torch.zeros(C, batch[0].shape[1], requires_grad=True)  # all on one point: the worst start
    loss = contrastive_loss(*batch, protos_CK, margin)
    [gradient] = torch.autograd.grad(loss, protos_CK)
    assert bool(torch.isfinite(gradient).all())
    assert math.isfinite(float(loss))
    assert float(contrastive_loss(*batch, protos_CK, 0.0)) <= float(loss) + 1e-4


@EXAMPLES
@given(batch=features())
def test_a_set_of_prototypes_comes_back_from_its_dense_form(batch: tuple[Tensor, Tensor]) -> None:
    means_CK, counts_C = means_over([batch], C, batch[0].shape[1])
    sent = PrototypeSet.of(means_CK, counts_C, share_counts=True)
    assert sent is not None
    vectors_CK, known_C = sent.dense(C)
    assert torch.equal(vectors_CK, means_CK)
    assert torch.equal(known_C, counts_C > 0)
    assert sent.counts is not None
    assert sent.counts.tolist() == counts_C[counts_C > 0].tolist()
    assert smallest_gap(sent.vectors) >= 0


def test_no_class_gives_no_prototypes() -> None:
    assert PrototypeSet.of(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), share_counts=True) is None
