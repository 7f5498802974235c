"""The only file that keeps anything between two messages: a client's private model.

A client object lives for one message. Its state is kept under the round whose training made it, and asked for under
exactly that round, so that a client whose state is lost says so instead of quietly starting anew.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from flwr.app import ArrayRecord, Context
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from client_app.node_facts import NodeFacts
from task.payload import decode_tensors, encode_tensors
from task.schema import Config

NAME = re.compile(r"round-(\d{6})\.safetensors")
STATE = "state-of-round-"


class StateStore(Protocol):
    """Where a client's state waits."""

    def load(self, state_round: int) -> dict[str, Tensor]:
        """Return the state that the training of ``state_round`` made; ``ValueError`` when it is lost."""

    def save(self, state_round: int, tensors: dict[str, Tensor], needed: Collection[int]) -> None:
        """Keep the state of ``state_round``; of the earlier ones only those of the ``needed`` rounds.

        Later ones are never touched: a client that was too slow for its round may save after the next one.
        """


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

    def save(self, state_round: int, tensors: dict[str, Tensor], needed: Collection[int]) -> None:
        """Write the state of ``state_round`` atomically and remove the earlier ones that nobody can ask for again."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = self.folder / f".round-{state_round:06d}.{os.getpid()}"
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)
            os.replace(temporary, self._path(state_round))
        except (OSError, SafetensorError) as error:
            message = f"client {self.partition}: its state cannot be written to {self.folder}: {error}"
            raise ValueError(message) from error
        rounds = [int(match[1]) for path in self.folder.iterdir() if (match := NAME.fullmatch(path.name))]
        for number in rounds:
            if number < state_round and number not in needed:
                self._path(number).unlink(missing_ok=True)

    def _path(self, state_round: int) -> Path:
        return self.folder / f"round-{state_round:06d}.safetensors"


class ContextStore:
    """Flower's own ``context.state``: no disk needed, copied to the worker and back with every message."""

    def __init__(self, context: Context, partition: int) -> None:
        self.context, self.partition = context, partition

    def load(self, state_round: int) -> dict[str, Tensor]:
        """Return the state of ``state_round``; ``ValueError`` when the context does not hold it."""
        arrays = self.context.state.get(f"{STATE}{state_round}")
        if not isinstance(arrays, ArrayRecord):
            held = sorted(key.removeprefix(STATE) for key in self.context.state if key.startswith(STATE))
            raise ValueError(
                f"client {self.partition}: its state of round {state_round} is lost: the context holds "
                f"{'that of rounds ' + ', '.join(held) if held else 'none'}"
            )
        return decode_tensors(arrays, f"the context of client {self.partition}")

    def save(self, state_round: int, tensors: dict[str, Tensor], needed: Collection[int]) -> None:
        """Put the state of ``state_round`` into the context and take out the earlier ones that are not needed."""
        self.context.state[f"{STATE}{state_round}"] = encode_tensors(tensors)
        for key in list(self.context.state):
            number = int(key.removeprefix(STATE)) if key.startswith(STATE) else state_round
            if number < state_round and number not in needed:
                del self.context.state[key]


def open_store(config: Config, node: NodeFacts, context: Context, session: str) -> StateStore:
    """Return the store of this client in the run called ``session``.

    The folder is the node's ``state-dir``, or ``federation.state_dir``, or ``client-state`` in the results folder,
    or ``~/protofed-results/client-state``; in it, one folder a run and partition.
    """
    if config.federation.state == "context":
        return ContextStore(context, node.partition)
    output = config.resume or str(context.run_config.get("output-dir", ""))
    home = Path.home() / "protofed-results" / "client-state"
    default = Path(output).expanduser() / "client-state" if output else home
    if config.resume and not (default / session).exists():
        default = home  # the run began without an output-dir
    chosen = node.state_dir or (Path(config.federation.state_dir) if config.federation.state_dir else default)
    return DiskStore(chosen.expanduser() / session / f"client-{node.partition:05d}", node.partition)
