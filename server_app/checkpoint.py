"""The server's side of a resumable run: the method's state and the round, in one file written atomically."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE = "state.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from: the last complete ``round``, its ``session``, each client's state round and name."""

    round: int
    session: str
    state_rounds: dict[int, int]
    num_clients: int
    names: dict[int, str] = field(default_factory=dict)


def save_checkpoint(folder: Path, state: dict[str, Tensor], checkpoint: Checkpoint) -> None:
    """Write the state of the method and the ``checkpoint``; a crash leaves the earlier file whole."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{FILE}.{os.getpid()}"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, temporary, metadata={"checkpoint": json.dumps(asdict(checkpoint))})
    os.replace(temporary, folder / FILE)


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], Checkpoint]:
    """Return the state of the method and the ``Checkpoint``.

    Raises
    ------
    ValueError
        One line naming the file, when there is none or it is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the run in {folder.parent} has no checkpoint to go on from")
    try:
        with safe_open(path, framework="pt") as file:
            fields = json.loads(file.metadata()["checkpoint"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rounds = {int(partition): int(value) for partition, value in fields["state_rounds"].items()}
        names = {int(partition): str(name) for partition, name in fields.get("names", {}).items()}
        numbers = int(fields["round"]), int(fields["num_clients"])
        return state, Checkpoint(numbers[0], str(fields["session"]), rounds, numbers[1], names)
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
