"""Weights from a file into a body: safetensors only, strict, with errors that name file and key."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn


def load_pretrained(body: nn.Module, path: str, name: str) -> None:
    """Load the state dict in ``path`` into ``body``: same keys, same shapes, nothing left over.

    Such a file is what ``safetensors.torch.save_file(body.state_dict(), path)`` writes. torchvision's own
    checkpoints fit once the keys of the classifier (``fc.*``, ``classifier.*``) are taken out.

    Parameters
    ----------
    body : nn.Module
        What the entry's ``_target_`` returns: no pooling to K, no head.
    path : str
        Absolute path of a safetensors file.
    name : str
        Name of the entry, for error messages.

    Raises
    ------
    ValueError
        If the path is not absolute, the file cannot be read, or a key or shape differs.
    """
    where = f"model.pretrained.{name}: {path}"
    if not Path(path).is_absolute():
        raise ValueError(f"{where}: the path must be absolute, because Flower chooses the working folder")
    try:
        found = load_file(path)
    except FileNotFoundError as error:
        raise ValueError(f"{where}: no such file") from error
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{where}: not a readable safetensors file ({error})") from error
    _check_same(body.state_dict(), found, where)
    body.load_state_dict(found)


def _check_same(expected: dict[str, Tensor], found: dict[str, Tensor], where: str) -> None:
    """Raise ``ValueError`` for the first kind of difference between two state dicts."""
    if missing := sorted(expected.keys() - found.keys()):
        raise ValueError(f"{where}: {len(missing)} missing keys, the first {missing[0]}")
    if surplus := sorted(found.keys() - expected.keys()):
        raise ValueError(f"{where}: {len(surplus)} keys that the model does not have, the first {surplus[0]}")
    for key, tensor in expected.items():
        if tensor.shape != found[key].shape:
            raise ValueError(f"{where}: key {key} has shape {tuple(found[key].shape)}, expected {tuple(tensor.shape)}")
