"""Clipping and noise, the last that happens to prototypes before they leave a client. Why: ``task/privacy.py``."""

import os
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from task.messages import PrototypeSet, Upload
from task.privacy import PrivacyConfig
from task.seeding import stream_seed

RandomBytes = Callable[[int], bytes]


def random_bytes(privacy: PrivacyConfig, partition: int, number: int) -> RandomBytes:
    """Return the source of the noise of one upload: the operating system's, unless ``noise_seed`` is set.

    The run's own ``seed`` is public and never used.
    """
    if privacy.noise_seed is None:
        return os.urandom
    return random.Random(stream_seed(privacy.noise_seed, "privacy-noise", partition, number)).randbytes


def protected(upload: Upload, privacy: PrivacyConfig, num_classes: int, width: int, source: RandomBytes) -> Upload:
    """Return the upload with clipped and noised prototypes, and nothing else that depends on the client's data.

    Parameters
    ----------
    upload : Upload
        What the method shares.
    num_classes, width : int
        C and K.
    source : callable
        Returns n random bytes.

    Raises
    ------
    ValueError
        The method shares more than prototypes, which noise on these would not protect.
    """
    sent, bare = upload.prototypes, Upload(upload.partition, upload.round)
    if upload.weights is not None or upload.examples is not None or (sent is not None and sent.counts is not None):
        raise ValueError(f"client {upload.partition}: privacy={privacy.name} covers prototypes alone, nothing is sent")
    if privacy.hide_classes:
        vectors = torch.zeros(num_classes, width) if sent is None else sent.dense(num_classes)[0]
        ids = torch.arange(num_classes)
    elif sent is None:
        return bare
    else:
        ids, vectors = sent.class_ids, sent.vectors
    noised = clipped(vectors, privacy.clip) + privacy.noise_std(len(ids)) * gaussian(tuple(vectors.shape), source)
    return Upload(bare.partition, bare.round, PrototypeSet(ids, noised.float()))


def clipped(vectors: Tensor, clip: float) -> Tensor:
    """Return ``(n, K)`` vectors in float64, longer ones shortened to norm ``clip``; what is not finite becomes 0."""
    finite = torch.nan_to_num(vectors.double(), nan=0.0, posinf=0.0, neginf=0.0)
    norms = torch.linalg.vector_norm(finite, dim=1, keepdim=True)
    shortened: Tensor = finite * (clip / norms.clamp(min=clip))
    return shortened


def gaussian(shape: tuple[int, ...], source: RandomBytes) -> Tensor:
    """Return float64 numbers from N(0, 1), made of 52 random bits each by the inverse of the distribution function.

    An ordinary generator would not do: what it drew can be computed from its state, and its state from what it drew.
    """
    count = int(np.prod(shape))
    bits = np.frombuffer(source(8 * count), dtype="<u8") >> 12
    uniform = (bits.astype(np.float64) + 0.5) / 2.0**52
    numbers: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return numbers.reshape(shape)
