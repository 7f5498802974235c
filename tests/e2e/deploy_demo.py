"""``make deploy-demo``: three hospitals and a server on this machine, with TLS and node keys, and the table at the end.

What each step is on machines of your own, and why, is in ``server_app/README.md``.
"""

import sys
import time
from pathlib import Path

from task.progress import Progress
from task.results import read_run
from task.tables import client_table, summary_lines
from tests.e2e.deployment import Deployment

HOSPITALS = ("north", "south", "west")
ROUNDS = 4
OVERRIDES = (
    "algorithm=fedtgp data=fashion_small partition.alpha=0.5 partition.max_samples=1500 model=htcnn4 train=steady "
    f"federation.rounds={ROUNDS} federation.num_clients={len(HOSPITALS)} federation.node_timeout=300"
)


def main() -> int:
    """Run the demo; the exit status is 0 when the run completed without a loss."""
    folder = Path.cwd() / "outputs" / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-deploy-demo"
    say("making a certificate authority and the server's certificate")
    with Deployment("keys") as deployment:
        say(f"the SuperLink runs: TLS on, unknown nodes refused, SuperNodes at {deployment.address}")
        for partition, hospital in enumerate(HOSPITALS):
            deployment.member(hospital, partition, len(HOSPITALS))
            say(f"{hospital}: key made and registered, SuperNode started")
        say("flwr run . deployment --stream")
        run = deployment.run(OVERRIDES, folder)
        progress = Progress(folder, ROUNDS, "waiting for the nodes")
        while run.process.poll() is None and not (folder / "summary.json").exists():
            time.sleep(0.2)
            for line in progress.lines():
                say(line)
        status = deployment.finish(run, folder)["status"]
        say("stopping everything")
    result = read_run(folder)
    say("\n".join(["", client_table(result), "", *summary_lines(result)]))
    return 0 if status == "completed" else 1


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
