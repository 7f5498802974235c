"""The only file that keeps anything between two messages: a client's private model.

A client object lives for one message. Its state is kept under the round whose training made it, and asked for under
exactly that round, so that a client whose state is lost says so instead of quietly starting anew.
"""

import os
import re
from pathlib import Path
from typing import Protocol

from flwr.app import ArrayRecord, ConfigRecord, Context
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from task.config import NodeSettings
from task.payload import decode_tensors, encode_tensors
from task.schema import Config

NAME = re.compile(r"round-(\d{6})\.safetensors")


class StateStore(Protocol):
    """Where a client's state waits."""

    def load(self, state_round: int) -> dict[str, Tensor]:
        """Return the state that the training of ``state_round`` made; ``ValueError`` when it is lost."""

    def save(self, state_round: int, tensors: dict[str, Tensor], durable_round: int) -> None:
        """Keep the state of ``state_round``; drop what a run resumed at ``durable_round`` would not need."""


class DiskStore:
    """Safetensors files in one folder per run and partition, each written under another name and renamed."""

    def __init__(self, folder: Path, partition: int) -> None:
        self.folder, self.partition = folder, partition

    def load(self, state_round: int) -> dict[str, Tensor]:
        """Return the state of ``state_round``; ``ValueError`` when its file is missing or damaged."""
        path = self._path(state_round)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
            raise ValueError(
                f"client {self.partition}: its state of round {state_round} is lost: {path} {reason}; on several "
                "machines set federation.state_dir to a shared folder, or federation.state=context"
            ) from error

    def save(self, state_round: int, tensors: dict[str, Tensor], durable_round: int) -> None:
        """Write the state of ``state_round`` atomically and remove the files that nobody can ask for again."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = self.folder / f".round-{state_round:06d}.{os.getpid()}"
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)
            os.replace(temporary, self._path(state_round))
        except (OSError, SafetensorError) as error:
            message = f"client {self.partition}: its state cannot be written to {self.folder}: {error}"
            raise ValueError(message) from error
        rounds = sorted(int(match[1]) for path in self.folder.iterdir() if (match := NAME.fullmatch(path.name)))
        needed = max((number for number in rounds if number <= durable_round), default=0)
        for number in rounds:
            if number < needed or number > state_round:
                self._path(number).unlink(missing_ok=True)

    def _path(self, state_round: int) -> Path:
        return self.folder / f"round-{state_round:06d}.safetensors"


class ContextStore:
    """Flower's own ``context.state``: no disk needed, copied to the worker and back with every message."""

    def __init__(self, context: Context, partition: int) -> None:
        self.context, self.partition = context, partition

    def load(self, state_round: int) -> dict[str, Tensor]:
        """Return the state of ``state_round``; ``ValueError`` when the context holds another or none."""
        marker, arrays = self.context.state.get("round"), self.context.state.get("model")
        found = marker.get("round") if isinstance(marker, ConfigRecord) else None
        if found != state_round or not isinstance(arrays, ArrayRecord):
            holds = "none" if found is None else f"that of round {found!r}"
            raise ValueError(
                f"client {self.partition}: its state of round {state_round} is lost: the context holds {holds}"
            )
        return decode_tensors(arrays, f"the context of client {self.partition}")

    def save(self, state_round: int, tensors: dict[str, Tensor], durable_round: int) -> None:
        """Put the state of ``state_round`` in place of the earlier one."""
        self.context.state["round"] = ConfigRecord({"round": state_round})
        self.context.state["model"] = encode_tensors(tensors)


def open_store(config: Config, node: NodeSettings, context: Context, session: str) -> StateStore:
    """Return the store of this client in the run called ``session``.

    The folder is the node's ``state-dir``, or ``federation.state_dir``, or ``client-state`` in the results folder,
    or ``~/protofed-results/client-state``; in it, one folder a run and partition.
    """
    if config.federation.state == "context":
        return ContextStore(context, node.partition)
    output = config.resume or str(context.run_config.get("output-dir", ""))
    fallback = Path(output) / "client-state" if output else Path.home() / "protofed-results" / "client-state"
    chosen = node.state_dir or (Path(config.federation.state_dir) if config.federation.state_dir else fallback)
    return DiskStore(chosen.expanduser() / session / f"client-{node.partition:05d}", node.partition)
