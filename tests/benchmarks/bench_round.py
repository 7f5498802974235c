"""A training round of each method through the app, over its own forward and backward passes in bare loops.

The app's side is everything that a round does in the two apps, in one process: messages made and checked, clients'
states read from disk and written, models built, training, the server's step. Left out is only what Flower does between
the apps (``bench_flower_overhead``). The bare side is in ``bare_rounds.py``.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.supercore.task_identity import TaskIdentity

from client_app.session import Session, open_session
from server_app.recorder import Recorder
from server_app.roster import discover
from server_app.strategies.base import RoundStrategy, Run
from task.config import build, load
from tests.benchmarks.bare_rounds import BARE
from tests.benchmarks.timing import Steps, finish, interleave_steps, judge, milliseconds, options, table
from tests.fake_grid import FakeGrid

SETTINGS = "data=fashion_small partition=dirichlet partition.alpha=0.1 model=htcnn4 train.batch_size=10"


class AppRound:
    """A federation in one process that trains for one round more at each call."""

    def __init__(self, algorithm: str, clients: int, folder: Path, settings: str = SETTINGS) -> None:
        overrides = f"algorithm={algorithm} {settings} federation.num_clients={clients}"
        config = load(overrides)
        # Flower stamps messages with the identity of the process; here one process plays every part.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
        self.grid = FakeGrid(clients, {"overrides": overrides, "output-dir": str(folder)})
        recorder = Recorder(folder, config, overrides, "bench")
        run = Run(config, discover(self.grid, config), recorder, "bench", torch.device("cpu"))
        strategy = build(config.algorithm.server, "algorithm.server")
        assert isinstance(strategy, RoundStrategy)
        self.strategy = strategy
        strategy.bind(run)

    def __call__(self) -> Iterator[None]:
        """Train for one round: one client a step, then the server."""
        run = self.strategy.run
        number = run.done + 1
        messages = self.strategy.configure_train(number, ArrayRecord(), ConfigRecord(), self.grid)
        replies: list[Message] = []
        for message in messages:
            replies += self.grid.send_and_receive([message])
            yield
        self.strategy.aggregate_train(number, replies)
        run.done = number
        if self.strategy._row["failures"]:
            raise RuntimeError(f"clients failed: {self.strategy._row['failures']}")
        self.grid.sent.clear()
        self.grid.replies.clear()

    def sessions(self) -> list[Session]:
        """Return a session of each client, for the same clients' passes alone."""
        return [open_session(context) for context in self.grid.contexts.values()]


def compare(
    methods: Mapping[str, Callable[[RoundStrategy, Sequence[Session]], Steps]],
    settings: str,
    clients: int,
    repeats: int,
    most: float,
    more: Mapping[str, str] = {},
) -> None:
    """Print the table of the ``methods``, given with their bare rounds, and exit with its verdict.

    ``more`` settings are those of one method alone.
    """
    rows, good = [], []
    for algorithm, bare in methods.items():
        with tempfile.TemporaryDirectory() as name:
            app = AppRound(algorithm, clients, Path(name), f"{settings} {more.get(algorithm, '')}")
            list(app())  # only then is there anything to share, and a state to restore
            pairs = interleave_steps(app, bare(app.strategy, app.sessions()), repeats)
        times = milliseconds(pairs.second), milliseconds(pairs.first)
        rows.append((algorithm, *times, f"{pairs.ratio:.3f}", pairs.spread))
        good.append((algorithm, pairs.ratio))
    print(f"One training round of {clients} clients, medians of {repeats}, CPU time of one thread")
    table(("method", "bare ms", "app ms", "ratio", "quartiles"), rows)
    finish(judge(f"{name}, app over bare", ratio, most=most) for name, ratio in good)


def main() -> None:
    quick = options(str(__doc__).split("\n", 1)[0]).quick
    clients, repeats, less = (4, 1, "partition.max_samples=400") if quick else (20, 7, "")
    compare(BARE, f"{SETTINGS} {less}", clients, repeats, most=1.2)


if __name__ == "__main__":
    main()
