import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from task.data.partition import Dirichlet, Given, Iid, Pathological
from task.data.shares import balanced_subset, dirichlet_sizes, train_test
from task.seeding import stream

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(lambda counts: sum(counts) >= 12)


def _labels(counts, seed=0):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


def _all(splits):
    return np.concatenate([part for split in splits for part in (split.train, split.test)])


def _schemes(num_classes):
    common = {"test_fraction": st.sampled_from([0.0, 0.1, 0.25, 0.9]), "stratify": st.booleans()}
    k = st.integers(1, num_classes)
    return st.one_of(
        st.builds(Iid, **common),
        st.builds(Pathological, classes_per_client=k, balanced=st.booleans(), **common),
        st.builds(Dirichlet, alpha=st.sampled_from([0.001, 0.1, 1.0, 100.0]), min_size=st.just(0), **common),
    )


@settings(max_examples=150, deadline=None)
@given(st.data(), COUNTS, st.integers(1, 12), st.integers(0, 5))
def test_every_scheme_is_disjoint_complete_and_seeded(data, counts, num_clients, seed):
    scheme = data.draw(_schemes(len(counts)))
    labels = _labels(counts)
    splits = scheme.split(labels, len(counts), num_clients, seed)
    assert len(splits) == num_clients
    assert sorted(_all(splits)) == list(range(len(labels)))
    again = scheme.split(labels, len(counts), num_clients, seed)
    for one, other in zip(splits, again, strict=True):
        assert one.train.dtype == one.test.dtype == np.int64
        np.testing.assert_array_equal(one.train, other.train)
        np.testing.assert_array_equal(one.test, other.test)
        n = len(one.train) + len(one.test)
        assert len(one.train) >= min(n, 1)
        if n >= 2 and scheme.test_fraction > 0:
            assert len(one.test) >= 1


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.integers(1, 60), st.integers(0, 3))
def test_subset_is_as_even_as_the_classes_allow(counts, limit, seed):
    labels = _labels(counts)
    kept = balanced_subset(np.arange(len(labels)), labels, limit, stream(seed, "x"))
    assert len(kept) == len(set(kept.tolist())) == min(limit, len(labels))
    taken = np.bincount(labels[kept], minlength=len(counts))
    for mine, available in zip(taken, counts, strict=True):
        assert mine == available or mine >= taken.max() - 1


def test_seeds_differ():
    labels = _labels([50] * 4)
    for scheme in (Iid(), Pathological(), Dirichlet()):
        one, other = scheme.split(labels, 4, 5, 0), scheme.split(labels, 4, 5, 1)
        assert any(not np.array_equal(a.train, b.train) for a, b in zip(one, other, strict=True))


def test_iid_sizes_differ_by_one_at_most():
    sizes = [len(s.train) + len(s.test) for s in Iid().split(_labels([10, 13]), 2, 4, 0)]
    assert sorted(sizes) == [5, 6, 6, 6]
    with pytest.raises(ValueError, match=r"federation\.num_clients: 3 samples .* 4 clients; lower it to at most 3"):
        Iid().split(_labels([3]), 1, 4, 0)


def test_pathological_groups_as_in_pfllib():
    assert Pathological().holders(10, 20) == [
        [4 * g, 4 * g + 1, 4 * g + 2, 4 * g + 3] for g in range(5) for _ in (0, 1)
    ]


@pytest.mark.parametrize("drop", [False, True])
def test_pathological_places_or_drops_the_last_flowers(drop):
    scheme = Pathological(classes_per_client=10, drop_leftover=drop, balanced=True)
    labels = _labels([40] * 102)
    splits = scheme.split(labels, 102, 20, 0)
    found = set(labels[_all(splits)].tolist())
    assert found == set(range(100 if drop else 102))
    classes = [len(set(labels[np.concatenate([s.train, s.test])].tolist())) for s in splits]
    assert set(classes) == ({10} if drop else {10, 11})


def test_pathological_balance_and_imbalance():
    labels = _labels([400] * 10)
    even = [len(s.train) + len(s.test) for s in Pathological(balanced=True).split(labels, 10, 20, 0)]
    assert even == [200] * 20
    uneven = Pathological().split(labels, 10, 20, 0)
    counts = [np.bincount(labels[np.concatenate([s.train, s.test])], minlength=10) for s in uneven]
    for group in range(5):
        for client in range(4 * group, 4 * group + 3):
            assert all(10 <= n < 100 for n in counts[client][2 * group : 2 * group + 2])
        assert all(n > 100 for n in counts[4 * group + 3][2 * group : 2 * group + 2])


def test_too_many_classes_per_client():
    with pytest.raises(ValueError, match=r"partition\.classes_per_client: must be between 1 and 3"):
        Pathological(classes_per_client=4).split(_labels([5] * 3), 3, 2, 0)


def test_dirichlet_keeps_pfllibs_minimum():
    labels = _labels([500] * 10)
    for seed in range(5):
        sizes = [len(s.train) + len(s.test) for s in Dirichlet().split(labels, 10, 20, seed)]
        assert min(sizes) >= 40
        assert sum(sizes) == 5000


def test_dirichlet_follows_alpha():
    labels = _labels([500] * 10)

    def mean_classes(alpha):
        splits = Dirichlet(alpha=alpha).split(labels, 10, 20, 0)
        return np.mean([len(set(labels[s.train].tolist())) for s in splits])

    assert mean_classes(0.05) < mean_classes(0.5) < mean_classes(100.0) == 10


def test_full_clients_get_no_more():
    counts = np.array([100] * 50)
    for seed in range(20):
        sizes = dirichlet_sizes(counts, 10, 0.01, np.random.default_rng(seed))
        np.testing.assert_array_equal(sizes.sum(axis=1), counts)
        before = np.cumsum(sizes, axis=0) - sizes
        assert not sizes[before >= counts.sum() / 10].any()


@pytest.mark.parametrize(("min_size", "counts"), [(None, [200] * 10), (10, [223] * 8 + [216, 0]), (11, [200] * 10)])
def test_impossible_dirichlet_ends_quickly_with_the_numbers(min_size, counts):
    started = time.perf_counter()
    with pytest.raises(ValueError, match=r"partition\.min_size: 2000 samples .* 200 clients .*alpha=0\.001") as caught:
        Dirichlet(alpha=0.001, min_size=min_size).split(_labels(counts), 10, 200, 0)
    assert time.perf_counter() - started < 30
    assert "lower partition.min_size" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_clients_may_be_empty_when_allowed():
    splits = Dirichlet(alpha=0.01, min_size=0).split(_labels([20] * 10), 10, 50, 0)
    sizes = [len(s.train) + len(s.test) for s in splits]
    assert 0 in sizes
    assert sum(sizes) == 200


@pytest.mark.parametrize("n", [1, 2, 3, 10, 41])
def test_test_part_is_a_quarter_rounded_up(n):
    split = train_test(np.arange(n), np.zeros(n, int), 0.25, False, stream(0, "x"))
    assert len(split.test) == (0 if n == 1 else n - int(n * 0.75))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_stratified_test_part_follows_the_classes(counts):
    labels = _labels(counts)
    split = train_test(np.arange(len(labels)), labels, 0.25, True, stream(0, "x"))
    plain = train_test(np.arange(len(labels)), labels, 0.25, False, stream(0, "x"))
    assert len(split.test) == len(plain.test)
    share = len(split.test) / len(labels)
    train = np.bincount(labels[split.train], minlength=len(counts))
    for label, count in enumerate(counts):
        assert abs(np.sum(labels[split.test] == label) - share * count) < 2
    if sum(count - 1 for count in counts) >= len(split.test) and min(counts) >= 4:
        assert train.min() >= 1


def test_pool_leaves_the_sources_test_images_out():
    labels = _labels([50] * 2)
    is_test = np.arange(100) >= 80
    kept = _all(Iid(pool="train").split(labels, 2, 3, 0, is_test=is_test))
    assert sorted(kept) == list(range(80))
    assert len(_all(Iid().split(labels, 2, 3, 0, is_test=is_test))) == 100


def test_limit_is_balanced_and_seeded():
    labels = _labels([100, 100, 5])
    kept = _all(Iid(max_samples=35).split(labels, 3, 4, 0))
    assert np.bincount(labels[kept]).tolist() == [15, 15, 5]


def test_given_division_is_kept_in_order():
    pairs = ((np.array([3, 1]), np.array([0])), (np.array([2]), np.array([4])))
    labels = np.array([0, 1, 0, 1, 0])
    splits = Given().split(labels, 2, 2, 0, pairs)
    assert [s.train.tolist() for s in splits] == [[3, 1], [2]]
    assert len(_all(Given(max_samples=3).split(labels, 2, 2, 0, pairs))) == 3
    with pytest.raises(ValueError, match=r"federation\.num_clients: must be 2"):
        Given().split(labels, 2, 3, 0, pairs)
    with pytest.raises(ValueError, match="data=pfllib"):
        Given().split(labels, 2, 2, 0)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Iid(test_fraction=1.0), "test_fraction"),
        (lambda: Iid(test_fraction=-0.1), "test_fraction"),
        (lambda: Iid(max_samples=0), "max_samples"),
        (lambda: Iid(pool="test"), "pool"),
        (lambda: Given(max_samples=0), "max_samples"),
        (lambda: Pathological(classes_per_client=0), "classes_per_client"),
        (lambda: Dirichlet(alpha=0.0), "alpha"),
        (lambda: Dirichlet(alpha=float("nan")), "alpha"),
        (lambda: Dirichlet(alpha=float("inf")), "alpha"),
        (lambda: Dirichlet(min_size=-1), "min_size"),
        (lambda: Dirichlet(max_attempts=0), "max_attempts"),
    ],
)
def test_settings_out_of_range_name_the_key(make, key):
    with pytest.raises(ValueError, match=rf"^partition\.{key}: must be .*got"):
        make()


def test_no_client_at_all_is_refused():
    with pytest.raises(ValueError, match=r"federation\.num_clients: must be at least 1"):
        Iid().split(_labels([5]), 1, 0, 0)


@pytest.mark.parametrize(("classes", "images", "least"), [(100, 500, 10), (10, 5000, 10), (10, 500, 2)])
def test_fifty_clients_of_a_semi_supervised_study(classes, images, least):
    labels = _labels([images] * classes)
    scheme = Dirichlet(alpha=0.5, min_size=least, pool="train", test_fraction=0.0)
    splits = scheme.split(labels, classes, 50, 0)
    assert sorted(_all(splits)) == list(range(len(labels)))
    assert min(len(split.train) for split in splits) >= least
    assert all(len(split.test) == 0 for split in splits)
    held = np.concatenate([split.train for split in splits])
    assert len(np.unique(labels[held])) == classes
    again = scheme.split(labels, classes, 50, 0)
    assert all((one.train == two.train).all() for one, two in zip(splits, again, strict=True))
    other = scheme.split(labels, classes, 50, 1)
    assert any((one.train[:2] != two.train[:2]).any() for one, two in zip(splits, other, strict=True))


@pytest.mark.parametrize("scheme", [Dirichlet(), Pathological()])
def test_schemes_by_class_refuse_images_without_a_label(scheme):
    labels = np.array([0, 1, -1, 0, -1, 1])
    with pytest.raises(ValueError, match=r"2 of 6 samples have no label.*partition=iid"):
        scheme.split(labels, 2, 2, 0)
    assert sorted(_all(Iid().split(labels, 2, 2, 0))) == list(range(6))
