"""One at a time in a folder: locks that end with the process that holds them, however it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LAUNCHER = ".launcher.lock"
"""Held by the command ``protofed`` that works in the folder."""
RUN = ".run.lock"
"""Held by the ServerApp that writes into the folder, through whichever door it was started."""


class FolderInUseError(ValueError):
    """Somebody else is at work in the folder."""


@contextmanager
def alone_in(folder: Path, name: str, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock ``name`` of ``folder``, for which others get ``patience`` seconds to finish.

    Raises
    ------
    FolderInUseError
        One line with the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / name)
    try:
        lock.acquire(timeout=patience)
    except Timeout as error:
        raise FolderInUseError(f"another run or sweep is at work in {folder}") from error
    try:
        yield
    finally:
        lock.release()


def is_in_use(folder: Path, name: str) -> bool:
    """Tell whether somebody holds the lock ``name`` of ``folder``."""
    if not (folder / name).exists():
        return False
    try:
        with FileLock(folder / name, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a folder that may only be read tells nothing
        return False
