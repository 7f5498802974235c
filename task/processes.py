"""Ends the processes of a run, also when the launcher itself was killed. Also a program: the guard.

The guard waits until its standard input ends, which happens when the launcher is gone for whatever reason, and
then does the cleaning up that the launcher could not do. Also the signals that ask the launcher itself to end.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

PATIENCE = 10.0  # seconds that processes get to end by themselves
OWNER = "owner"
Process = tuple[int, str]
"""A process id and the start time of the process, so that a number used again is not mistaken for it."""


def start_guard(root: int, home: str) -> subprocess.Popen[bytes]:
    """Start a process that calls ``end_all(root, home)`` and removes ``home`` when this process is gone."""
    # Isolated, because the neighbours of this file must not hide modules of the standard library.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(root), home],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=os.name == "posix",
    )


def end_all(root: int | None, home: str) -> None:
    """End the process ``root``, everything below it, and everything whose ``FLWR_HOME`` is ``home`` or lies in it.

    Flower's and Ray's processes can outlive their parents; the environment that they inherited still tells
    whose they are.
    """
    ours = carriers(f"FLWR_HOME={home}")
    if root is not None:
        ours |= descendants(root) | {process for process in process_table() if process[0] == root}
    _send(signal.SIGTERM, ours)
    deadline = time.monotonic() + PATIENCE
    while ours & process_table().keys() and time.monotonic() < deadline:
        time.sleep(0.1)
    ours |= carriers(f"FLWR_HOME={home}")
    _send(signal.SIGKILL if os.name == "posix" else signal.SIGTERM, ours & process_table().keys())


def sign(home: Path) -> None:
    """Write into the folder ``home`` that it belongs to this process."""
    mine = [process for process in process_table() if process[0] == os.getpid()]
    (home / OWNER).write_text("".join(f"{pid} {start}\n" for pid, start in mine), encoding="utf-8")


def remove_leftovers(parent: Path, prefix: str) -> list[Path]:
    """End what is left of commands that were killed together with their guards; return the removed folders.

    Only the folders that this user's own commands signed count, and of them those whose command is gone.
    """
    running = {f"{pid} {start}" for pid, start in process_table()}
    removed = []
    for owner in parent.glob(f"{prefix}*/{OWNER}"):
        with contextlib.suppress(OSError):  # another command cleans up as well
            mine = owner.stat().st_uid == os.getuid() if hasattr(os, "getuid") else False
            signed = owner.read_text("utf-8").strip()
            if mine and signed and signed not in running:
                end_all(None, str(owner.parent))
                shutil.rmtree(owner.parent, ignore_errors=True)
                removed.append(owner.parent)
    return removed


def process_table() -> dict[Process, int]:
    """Return the parent's id of every process, read from ``/proc`` or from ``ps`` where there is none."""
    if not Path("/proc/self/stat").exists():
        if os.name != "posix":
            return {}
        listing = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid=,lstart="], text=True)
        rows = [line.split(None, 2) for line in listing.splitlines()]
        return {(int(pid), start): int(parent) for pid, parent, start in rows}
    table = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            if fields[0] != "Z":
                table[int(folder.name), fields[19]] = int(fields[1])
    return table


def descendants(root: int) -> set[Process]:
    """Return all children of the process ``root``, their children, and so on; without ``root``."""
    table = process_table()
    found: set[Process] = set()
    reached = {root}
    while True:
        new = {process for process, parent in table.items() if parent in reached} - found
        if not new:
            return found
        found |= new
        reached |= {pid for pid, _ in new}


def carriers(setting: str) -> set[Process]:
    """Return the other processes with ``setting`` (``KEY=value``) in their environment; none without ``/proc``.

    Where the value is a folder, the folders in it count, too.
    """
    wanted = setting.encode()
    found = set()
    for process in process_table():
        with contextlib.suppress(OSError):
            settings = Path(f"/proc/{process[0]}/environ").read_bytes().split(b"\0")
            ours = any(one == wanted or one.startswith(wanted + b"/") for one in settings)
            if ours and process[0] != os.getpid():
                found.add(process)
    return found


def _send(number: signal.Signals, processes: Iterable[Process]) -> None:
    for pid, _ in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let every signal that asks for an end raise ``KeyboardInterrupt``, like Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handling(interrupt):
        yield


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Let nothing break the cleaning up, which takes a limited time."""
    with _handling(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


if __name__ == "__main__":
    sys.stdin.read()
    end_all(int(sys.argv[1]), sys.argv[2])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
