"""A SuperLink that is none: it runs a small Python program in the place of ``flwr run``."""

import json
import subprocess
import sys
from pathlib import Path

SUMMARY = {
    "algorithm": "fedproto",
    "data": "fashion_small",
    "model": "htcnn4",
    "seed": 0,
    "rounds": 1,
    "rounds_done": 1,
    "last_accuracy": 0.5,
    "best_accuracy": 0.5,
    "best_round": 1,
}


class FakeLink:
    """Runs ``program`` with the results folder and the overrides as its arguments."""

    has_ray, is_alive, ray_cores = False, True, None

    def __init__(self, program: str) -> None:
        self.program = program
        self.stopped = 0
        self.seen: list[str] = []

    def __enter__(self) -> "FakeLink":
        return self

    def submit(self, run_config: dict[str, str], federation_config: str, log: Path) -> subprocess.Popen[bytes]:
        """Start the program."""
        self.run_config, self.federation_config = run_config, federation_config
        self.seen.append(run_config["overrides"])
        with log.open("ab") as stream:
            command = [sys.executable, "-S", "-c", self.program, run_config["output-dir"], run_config["overrides"]]
            return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)

    def stop_run(self, log: Path) -> bool:
        """Count that it was asked to stop."""
        self.stopped += 1
        return True

    def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True


def program(status: str | None = "completed", before: str = "") -> str:
    """Return a program that writes a round and, unless ``status`` is None, a summary."""
    summary = SUMMARY | {"status": status, "reason": "why" if status == "failed" else None}
    text = f"import pathlib, sys, os, time\nfolder = pathlib.Path(sys.argv[1])\n{before}\n"
    row = json.dumps({"round": 1, "accuracy": 0.5, "failures": [], "seconds": {"round": 2.0}})
    text += f"(folder / 'rounds.jsonl').write_text({row + chr(10)!r})\n"
    return text + (f"(folder / 'summary.json').write_text({json.dumps(summary)!r})\n" if status else "")
