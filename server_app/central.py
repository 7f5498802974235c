"""The server's own test of a global model: the source's test split, which no client trains on."""

from pathlib import Path

import numpy as np
import torch

from task.config import build
from task.data.loaders import ClientData
from task.data.prepare import prepare
from task.metrics import Accuracy, evaluate
from task.models.split import SplitModel
from task.schema import Config, require

KEY = "algorithm.evaluation"
INSTEAD = "use algorithm.evaluation=clients, which tests the global model on every client's test split"


def require_unseen(config: Config) -> None:
    """Refuse a division among the clients that would train on the source's test images, or leave images unused.

    Raises
    ------
    ValueError
        One line with what to add to the command.
    """
    pool, share = config.partition.get("pool", "train"), config.partition.get("test_fraction", 0)
    if pool != "train" or share != 0:
        found = f"partition.pool={pool} and partition.test_fraction={share}"
        fitting = "the source's test images are the server's: add partition=iid_train or partition=dirichlet_train"
        raise ValueError(f"{KEY}='server' is not allowed with {found}: {fitting}, or {INSTEAD[4:]}")


class CentralTest:
    """The test split of ``data.source``, read once, on the server's device.

    Parameters
    ----------
    config : Config
        The run's configuration.
    class_names : tuple of str
        The classes as the clients know them.
    device : torch.device
        Where to test.

    Raises
    ------
    ValueError
        One line that says what to do, when the server has no such images.
    """

    def __init__(self, config: Config, class_names: tuple[str, ...], device: torch.device) -> None:
        folder = Path(config.data.cache_dir).expanduser() if config.data.cache_dir else None
        try:
            dataset = prepare(build(config.data.source, "data.source"), folder)
        except ValueError as error:
            raise ValueError(f"{KEY}=server: the server has no images ({error}); {INSTEAD}") from error
        indices = np.flatnonzero(dataset.is_test & (dataset.labels >= 0))
        require(len(indices) > 0, KEY, "server", f"data={config.data.name} has no test split of its own; {INSTEAD}")
        known = set(dataset.class_names) <= set(class_names)
        require(known, KEY, "server", f"the server knows classes that no client knows; {INSTEAD}")
        dataset = dataset.with_classes(class_names, KEY)
        layout = config.train.channels_last
        self.data = ClientData.from_dataset(dataset, indices, device, channels_last=layout)
        self.batch_size = config.train.eval_batch_size

    def accuracy(self, model: SplitModel) -> Accuracy:
        """Return what ``model`` reaches on all test images."""
        layout = torch.channels_last if self.data.channels_last else torch.preserve_format
        model = model.to(self.data.device).to(memory_format=layout)
        found = evaluate(model, self.data.eval_batches(self.batch_size), confusion_by="head")
        assert found is not None
        return found
