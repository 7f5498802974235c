import time
from dataclasses import dataclass

import numpy as np

from task.data.sources import RawImages, Source


@dataclass(frozen=True)
class Slow(Source):
    """Notes every read in a file and takes its time."""

    log: str

    def read(self):
        with open(self.log, "a", encoding="utf-8") as file:
            file.write("read\n")
        time.sleep(0.5)
        return RawImages(np.zeros((4, 8, 8), np.uint8), np.arange(4), np.zeros(4, bool))
