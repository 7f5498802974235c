"""Partition schemes, seeded, disjoint and complete: who gets which samples.

References
----------
PFLlib, ``dataset/utils/dataset_utils.py`` (arXiv 2312.04992): the rules ``pat`` and ``dir``.
Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution", arXiv 1909.06335: Dirichlet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from task.data.prepare import ImageDataset
from task.data.scheme import DrawnPartition, Flags, Partition
from task.data.shares import Labels, Split, balanced_subset, dirichlet_sizes, join, pfllib_minimum, require_labels
from task.data.sources import Indices
from task.seeding import stream


@dataclass(frozen=True, kw_only=True)
class Iid(DrawnPartition):
    """Every client gets the same number of samples (one more or less), drawn from all of them."""

    def divide(self, labels: Labels, num_classes: int, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Shuffle and cut."""
        if len(labels) < num_clients:
            raise ValueError(
                f"federation.num_clients: {len(labels)} samples cannot be divided among {num_clients} "
                f"clients; lower it to at most {len(labels)}"
            )
        return np.array_split(rng.permutation(len(labels)), num_clients)


@dataclass(frozen=True, kw_only=True)
class Pathological(DrawnPartition):
    """Every client holds few classes (PFLlib's ``pat``).

    Class by class, the first ceil(M k / C) clients that hold fewer than k classes share its samples, so
    groups of clients hold the same classes. PFLlib loses the classes that are left when every client holds k
    (with 102 classes, 20 clients and k = 10 the last two); here they go round robin to clients that then hold
    more than k, unless ``drop_leftover``. Samples of a class are shuffled first, where PFLlib takes file order.

    Parameters
    ----------
    classes_per_client
        k, between 1 and C.
    balanced
        Whether the holders of a class get equal shares. Otherwise all but the last get a uniform integer
        between a tenth of the equal share and the equal share, and the last one gets the rest.
    drop_leftover
        Whether left-over classes are dropped as in PFLlib.
    """

    classes_per_client: int = 2
    balanced: bool = False
    drop_leftover: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes_per_client < 1:
            raise ValueError(f"partition.classes_per_client: must be at least 1, got {self.classes_per_client}")

    def divide(self, labels: Labels, num_classes: int, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Hand out one class after the other."""
        require_labels(labels)
        if self.classes_per_client > num_classes:
            raise ValueError(
                f"partition.classes_per_client: must be between 1 and {num_classes}, the number of classes, "
                f"got {self.classes_per_client}"
            )
        smallest = pfllib_minimum(len(labels), num_clients, self.test_fraction) / num_classes
        pieces: list[list[Indices]] = [[] for _ in range(num_clients)]
        for label, holders in enumerate(self.holders(num_classes, num_clients)):
            members = rng.permutation(np.flatnonzero(labels == label))
            if holders:
                sizes = self._sizes(len(members), len(holders), smallest, rng)
                for client, piece in zip(holders, np.split(members, np.cumsum(sizes)[:-1]), strict=True):
                    pieces[client].append(piece)
        return [join(piece) for piece in pieces]

    def holders(self, num_classes: int, num_clients: int) -> list[list[int]]:
        """Return the clients that hold each class; none for a dropped class."""
        count = -(-num_clients * self.classes_per_client // num_classes)
        budget = [self.classes_per_client] * num_clients
        result: list[list[int]] = []
        next_client = 0
        for _ in range(num_classes):
            chosen = [client for client in range(num_clients) if budget[client] > 0][:count]
            for client in chosen:
                budget[client] -= 1
            if not chosen and not self.drop_leftover:
                chosen = [(next_client + step) % num_clients for step in range(count)]
                next_client += count
            result.append(chosen)
        return result

    def _sizes(self, total: int, holders: int, smallest: float, rng: np.random.Generator) -> list[int]:
        """Return how many of a class's samples each of its holders gets."""
        if self.balanced:
            return [total // holders + (position < total % holders) for position in range(holders)]
        share = total // holders
        low = min(int(max(share / 10, smallest)), share)
        sizes = [int(size) for size in rng.integers(low, max(share, low + 1), size=holders - 1)]
        return [*sizes, total - sum(sizes)]


@dataclass(frozen=True, kw_only=True)
class Dirichlet(DrawnPartition):
    """The clients' shares of every class follow a Dirichlet distribution (PFLlib's ``dir``).

    A client that holds N / M samples or more gets nothing of the classes that follow. PFLlib draws all M
    shares, sets those of full clients to zero and normalises; the rest of a Dirichlet vector, normalised, is
    Dirichlet again, so here only the others are drawn, which cannot end in 0 / 0. The whole division is drawn
    again until every client has ``min_size`` samples.

    Parameters
    ----------
    alpha
        Concentration; the smaller, the fewer classes a client holds.
    min_size
        Samples that every client must get, 0 or more; null for PFLlib's rule, the smaller of one test batch
        of 10 (40 samples at 25 %) and half the mean share.
    max_attempts
        How often to draw before giving up.
    """

    alpha: float = 0.1
    min_size: int | None = None
    max_attempts: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"partition.alpha: must be above 0, got {self.alpha}")
        if self.min_size is not None and self.min_size < 0:
            raise ValueError(f"partition.min_size: must be null or at least 0, got {self.min_size}")
        if self.max_attempts < 1:
            raise ValueError(f"partition.max_attempts: must be at least 1, got {self.max_attempts}")

    def divide(self, labels: Labels, num_classes: int, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Draw sizes until they are large enough, then hand out the samples."""
        require_labels(labels)
        sizes = self._draw(np.bincount(labels, minlength=num_classes), num_clients, rng)
        pieces: list[list[Indices]] = [[] for _ in range(num_clients)]
        for label, row in enumerate(sizes):
            members = rng.permutation(np.flatnonzero(labels == label))
            for client, piece in enumerate(np.split(members, np.cumsum(row)[:-1])):
                pieces[client].append(piece)
        return [join(piece) for piece in pieces]

    def _draw(self, counts: npt.NDArray[np.int64], num_clients: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return ``(C, M)`` sizes in which every client has enough, or say why there are none."""
        total = int(counts.sum())
        required = pfllib_minimum(total, num_clients, self.test_fraction) if self.min_size is None else self.min_size
        largest = -1
        attempts = 0
        while required * num_clients <= total and attempts < self.max_attempts:
            attempts += 1
            sizes = dirichlet_sizes(counts, num_clients, self.alpha, rng)
            smallest = int(sizes.sum(axis=0).min())
            if smallest >= required:
                return sizes
            largest = max(largest, smallest)
        reached = f"in {attempts} draws the smallest client had at most {largest}" if attempts else "they are too few"
        raise ValueError(
            f"partition.min_size: {total} samples cannot be divided among {num_clients} clients with at "
            f"least {required} each at partition.alpha={self.alpha:g}: {reached}; lower partition.min_size "
            f"(0 allows empty clients) or federation.num_clients, or raise partition.alpha or "
            f"partition.max_attempts"
        )


@dataclass(frozen=True, kw_only=True)
class Given(Partition):
    """The division that the data came with: client i is the folder's client i, with its own test samples."""

    def split(
        self,
        labels: Labels,
        num_classes: int,
        num_clients: int,
        seed: int,
        given: Sequence[tuple[Indices, Indices]] | None = None,
        is_test: Flags | None = None,
    ) -> list[Split]:
        """Return the division as it is, in the folder's order."""
        if given is None:
            raise ValueError("partition: given needs data that is split by client already (data=pfllib)")
        if len(given) != num_clients:
            raise ValueError(
                f"federation.num_clients: must be {len(given)}, the number of clients in the data folder, "
                f"got {num_clients}"
            )
        every = np.arange(len(labels), dtype=np.int64)
        kept = balanced_subset(every, labels, self.max_samples, stream(seed, "partition", "subset"))
        return [Split(train[np.isin(train, kept)], test[np.isin(test, kept)]) for train, test in given]


@lru_cache(maxsize=8)
def client_splits(scheme: Partition, dataset: ImageDataset, num_clients: int, seed: int) -> tuple[Split, ...]:
    """Return the samples of each client; computed once in a process for the same arguments."""
    return tuple(scheme.split(dataset.labels, dataset.num_classes, num_clients, seed, dataset.given, dataset.is_test))
