"""What a job of a sweep costs beyond its rounds: with the Ray that the sweep keeps, against one that Flower starts."""

import json
import tempfile
import threading
import time
from pathlib import Path

from task import processes
from task.jobs import cpu_cores, plan
from task.running import Engine, Share
from tests.benchmarks.timing import finish, judge, milliseconds, options, table

WORDS = ("algorithm=fedproto", "partition.max_samples=120", "federation.num_clients=2", "federation.rounds=2")
TICKS = 100  # of a second, in /proc
LOOK = 0.1


class CpuTime:
    """Adds up the CPU seconds of all processes below one home folder, as far as looks every 0.1 s can see."""

    def __init__(self) -> None:
        self.seconds: dict[processes.Process, float] = {}
        self._home, self._ended = "", threading.Event()

    def look(self) -> None:
        for process in processes.carriers(f"FLWR_HOME={self._home}"):
            try:
                fields = Path(f"/proc/{process[0]}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            except OSError:
                continue
            self.seconds[process] = (int(fields[11]) + int(fields[12])) / TICKS

    def follow(self, home: str) -> None:
        self._home = home
        while not self._ended.wait(LOOK):
            self.look()

    def stop(self) -> None:
        self._ended.set()


def jobs(keeps_ray: bool, number: int) -> list[tuple[float, float]]:
    """Run ``number`` jobs; return of each the wall and the CPU seconds beyond its rounds, without what all share."""
    found = []
    with tempfile.TemporaryDirectory() as name, Engine(Share(min(2, cpu_cores())), keeps_ray) as engine:
        for seed in range(number + 1):
            job, folder = plan([*WORDS, f"seed={seed}"], Path(name), 2), Path(name) / str(seed)
            cpu, before = CpuTime(), 0.0
            if engine._link is not None:
                cpu._home = str(engine._link.home)
                cpu.look()
                before = sum(cpu.seconds.values())
                threading.Thread(target=cpu.follow, args=(cpu._home,), daemon=True).start()
            started = time.perf_counter()
            outcome = engine.run(job, Path(name), folder)
            wall = time.perf_counter() - started
            cpu.stop()
            if outcome.status != "completed":
                raise RuntimeError(outcome.reason)
            rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text("utf-8").splitlines()]
            if seed:  # the first one also pays for what all share
                found.append((wall - rows[-1]["seconds"]["round"] * len(rows), sum(cpu.seconds.values()) - before))
    return found


def main() -> None:
    quick = options(str(__doc__)).quick
    number = 1 if quick else 5
    kept, own = jobs(True, number), jobs(False, number)
    rows = [
        (name, milliseconds([wall for wall, _ in each]), milliseconds([cpu for _, cpu in each]))
        for name, each in (("kept by the sweep", kept), ("started by Flower", own))
    ]
    print(f"A job of two rounds of two clients, medians of {number}; CPU time of all its processes")
    table(("Ray", "wall ms beyond the rounds", "CPU ms, rounds included"), rows)
    ratio = sorted(cpu for _, cpu in kept)[number // 2] / sorted(cpu for _, cpu in own)[number // 2]
    finish([judge("CPU time, kept over started", ratio, most=0.95)])


if __name__ == "__main__":
    main()
