"""``make deploy-demo``: three hospitals and a server on this machine, with TLS and node keys, and the table at the end.

What each step is on machines of your own, and why, is in ``server_app/README.md``.
"""

import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

from task.data.labels import encode_labels
from task.data.partition import Dirichlet
from task.data.sources import FashionSmall
from task.progress import Progress
from task.results import read_run
from task.tables import client_table, summary_lines
from tests.e2e.deployment import Deployment

# Each hospital and its architecture, an entry of model=htcnn4.
HOSPITALS = {"north": "plain", "south": "vgg", "west": "separable"}
ROUNDS, IMAGES = 4, 1500
OVERRIDES = (
    "algorithm=fedtgp data=own partition=given model=htcnn4 train=steady "
    f"federation.rounds={ROUNDS} federation.num_clients={len(HOSPITALS)} federation.node_timeout=300"
)


def write_data(folder: Path) -> dict[str, Path]:
    """Divide images that ship with the project among the hospitals: two have folders of files, one an archive."""
    raw = FashionSmall().read()
    labels, names, _ = encode_labels(raw.labels, raw.class_names)
    classes = [name.replace("/", "-").lower() for name in names]  # names of folders
    scheme = Dirichlet(alpha=0.5, max_samples=IMAGES)
    shares = scheme.split(labels, len(names), len(HOSPITALS), seed=0)
    paths = {}
    for hospital, share in zip(HOSPITALS, shares, strict=True):
        mine, paths[hospital] = np.concatenate([share.train, share.test]), folder / hospital
        if hospital == "south":
            paths[hospital].mkdir(parents=True)
            texts = np.array([classes[label] for label in labels[mine]])
            np.savez(paths[hospital] / "images.npz", x=raw.images[mine], y=texts)
            continue
        for index in mine:
            place = paths[hospital] / classes[labels[index]]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(raw.images[index].squeeze()).save(place / f"{index}.png")
    return paths


def main() -> int:
    """Run the demo; the exit status is 0 when the run completed without a loss."""
    folder = Path.cwd() / "outputs" / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-deploy-demo"
    say("making a certificate authority and the server's certificate")
    with Deployment("keys") as deployment:
        say(f"the SuperLink runs: TLS on, unknown nodes refused, SuperNodes at {deployment.address}")
        for hospital, data in write_data(deployment.home / "data").items():
            deployment.hospital(hospital, data, model=HOSPITALS[hospital])
            say(f"{hospital}: key made and registered, SuperNode started, model {HOSPITALS[hospital]}, data in {data}")
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
