"""What all partition schemes share.

As in the papers a scheme merges the source's training and test images, divides them among the clients, and
then splits each client's share into training and test samples (75 to 25).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from task.data.shares import Labels, Split, balanced_subset, train_test
from task.data.sources import Indices
from task.seeding import stream

Flags = npt.NDArray[np.bool_]
POOLS = ("all", "train")


@dataclass(frozen=True, kw_only=True)
class Partition(ABC):
    """What all schemes share.

    Parameters
    ----------
    max_samples
        Use only this many samples, drawn evenly from the classes; null for all of them.
    """

    max_samples: int | None = None

    def __post_init__(self) -> None:
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"partition.max_samples: must be null or at least 1, got {self.max_samples}")

    @abstractmethod
    def split(
        self,
        labels: Labels,
        num_classes: int,
        num_clients: int,
        seed: int,
        given: Sequence[tuple[Indices, Indices]] | None = None,
        is_test: Flags | None = None,
    ) -> list[Split]:
        """Return the samples of each client; the same arguments always give the same answer.

        Parameters
        ----------
        labels
            ``(N,)`` classes 0..C-1.
        num_classes
            C.
        num_clients
            M.
        seed
            The run's seed.
        given
            The division that the data came with.
        is_test
            ``(N,)`` bool, the source's own test split.

        Raises
        ------
        ValueError
            Naming the key to change, when the division is impossible.
        """


@dataclass(frozen=True, kw_only=True)
class DrawnPartition(Partition):
    """A scheme that draws the division itself.

    Parameters
    ----------
    test_fraction
        Share of each client's samples that is for testing, rounded up; a client with two or more samples
        keeps at least one on either side, a client with one sample trains on it. 0: nothing is for testing.
    stratify
        Whether the test samples follow the client's classes in proportion.
    pool
        ``all`` merges the source's training and test images, ``train`` leaves its test images out.
    """

    test_fraction: float = 0.25
    stratify: bool = False
    pool: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.test_fraction < 1:
            raise ValueError(f"partition.test_fraction: must be in [0, 1), got {self.test_fraction}")
        if self.pool not in POOLS:
            raise ValueError(f"partition.pool: must be one of {', '.join(POOLS)}, got {self.pool!r}")

    def split(
        self,
        labels: Labels,
        num_classes: int,
        num_clients: int,
        seed: int,
        given: Sequence[tuple[Indices, Indices]] | None = None,
        is_test: Flags | None = None,
    ) -> list[Split]:
        """Return the samples of each client, in random order."""
        if num_clients < 1:
            raise ValueError(f"federation.num_clients: must be at least 1, got {num_clients}")
        kept = np.arange(len(labels), dtype=np.int64)
        if self.pool == "train" and is_test is not None:
            kept = kept[~is_test]
        kept = balanced_subset(kept, labels, self.max_samples, stream(seed, "partition", "subset"))
        shares = self.divide(labels[kept], num_classes, num_clients, stream(seed, "partition"))
        return [
            train_test(
                kept[share],
                labels,
                self.test_fraction,
                self.stratify,
                stream(seed, "partition", "test", client),
            )
            for client, share in enumerate(shares)
        ]

    @abstractmethod
    def divide(self, labels: Labels, num_classes: int, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Return the positions in ``labels`` that each client gets."""
