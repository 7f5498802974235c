"""What a run holds on to, by round: memory of its processes, and the size of its log, its state and its results.

Memory (resident, MB) of every Ray worker, of the server and of the SuperLink is read from outside, from ``/proc``,
while 300 rounds of 20 tiny clients run, as are the sizes of what grows on disk. The slope is that of a straight line
through the samples after round 50 (``--quick``: 30 rounds, after round 10).
"""

import sys
from pathlib import Path

import numpy as np

from task.processes import descendants
from task.superlink import LocalSuperLink
from tests.benchmarks.federations import run
from tests.benchmarks.timing import finish, judge, options, table

Samples = dict[str, list[tuple[int, float]]]
"""What was measured to its list of (round, MB)."""
SLOPE = 100.0
"""kB a round that any process may grow by."""
# The results get a line a round, and Flower's log some lines for each message: 20 clients, two messages each.
ON_DISK = {
    "client state": 10.0,
    "checkpoint": 1.0,
    "SuperLink's folder": 10.0,
    "rounds.jsonl": 20.0,
    "flower.log": 20.0,
}
"""kB a round that a folder or file may grow by."""


def role(command: str) -> str | None:
    """Return what a process of a run does, None for those that do not matter."""
    if command.startswith("ray::"):
        return "worker" if "ClientAppActor" in command else None
    if "flower-superlink" in command:
        return "SuperLink"
    return "server" if "flwr-serverapp" in command or "flwr-simulation" in command else None


def megabytes(place: Path) -> float:
    """Return the size of a file, or of all files in a folder; those that vanish meanwhile count as nothing."""
    total = 0
    for path in [place, *place.rglob("*")] if place.is_dir() else [place]:
        try:
            total += path.lstat().st_size if not path.is_dir() else 0
        except OSError:
            continue
    return total / 2**20


def watch(link: LocalSuperLink, samples: Samples, folder: Path) -> None:
    """Add one sample for each process of the run and each place on disk, under the number of rounds done."""
    file = folder / "rounds.jsonl"
    done = file.read_text("utf-8").count("\n") if file.exists() else 0
    assert link._process is not None
    if not done:
        return
    for pid in [link._process.pid, *(pid for pid, _ in descendants(link._process.pid))]:
        try:
            # Ray's processes rename themselves.
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            status = Path(f"/proc/{pid}/status").read_text("utf-8")
        except OSError:  # it ended meanwhile
            continue
        name = role(command)
        resident = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
        if name is not None and resident:
            samples.setdefault(f"{name} {pid}", []).append((done, int(resident[0]) / 1024))
    if samples.get("flower.log", [(0, 0.0)])[-1][0] == done:
        return  # once a round is enough for what lies on disk
    places = {"client state": folder / "client-state", "checkpoint": folder / "checkpoint"}
    places |= {"rounds.jsonl": file, "flower.log": folder / "flower.log"}
    # Without the project and Ray's own folders: what the SuperLink keeps of runs and messages.
    sizes = {name: megabytes(place) for name, place in places.items()}
    sizes["SuperLink's folder"] = sum(megabytes(path) for path in link.home.iterdir() if path.is_file())
    for name, size in sizes.items():
        samples.setdefault(name, []).append((done, size))


def main() -> None:
    quick = options(str(__doc__).split("\n", 1)[0]).quick
    if not Path("/proc/self/status").exists():
        print("skipped: there is no /proc here to read the memory of other processes from")
        sys.exit(0)
    clients, rounds, settled = (20, 30, 10) if quick else (20, 300, 50)
    samples: Samples = {}
    with LocalSuperLink() as link:
        run(link, clients, rounds, lambda folder: watch(link, samples, folder))
    rows, verdicts = [], []
    for name, points in sorted(samples.items()):
        late = np.array([point for point in points if point[0] >= settled], dtype=float)
        if len(late) < 10 or len(np.unique(late[:, 0])) < 3:
            continue
        slope = 1024 * float(np.polyfit(late[:, 0], late[:, 1], 1)[0])
        rows.append((name, f"{points[0][1]:.2f}", f"{late[0, 1]:.2f}", f"{late[-1, 1]:.2f}", f"{slope:+.2f}"))
        verdicts.append((f"{name}, kB a round after round {settled}", slope, ON_DISK.get(name, SLOPE)))
    print(f"What a run of {rounds} rounds with {clients} tiny clients holds")
    table(("of what", "MB at first", f"MB at round {settled}", "MB at the end", "kB a round"), rows)
    for wanted in ("worker", "server", "SuperLink ", *ON_DISK):
        if not any(row[0].startswith(wanted) for row in rows):
            raise RuntimeError(f"{wanted} was not seen")
    finish(judge(what, slope, most=most) for what, slope, most in verdicts)


if __name__ == "__main__":
    main()
