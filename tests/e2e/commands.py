"""Starts the project's commands as a user does, and finds every process that they leave behind."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from task import processes

REPOSITORY = Path(__file__).resolve().parents[2]
PROTOFED = [sys.executable, "-c", "import sys; sys.argv[0] = 'protofed'; from task.launch import main; main()"]


@dataclass
class Started:
    """A running ``protofed``, whose output goes to a file."""

    process: "subprocess.Popen[bytes]"
    output: Path
    mark: str

    @property
    def text(self) -> str:
        return self.output.read_text("utf-8", "replace")

    def wait_for(self, words: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.1)

    def left_behind(self, seconds: float) -> set[processes.Process]:
        """Return the processes of this command that still run after at most so many ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := processes.carriers(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


@contextmanager
def started(folder: Path, *words: str) -> Iterator[Started]:
    """Start ``protofed`` with ``words`` in ``folder``; whatever of it still runs at the end is ended."""
    name, value = "PROTOFED_TEST", uuid.uuid4().hex
    # Ray's processes rename themselves, which would wipe out the environment that the mark is in.
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), name: value, "SPT_NOENV": "1"}
    output = folder / f"output-{value[:8]}.txt"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [*PROTOFED, *words], cwd=folder, env=environment, stdout=stream, stderr=subprocess.STDOUT
        )
    command = Started(process, output, f"{name}={value}")
    try:
        yield command
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def protofed(folder: Path, *words: str, seconds: float = 300.0) -> tuple[int, str]:
    """Run ``protofed`` with ``words`` in ``folder``; return its exit status and what it printed."""
    with started(folder, *words) as command:
        code = command.process.wait(seconds)
        assert not command.left_behind(10.0)
        return code, command.text


def results(folder: Path) -> list[Path]:
    """Return the results folders that commands in ``folder`` made, oldest first."""
    return sorted((folder / "outputs").iterdir()) if (folder / "outputs").exists() else []
