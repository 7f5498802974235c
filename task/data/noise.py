"""Noise in the shape of a data set, for trial runs without a download."""

from dataclasses import dataclass

import numpy as np

from task.data.sources import RawImages, Source
from task.seeding import stream

NUM_IMAGES = 1000


@dataclass(frozen=True)
class Noise(Source):
    """1,000 random images, always the same ones, in classes of equal size (one more or less).

    There is nothing to learn in them: they only show that a run works.

    Parameters
    ----------
    edge
        Height and width in pixels.
    channels
        1 or 3.
    num_classes
        C.
    """

    edge: int
    channels: int
    num_classes: int

    def read(self) -> RawImages:
        """Draw the images; a sixth of them is the test split."""
        shape = (NUM_IMAGES, self.edge, self.edge, self.channels)
        images = stream(0, "noise").integers(0, 256, shape, dtype=np.uint8)
        numbers = np.arange(NUM_IMAGES)
        names = tuple(str(label) for label in range(self.num_classes))
        return RawImages(images, numbers % self.num_classes, numbers >= NUM_IMAGES * 5 // 6, names)
