import os
from pathlib import Path

import numpy as np
import pytest

from task.data.prepare import ImageDataset


@pytest.fixture
def shared_data() -> Path:
    folder = os.environ.get("PROTOFED_SHARED_DATA")
    if not folder:
        pytest.skip("PROTOFED_SHARED_DATA does not point to the folder of shared images")
    return Path(folder)


@pytest.fixture
def small_dataset() -> ImageDataset:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 1, 8, 8), dtype=np.uint8)
    labels = np.arange(60) % 3
    names = ("a", "b", "c")
    return ImageDataset(images, labels, np.zeros(60, bool), names, {}, None, Path("/nowhere/small"))
