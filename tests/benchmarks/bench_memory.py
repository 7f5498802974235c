"""Whether the processes of a run grow: resident memory of every Ray worker and of the server, by round.

Memory is read from outside, from ``/proc``, while 200 rounds of 20 tiny clients run. The slope is that of a straight
line through the samples after round 50 (``--quick``: 30 rounds, after round 10).
"""

import sys
from pathlib import Path

import numpy as np

from task.processes import descendants
from task.superlink import LocalSuperLink
from tests.benchmarks.federations import run
from tests.benchmarks.timing import finish, judge, options, table

Samples = dict[tuple[int, str], list[tuple[int, float]]]
"""Process to its list of (round, MB)."""


def role(command: str) -> str | None:
    """Return what a process of a run does, None for those that do not matter."""
    if command.startswith("ray::"):
        return "worker"
    return "server" if "flwr-serverapp" in command or "flwr-simulation" in command else None


def watch(link: LocalSuperLink, samples: Samples, folder: Path) -> None:
    """Add one sample for each process of the run, under the number of rounds done."""
    file = folder / "rounds.jsonl"
    done = file.read_text("utf-8").count("\n") if file.exists() else 0
    assert link._process is not None
    for pid, _ in descendants(link._process.pid):
        try:
            # Ray's processes rename themselves.
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            status = Path(f"/proc/{pid}/status").read_text("utf-8")
        except OSError:  # it ended meanwhile
            continue
        name = role(command)
        resident = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
        if name is not None and resident and done:
            samples.setdefault((pid, name), []).append((done, int(resident[0]) / 1024))


def main() -> None:
    quick = options(str(__doc__).split("\n", 1)[0]).quick
    if not Path("/proc/self/status").exists():
        print("skipped: there is no /proc here to read the memory of other processes from")
        sys.exit(0)
    clients, rounds, settled = (20, 30, 10) if quick else (20, 200, 50)
    samples: Samples = {}
    with LocalSuperLink() as link:
        run(link, clients, rounds, lambda folder: watch(link, samples, folder))
    rows, verdicts = [], []
    for (pid, name), points in sorted(samples.items()):
        late = np.array([point for point in points if point[0] >= settled], dtype=float)
        if len(late) < 10 or len(np.unique(late[:, 0])) < 3:
            continue
        slope = float(np.polyfit(late[:, 0], late[:, 1], 1)[0])
        rows.append((name, pid, f"{points[0][1]:.0f}", f"{late[0, 1]:.0f}", f"{late[-1, 1]:.0f}", f"{slope:+.4f}"))
        verdicts.append((f"{name} {pid}, MB a round after round {settled}", slope))
    print(f"Resident memory over {rounds} rounds of {clients} tiny clients")
    table(("process", "pid", "MB at first", f"MB at round {settled}", "MB at the end", "MB a round"), rows)
    if not any(row[0] == "worker" for row in rows):
        raise RuntimeError("no Ray worker was seen")
    finish(judge(what, slope, most=0.1) for what, slope in verdicts)


if __name__ == "__main__":
    main()
