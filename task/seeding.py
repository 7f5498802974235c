"""Named random streams, so that no result depends on the order in which things happen."""

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def stream_seed(seed: int, *names: str | int) -> int:
    """Return the 63-bit seed of the stream called ``names`` in the run with this ``seed``.

    Every purpose has a stream of its own, for instance ``("client", partition, round)``; streams are
    independent of one another, of the worker and of the order of calls.
    """
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return a fresh NumPy generator at the start of the stream called ``names``."""
    return np.random.default_rng(stream_seed(seed, *names))


def torch_stream(seed: int, *names: str | int) -> "torch.Generator":
    """Return a fresh CPU ``torch.Generator`` at the start of the stream called ``names``."""
    import torch  # only here: partitioning, and with it the check of a command line, does without its slow import

    return torch.Generator().manual_seed(stream_seed(seed, *names))
