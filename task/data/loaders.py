"""One client's samples in batches, without a line of Python per sample.

Images stay uint8 until they are on the device. Several batches at a time are gathered and normalised in one
go, and a batch is a view of that block, so that a batch of ten small images costs a few microseconds.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from task.data.labels import NO_LABEL
from task.data.prepare import ImageDataset
from task.data.sources import Indices

Batch = tuple[Tensor, Tensor]

# Floats that are normalised at a time: small enough for a cache, large enough to forget the fixed costs.
BLOCK_BYTES = 2**20
# A GPU is shared by several clients and must hold models and activations too.
RESIDENT_SHARE = 0.25
MINUS_ONE = torch.tensor(-1.0)


def batch_bounds(
    total: int, batch_size: int, *, drop_last: bool = False, has_batchnorm: bool = False
) -> list[tuple[int, int]]:
    """Return ``(start, stop)`` of each training batch of an epoch.

    The batch is ``min(batch_size, total)``. A shorter last batch is kept, except that a last batch of one
    sample joins the batch before it when the model has BatchNorm, which cannot train on one sample. Of a
    client with a single sample that batch of one remains, and is the training loop's affair.

    Parameters
    ----------
    total
        n, samples of the client; 0 gives no batch.
    batch_size
        B, at least 1.
    drop_last
        HtFLlib's rule instead: full batches of B only, so fewer than B samples give none.
    has_batchnorm
        Whether the model has BatchNorm layers.
    """
    assert total >= 0 and batch_size >= 1, f"{total} samples in batches of {batch_size}"  # noqa: PT018
    if drop_last:
        return [(start, start + batch_size) for start in range(0, total - batch_size + 1, batch_size)]
    bounds = [(start, min(start + batch_size, total)) for start in range(0, total, batch_size)]
    if has_batchnorm and batch_size > 1 and len(bounds) > 1 and bounds[-1][1] - bounds[-1][0] == 1:
        bounds[-2:] = [(bounds[-2][0], total)]
    return bounds


def normalise(images: Tensor) -> Tensor:
    """Map uint8 0..255 to float32 -1..1, that is (x / 255 - 0.5) / 0.5; floats pass as they are."""
    if images.dtype != torch.uint8:
        return images
    # One kernel, converting on the way: -1 + (2 / 255) x.
    return torch.add(MINUS_ONE, images, alpha=2 / 255)


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's training or test samples.

    Attributes
    ----------
    images
        ``(n, ch, H, W)`` uint8 or float32, on ``device`` when resident, else in host memory.
    labels
        ``(n,)`` int64, at the same place; -1 is no label.
    device
        Where batches are delivered.
    channels_last
        Whether batches have the channels-last memory format.
    """

    images: Tensor
    labels: Tensor
    device: torch.device
    channels_last: bool = False

    @classmethod
    def from_dataset(
        cls,
        dataset: ImageDataset,
        indices: Indices,
        device: torch.device | str = "cpu",
        *,
        channels_last: bool = False,
        resident: bool | None = None,
        hide_labels: bool = False,
    ) -> "ClientData":
        """Read a client's samples.

        Parameters
        ----------
        dataset
            The prepared data.
        indices
            ``(n,)`` the client's samples.
        device
            Where batches are wanted.
        channels_last
            Whether batches get the channels-last memory format.
        resident
            Whether all samples move to the device now; None: when they fit comfortably.
        hide_labels
            Whether every label is -1, whatever the data set knows.
        """
        device = torch.device(device)
        # Cloned into torch's own, always equally aligned memory: kernels may round differently by alignment, and
        # float images reach them as they are.
        images = torch.from_numpy(np.asarray(dataset.images[indices])).clone()
        labels = torch.from_numpy(np.full(len(indices), NO_LABEL) if hide_labels else dataset.labels[indices])
        if fits(images.nbytes, device) if resident is None else resident:
            # When another client took the memory in between, the samples stay on the host.
            with contextlib.suppress(torch.OutOfMemoryError):
                images, labels = images.to(device), labels.to(device)
        return cls(images, labels, device, channels_last)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def resident(self) -> bool:
        """Whether the samples already lie on the device."""
        return self.images.device.type == self.device.type

    def train_batches(
        self,
        batch_size: int,
        generator: torch.Generator,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        has_batchnorm: bool = False,
        raw: bool = False,
        trace: list[Tensor] | None = None,
    ) -> Iterator[Batch]:
        """Yield one epoch of ``((b, ch, H, W) float32, (b,) int64)``; see `batch_bounds` for the sizes.

        Parameters
        ----------
        batch_size
            B.
        generator
            A CPU generator; one permutation is drawn from it when ``shuffle`` is on.
        shuffle
            Whether the samples come in a new order.
        drop_last, has_batchnorm
            As in `batch_bounds`.
        raw
            Whether images come as they are stored, for whoever augments and then normalises them (`prepared`).
        trace
            Gets the ``(n,)`` positions of the epoch's samples in the order in which they come.
        """
        order = torch.randperm(len(self), generator=generator) if shuffle else None
        bounds = batch_bounds(len(self), batch_size, drop_last=drop_last, has_batchnorm=has_batchnorm)
        if trace is not None:
            trace.append((torch.arange(len(self)) if order is None else order)[: bounds[-1][1] if bounds else 0])
        return self._batches(bounds, order, raw)

    def eval_batches(self, batch_size: int, *, raw: bool = False) -> Iterator[Batch]:
        """Yield all samples once, in order, as `train_batches` does."""
        return self._batches(batch_bounds(len(self), batch_size), None, raw)

    def _batches(self, bounds: list[tuple[int, int]], order: Tensor | None, raw: bool) -> Iterator[Batch]:
        if order is not None:
            order = order.to(self.images.device)
        sample_bytes = 4 * self.images[:1].numel()
        while bounds:
            start = bounds[0][0]
            limit = start + BLOCK_BYTES // max(sample_bytes, 1)
            taken = max(1, sum(stop <= limit for _, stop in bounds))
            block, bounds = bounds[:taken], bounds[taken:]
            images, labels = self._block(start, block[-1][1], order)
            images = images if raw else prepared(images, channels_last=self.channels_last)
            for first, last in block:
                yield images[first - start : last - start], labels[first - start : last - start]

    def _block(self, start: int, stop: int, order: Tensor | None) -> Batch:
        """Gather and move the samples at ``start..stop`` of the order."""
        if order is None:
            images, labels = self.images[start:stop], self.labels[start:stop]
        else:
            chosen = order[start:stop]
            images, labels = self.images.index_select(0, chosen), self.labels.index_select(0, chosen)
        if not self.resident:
            # PyTorch keeps pinned buffers alive until the copies that it was told not to wait for are done.
            images = images.pin_memory().to(self.device, non_blocking=True)
            labels = labels.pin_memory().to(self.device, non_blocking=True)
        return images, labels


def prepared(images: Tensor, *, channels_last: bool) -> Tensor:
    """Return images as a model wants them: normalised, and in the channels-last memory format where that is on."""
    images = normalise(images)
    return images.contiguous(memory_format=torch.channels_last) if channels_last else images


def fits(num_bytes: int, device: torch.device) -> bool:
    """Say whether so many bytes may stay on the device; always true of the CPU."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return num_bytes <= RESIDENT_SHARE * free
