"""Partition schemes for any labels, sizes and seeds: disjoint, complete and seeded, or one line with the reason."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from task.data.partition import Dirichlet, Given, Iid, Pathological
from task.data.scheme import DrawnPartition
from task.data.shares import dirichlet_sizes, train_test
from task.seeding import stream
from tests.properties.attempts import attempt

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=7).filter(lambda counts: sum(counts) >= 1)
COMMON: dict[str, Any] = {
    "test_fraction": st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.99]),
    "stratify": st.booleans(),
    "max_samples": st.one_of(st.none(), st.integers(1, 50)),
    "pool": st.sampled_from(["all", "train"]),
}
SCHEMES = st.one_of(
    st.builds(Iid, **COMMON),
    st.builds(
        Pathological,
        classes_per_client=st.integers(1, 9),
        balanced=st.booleans(),
        drop_leftover=st.booleans(),
        **COMMON,
    ),
    st.builds(
        Dirichlet,
        alpha=st.sampled_from([1e-300, 1e-9, 0.01, 0.1, 1.0, 1e6, 1e300]),
        min_size=st.one_of(st.none(), st.integers(0, 20)),
        max_attempts=st.integers(1, 30),
        **COMMON,
    ),
)


@settings(max_examples=250, deadline=None)
@given(scheme=SCHEMES, counts=COUNTS, num_clients=st.integers(1, 25), seed=st.integers(0, 2**31 - 1))
def test_any_division_is_disjoint_complete_and_seeded_or_says_why_not(
    scheme: DrawnPartition, counts: list[int], num_clients: int, seed: int
) -> None:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(counts)), counts))
    is_test = np.arange(len(labels)) % 5 == 0
    splits, refusal = attempt(lambda: scheme.split(labels, len(counts), num_clients, seed, None, is_test))
    if splits is None:
        assert refusal.startswith(("partition.", "federation."))
        return
    assert len(splits) == num_clients
    every = np.concatenate([part for split in splits for part in (split.train, split.test)])
    assert len(every) == len(set(every.tolist()))
    pool = np.flatnonzero(~is_test) if scheme.pool == "train" else np.arange(len(labels))
    wanted = len(pool) if scheme.max_samples is None else min(len(pool), scheme.max_samples)
    assert set(every.tolist()) <= set(pool.tolist())
    if not (isinstance(scheme, Pathological) and scheme.drop_leftover):
        assert len(every) == wanted
    for split in splits:
        size = len(split.train) + len(split.test)
        assert (len(split.test) > 0) == (size >= 2 and scheme.test_fraction > 0)
        assert (len(split.train) > 0) == (size > 0)
        if isinstance(scheme, Dirichlet) and scheme.min_size is not None:
            assert size >= scheme.min_size
    again = scheme.split(labels, len(counts), num_clients, seed, None, is_test)
    for one, two in zip(splits, again, strict=True):
        assert one.train.tolist() == two.train.tolist()
        assert one.test.tolist() == two.test.tolist()


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(0, 1000), min_size=1, max_size=10).filter(any),
    num_clients=st.integers(1, 200),
    alpha=st.floats(1e-300, 1e300),
    seed=st.integers(0, 99),
)
def test_dirichlet_sizes_are_whole_not_negative_and_add_up(
    counts: list[int], num_clients: int, alpha: float, seed: int
) -> None:
    sizes = dirichlet_sizes(np.array(counts), num_clients, alpha, np.random.default_rng(seed))
    assert sizes.shape == (len(counts), num_clients)
    assert sizes.min() >= 0
    assert sizes.sum(axis=1).tolist() == counts


@settings(max_examples=100, deadline=None)
@given(n=st.integers(0, 60), fraction=st.floats(0, 0.999), stratify=st.booleans(), seed=st.integers(0, 9))
def test_train_and_test_are_what_a_client_holds(n: int, fraction: float, stratify: bool, seed: int) -> None:
    labels = np.arange(100) % 7
    share = np.arange(0, 100)[:n]
    split = train_test(share, labels, fraction, stratify, stream(seed, "x"))
    assert sorted([*split.train, *split.test]) == share.tolist()
    assert len(split.train) >= min(n, 1)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6), more=st.integers(1, 3))
def test_a_given_division_stays_as_it_is(sizes: list[tuple[int, int]], more: int) -> None:
    bounds = np.cumsum([size for pair in sizes for size in pair])
    parts = np.split(np.arange(bounds[-1]), bounds[:-1])
    given_parts = tuple(zip(parts[::2], parts[1::2], strict=True))
    labels = np.zeros(bounds[-1], np.int64)
    splits = Given().split(labels, 1, len(sizes), 0, given_parts)
    for split, (train, test) in zip(splits, given_parts, strict=True):
        assert split.train.tolist() == train.tolist()
        assert split.test.tolist() == test.tolist()
    with pytest.raises(ValueError, match=r"federation\.num_clients: must be"):
        Given().split(labels, 1, len(sizes) + more, 0, given_parts)
