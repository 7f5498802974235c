"""What the benchmarks share: two ways of doing the same, timed in turn, and judged by the median of their ratios.

Other work on the machine slows both sides of a pair alike, so a ratio of neighbours means something where a time in
seconds would not. Computations are timed in CPU seconds of this process, on one thread, so that time in which the
machine did something else does not count.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

Work = Callable[[], object]
Steps = Callable[[], Iterator[object]]
END = object()


@dataclass(frozen=True)
class Pairs:
    """Seconds of two pieces of work, measured alternately."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """First over second, pair by pair, ascending."""
        return sorted(one / two for one, two in zip(self.first, self.second, strict=True))

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> str:
        """The quartiles of the ratios, as text."""
        if len(self.ratios) < 4:
            return f"{self.ratios[0]:.2f} to {self.ratios[-1]:.2f}"
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return f"{low:.2f} to {high:.2f}"


def interleave(first: Work, second: Work, repeats: int, warm_up: bool = True) -> Pairs:
    """Time ``first`` and ``second`` alternately in CPU seconds, after one untimed run of each."""
    if warm_up:
        first(), second()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for work, into in zip((first, second), times, strict=True):
            begin = time.process_time()
            work()
            into.append(time.process_time() - begin)
    return Pairs(tuple(times[0]), tuple(times[1]))


def interleave_steps(first: Steps, second: Steps, repeats: int) -> Pairs:
    """Time long work of as many steps on both sides, step by step alternately; the times of a piece are added up."""
    sides, pairs = (first, second), []
    for number in range(repeats + 1):
        running, sums, ended = [side() for side in sides], [0.0, 0.0], False
        while not ended:
            for index, steps in enumerate(running):
                begin = time.process_time()
                ended = next(steps, END) is END
                sums[index] += time.process_time() - begin
        if number:  # the first piece warms up
            pairs.append(sums)
    return Pairs(tuple(one for one, _ in pairs), tuple(two for _, two in pairs))


def milliseconds(seconds: Sequence[float]) -> str:
    """Return the median of some times, as text."""
    return f"{1e3 * statistics.median(seconds):.3f}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table with aligned columns."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def judge(what: str, found: float, *, least: float | None = None, most: float | None = None) -> bool:
    """Print whether ``found`` is within its limit, and return it."""
    good = (least is None or found >= least) and (most is None or found <= most)
    limit = f"at least {least:g}" if least is not None else f"at most {most:g}"
    print(f"{'ok  ' if good else 'MISS'}  {what}: {found:.2f} ({limit} is needed)")
    return good


def options(description: str, **flags: str) -> argparse.Namespace:
    """Parse the command line (``--quick``, and more ``flags`` with their help), and use one thread from here on."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a small size, to see that it works")
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    torch.set_num_threads(1)
    return parser.parse_args()


def finish(verdicts: Iterable[bool]) -> None:
    """End with exit status 0 when all is good and 1 otherwise, after a word when the machine was busy."""
    good = [*verdicts]
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load > cores + 0.5:
        print(f"note: noisy, the load is {load:.1f} on {cores} cores; repeat on a quiet machine before believing it")
    sys.exit(0 if all(good) else 1)
