"""The arithmetic of dividing samples: subsets, Dirichlet sizes, training against test."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from task.data.sources import Indices

Labels = npt.NDArray[np.int64]
# PFLlib asks that every client fill one test batch of this size.
TEST_BATCH = 10


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of one client: indices into the data set, int64, in the order to read them."""

    train: Indices
    test: Indices


def join(pieces: list[Indices]) -> Indices:
    """Concatenate index arrays; none at all give an empty one."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *pieces])


def require_labels(labels: Labels) -> None:
    """Refuse samples without a label where a scheme divides class by class.

    Raises
    ------
    ValueError
        One line with their number.
    """
    missing = int((labels < 0).sum())
    if missing:
        raise ValueError(
            f"partition: {missing} of {len(labels)} samples have no label, and this scheme divides class by class; "
            "use partition=iid or partition=given"
        )


def pfllib_minimum(num_samples: int, num_clients: int, test_fraction: float) -> int:
    """Return PFLlib's ``least_samples``: one test batch, or half the mean share where that is less."""
    return int(min(TEST_BATCH / (test_fraction or 0.25), num_samples / num_clients / 2))


def balanced_subset(indices: Indices, labels: Labels, max_samples: int | None, rng: np.random.Generator) -> Indices:
    """Keep at most ``max_samples`` of the indices, as evenly from the classes as they allow.

    Parameters
    ----------
    indices
        Candidates, in ascending order.
    labels
        ``(N,)`` classes of the whole data set.
    max_samples
        None keeps all.
    """
    if max_samples is None or max_samples >= len(indices):
        return indices
    shuffled = rng.permutation(indices)
    classes = labels[shuffled]
    order = np.argsort(classes, kind="stable")
    _, starts, counts = np.unique(classes[order], return_index=True, return_counts=True)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(starts, counts)
    # First one sample of every class, then a second one, and so on; ties in the random order.
    return np.sort(shuffled[np.argsort(rank, kind="stable")[:max_samples]])


def dirichlet_sizes(
    counts: npt.NDArray[np.int64], num_clients: int, alpha: float, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw how many samples of each class every client gets.

    Parameters
    ----------
    counts
        ``(C,)`` samples of each class.

    Returns
    -------
    numpy.ndarray
        ``(C, M)``; row sums are ``counts``.
    """
    mean_share = counts.sum() / num_clients
    sizes = np.zeros((len(counts), num_clients), dtype=np.int64)
    totals = np.zeros(num_clients, dtype=np.int64)
    for label, count in enumerate(counts):
        if count:
            # Somebody is below the mean share as long as a sample is left to hand out.
            open_clients = np.flatnonzero(totals < mean_share)
            shares = rng.dirichlet(np.full(len(open_clients), alpha))
            cuts = (np.cumsum(shares)[:-1] * count).astype(np.int64)
            sizes[label, open_clients] = np.diff(cuts, prepend=0, append=count)
            totals += sizes[label]
    return sizes


def train_test(share: Indices, labels: Labels, test_fraction: float, stratify: bool, rng: np.random.Generator) -> Split:
    """Split one client's samples at random.

    Parameters
    ----------
    share
        The client's n samples.
    labels
        ``(N,)`` classes of the whole data set.
    test_fraction
        The test part has ``n - floor(n (1 - test_fraction))`` samples, but leaves one for training.
    stratify
        Whether the test part follows the client's classes in proportion.
    """
    total = len(share)
    # The small addend keeps 10 * (1 - 0.1) from falling below 9.
    num_test = max(0, min(total - math.floor(total * (1 - test_fraction) + 1e-9), total - 1))
    shuffled = rng.permutation(share)
    if not stratify or num_test == 0:
        return Split(shuffled[: total - num_test], shuffled[total - num_test :])
    in_test = _stratified(labels[shuffled], num_test)
    return Split(shuffled[~in_test], shuffled[in_test])


def _stratified(classes: Labels, num_test: int) -> npt.NDArray[np.bool_]:
    """Mark ``num_test`` samples, each class in proportion by largest remainder.

    A class keeps a training sample as long as others can give one.
    """
    _, inverse, counts = np.unique(classes, return_inverse=True, return_counts=True)
    exact = counts * (num_test / len(classes))
    quota = np.floor(exact).astype(np.int64)
    spare = counts - quota > 1
    order = np.lexsort((-(exact - quota), ~spare))
    quota[order[: num_test - quota.sum()]] += 1
    in_test = np.zeros(len(classes), dtype=np.bool_)
    for position, size in enumerate(quota):
        in_test[np.flatnonzero(inverse == position)[:size]] = True
    return in_test
