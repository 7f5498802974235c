import pytest
import torch

from tests.cases.small import states

__all__ = ["states"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
