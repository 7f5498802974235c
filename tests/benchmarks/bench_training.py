"""One local epoch of FedTGP's client through the app's training loop, against the same steps written by hand."""

from unittest.mock import patch

import torch
from flwr.app import Context, RecordDict
from torch import Tensor
from torch.nn import functional

from client_app.loop import Step, fit_epochs
from client_app.session import Session, open_session
from client_app.trainers import prototype
from client_app.trainers.base import Trainer
from task.config import build
from task.losses import class_mean_distance
from task.messages import Download, PrototypeSet
from tests.benchmarks.timing import finish, interleave, judge, milliseconds, options, table

CLIENTS = 20
# The paper's local objective, whatever the defaults of the day are.
RECIPE = "algorithm=fedtgp algorithm.client.weight=0.1 algorithm.client.distance=class_mean_l2"
OVERRIDES = f"{RECIPE} partition=iid train.local_epochs=1 federation.num_clients={CLIENTS}"


def session_of(partition: int) -> Session:
    """Return a client's session as a message would open it."""
    node = {"partition-id": partition, "num-partitions": CLIENTS}
    run_config = {"overrides": OVERRIDES, "output-dir": ""}
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=run_config)
    session = open_session(context)
    protos = torch.randn(session.num_classes, session.config.model.feature_dim)
    session.download = Download(PrototypeSet(torch.arange(session.num_classes), protos), round=1, session="bench")
    return session


def step_of(session: Session) -> Step:
    """Return the step that FedTGP's trainer gives to the training loop."""
    found: list[Step] = []

    def capture(_: Session, step: Step, *args: object, **kwargs: object) -> dict[str, float]:
        found.append(step)
        return {}

    trainer = build(session.config.algorithm.client, "algorithm.client")
    assert isinstance(trainer, Trainer)
    with patch.object(prototype, "fit_epochs", capture):
        trainer.fit(session)
    return found[0]


def by_hand(session: Session, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Take the same steps with nothing around them."""
    model = session.model
    assert session.download.prototypes is not None
    protos, known = session.download.prototypes.dense(session.num_classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=session.config.train.lr)
    model.train()
    for images, labels in batches:
        features = model.features(images)
        loss = functional.cross_entropy(model.head(features), labels)
        loss = loss + 0.1 * class_mean_distance(features, labels, protos, known)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    quick = options(str(__doc__).split("\n", 1)[0]).quick
    rows, good = [], []
    for partition in range(4):
        session = session_of(partition)
        torch.set_num_threads(1)
        step, batches = step_of(session), [(x.clone(), y.clone()) for x, y in session.train_batches()]
        pairs = interleave(
            lambda s=session, t=step: fit_epochs(s, t),
            lambda s=session, b=batches: by_hand(s, b),
            2 if quick else 25,
        )
        times = milliseconds(pairs.second), milliseconds(pairs.first)
        rows.append((session.model_name, len(batches), *times, f"{pairs.ratio:.3f}", pairs.spread))
        good.append((session.model_name, pairs.ratio))
    print("One local epoch with batches of 10, CPU time of one thread; the app's side also makes the batches")
    table(("model", "batches", "by hand ms", "app ms", "ratio", "quartiles"), rows)
    finish(judge(f"{name}, app over by hand", ratio, most=1.2) for name, ratio in good)


if __name__ == "__main__":
    main()
