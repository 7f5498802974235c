"""What else hears of each round, beside the results folder: TensorBoard and Weights & Biases, each an optional extra.

A listener is a dataclass of settings with three methods, named by ``_target_`` in ``conf/listeners/``. It hears numbers
of a round, the configuration and the summary; never images, models, prototypes or keys.
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from logging import WARNING, getLogger
from pathlib import Path
from typing import Any, ClassVar

from task.config import build
from task.requirements import require_choice
from task.schema import Config

LOG = getLogger("flwr")
FOLDERS = ("tensorboard", "wandb")
"""What the listeners write below the results folder; an overwritten run loses them, too."""
_NUMBERS = ("accuracy", "accuracy_std", "accuracy_head", "accuracy_prototype", "loss", "clients_evaluated")
_GROUPS = ("metrics", "bytes", "parameters", "seconds")


class Listener(ABC):
    """Hears of one run as it goes; ``package`` is what it needs, and the name of the extra that brings it."""

    package: ClassVar[str]

    def __post_init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            extra = f"pip install 'protofed[{self.package}]'"
            raise ValueError(f"listeners={self.package} is not possible: {self.package} is not installed; {extra}")

    @abstractmethod
    def begin(self, folder: Path, settings: Mapping[str, Any], session: str, rounds_done: int) -> None:
        """Begin before the first round that is left; ``folder`` is that of the results."""

    @abstractmethod
    def hear(self, number: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of round ``number``."""

    @abstractmethod
    def end(self, summary: Mapping[str, Any]) -> None:
        """End with the run's summary."""


@dataclass
class TensorBoard(Listener):
    """Event files in ``tensorboard/`` of the results folder."""

    package: ClassVar[str] = "tensorboard"

    def begin(self, folder: Path, settings: Mapping[str, Any], session: str, rounds_done: int) -> None:
        """Open the event file; what an earlier part of the run wrote after ``rounds_done`` is hidden."""
        from torch.utils.tensorboard import SummaryWriter

        purge = rounds_done + 1 if rounds_done else None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def hear(self, number: int, scalars: Mapping[str, float]) -> None:
        """Write each number as a scalar of its own, at once."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def end(self, summary: Mapping[str, Any]) -> None:
        """Close the event file."""
        self._writer.close()


@dataclass
class WeightsAndBiases(Listener):
    """A run of Weights & Biases in ``wandb/`` of the results folder.

    ``mode`` is ``offline``, where nothing leaves the machine until ``wandb sync``, or ``online``.
    """

    project: str = "protofed"
    mode: str = "offline"

    package: ClassVar[str] = "wandb"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("mode", self.mode, ("offline", "online"))

    def begin(self, folder: Path, settings: Mapping[str, Any], session: str, rounds_done: int) -> None:
        """Begin a run with the settings as its configuration, quietly and without facts of the machine."""
        import wandb

        quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, x_disable_meta=True, x_disable_stats=True
        )
        self._run = wandb.init(
            project=self.project,
            mode="online" if self.mode == "online" else "offline",
            dir=str(folder),
            name=folder.name,
            config=dict(settings),
            settings=quiet,
        )

    def hear(self, number: int, scalars: Mapping[str, float]) -> None:
        """Log the numbers at their round."""
        self._run.log(dict(scalars), step=number)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Keep the summary's numbers and end the run, as failed if it failed."""
        numbers = {key: value for key, value in summary.items() if isinstance(value, int | float | str)}
        self._run.summary.update(numbers)
        self._run.finish(exit_code=int(summary.get("status") == "failed"))


class Audience:
    """All listeners of one run. One that fails is left out from then on: it must not cost the run.

    Raises
    ------
    ValueError
        One line, when the package that a listener needs is not installed.
    """

    def __init__(self, config: Config) -> None:
        self._settings = {key: value for key, value in asdict(config).items() if key != "resume"}
        self._listeners: dict[str, Listener] = {}
        for name, node in config.listeners.items():
            listener = build(node, f"listeners.{name}")
            assert isinstance(listener, Listener)
            self._listeners[name] = listener

    def begin(self, folder: Path, session: str, rounds_done: int) -> None:
        """Tell all that the run begins, or goes on after ``rounds_done``."""
        self._each("begin", folder, self._settings, session, rounds_done)

    def hear(self, row: Mapping[str, Any]) -> None:
        """Tell all what the line of a round says."""
        if self._listeners:
            self._each("hear", int(row["round"]), scalars_of(row))

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell all that the run has ended."""
        self._each("end", summary)

    def _each(self, event: str, *facts: Any) -> None:
        for name, listener in list(self._listeners.items()):
            try:
                getattr(listener, event)(*facts)
            except Exception as error:  # whatever a foreign package raises
                LOG.log(WARNING, "listeners.%s fails and hears no more: %s", name, " ".join(str(error).split()))
                del self._listeners[name]


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a round's line by name; those of a group as ``group/name``."""
    found = {key: row[key] for key in _NUMBERS if row.get(key) is not None}
    for group in _GROUPS:
        found |= {f"{group}/{key}": value for key, value in row.get(group, {}).items()}
    return {key: float(value) for key, value in found.items()} | {"failures": float(len(row.get("failures", ())))}
