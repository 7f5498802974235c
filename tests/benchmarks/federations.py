"""Real simulations of Flower for the benchmarks: our app with next to no training, and an app that does nothing."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from task.jobs import cpu_cores
from task.superlink import LocalSuperLink

# Three images for training and one for testing a client, a model of some hundred parameters, one server epoch.
TINY_MODEL = "[{name: tiny, _target_: task.models.small.plain, width: 1, features: 16}]"
TINY = (
    "algorithm=fedtgp algorithm.server.epochs=1 data=fashion_small partition=iid "
    f"'model.entries={TINY_MODEL}' model.feature_dim=16"
)
SAMPLES = 4

EMPTY_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "empty"
version = "0.0.1"
license = "Apache-2.0"
dependencies = ["flwr[simulation]"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "empty_app:server"
clientapp = "empty_app:client"

[tool.flwr.app.config]
clients = ""
rounds = ""
output-dir = ""
"""
EMPTY_APP = '''\
"""A server that sends empty messages to all clients, twice a round, and clients that send them back."""

import json
import time
from pathlib import Path

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    return Message(RecordDict(), reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return Message(RecordDict(), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    nodes: list[int] = []
    while len(nodes) < int(context.run_config["clients"]):
        time.sleep(0.2)
        nodes = sorted(grid.get_node_ids())
    with (Path(context.run_config["output-dir"]) / "rounds.jsonl").open("w") as file:
        for number in range(1, int(context.run_config["rounds"]) + 1):
            began = time.monotonic()
            for kind in (MessageType.TRAIN, MessageType.EVALUATE):
                messages = [Message(RecordDict(), dst_node_id=node, message_type=kind) for node in nodes]
                replies = list(grid.send_and_receive(messages, timeout=600.0))
                assert len(replies) == len(nodes) and not any(reply.has_error() for reply in replies)
            row = {"round": number, "seconds": {"round": time.monotonic() - began}}
            file.write(json.dumps(row) + "\\n")
'''


class EmptySuperLink(LocalSuperLink):
    """A private SuperLink that runs the empty app instead of ours."""

    def __init__(self) -> None:
        super().__init__()
        target = self.home / "project"
        target.mkdir()
        (target / "pyproject.toml").write_text(EMPTY_PROJECT, encoding="utf-8")
        (target / "empty_app.py").write_text(EMPTY_APP, encoding="utf-8")
        (target / "README.md").write_text("An app that does nothing.\n", encoding="utf-8")


def run(
    link: LocalSuperLink, clients: int, rounds: int, watch: Callable[[Path], object] = lambda folder: None
) -> list[float]:
    """Run one simulation to its end and return the seconds of its rounds; ``watch(folder)`` is called all the time."""
    cores = min(cpu_cores(), clients)
    simulation = f"num-supernodes={clients} client-resources-num-cpus=1 init-args-num-cpus={cores}"
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "flower.log"
        settings = {"output-dir": str(folder)}
        if isinstance(link, EmptySuperLink):
            settings |= {"clients": str(clients), "rounds": str(rounds)}
        else:
            settings["overrides"] = f"{TINY} partition.max_samples={SAMPLES * clients} federation.rounds={rounds}"
        process = link.submit(settings, simulation, log)
        while process.poll() is None:
            watch(folder)
            time.sleep(0.2)
        file = folder / "rounds.jsonl"
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
        if len(lines) < rounds:
            raise RuntimeError(
                f"{len(lines)} of {rounds} rounds were done:\n{log.read_text('utf-8', 'replace')[-3000:]}"
            )
        return [json.loads(line)["seconds"]["round"] for line in lines]


@contextmanager
def superlinks() -> Iterator[tuple[LocalSuperLink, EmptySuperLink]]:
    """Start a SuperLink for our app and one for the empty app."""
    with LocalSuperLink() as ours, EmptySuperLink() as empty:
        yield ours, empty
