"""Who has labels, and that nobody else's labels are ever used or told, through the real apps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from client_app.node_facts import has_labels, node_facts
from client_app.session import Session, open_session
from task.config import build, load
from task.data.partition import client_splits
from task.schema import LabelsConfig
from tests import contents
from tests.stripes import CLASSES, TINY, messages, model_of, rows_of, run, same, stripes, summary_of, tensors, write

SURE = "algorithm.client.threshold=0.26"  # of 4 classes: nearly every image
METRICS = {"loss", "unlabelled_loss", "lcc_loss", "gcc_loss", "proximal_loss", "confident", "pseudo_label_accuracy"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def session(path: Path, partition: int, role: str | None = None, overrides: str = "labels=few") -> Session:
    words = f"algorithm=fedavg_fixmatch {TINY} partition=iid_train data=npz data.source.path={path} {overrides}"
    run_config: dict[str, bool | float | int | str] = {"overrides": f"{words} data.cache_dir={path.parent}/cache"}
    node = {"partition-id": partition, "num-partitions": 4} | ({"role": role} if role else {})
    return open_session(Context(1, 1, node, RecordDict(), run_config))


@pytest.mark.parametrize(
    ("labels", "clients", "expected"),
    [
        (LabelsConfig(), 7, 7),
        (LabelsConfig(share=0.1), 50, 5),
        (LabelsConfig(share=0.1), 59, 5),
        (LabelsConfig(share=0.1), 4, 1),
        (LabelsConfig(share=0.3), 10, 3),
        (LabelsConfig(share=0.1, count=7), 10, 7),
    ],
)
def test_how_many_clients_have_labels(labels: LabelsConfig, clients: int, expected: int) -> None:
    assert labels.labelled_clients(clients) == expected


def test_roles_follow_the_first_ids_and_a_node_knows_better() -> None:
    config = load(f"algorithm=fedavg_fixmatch {TINY} partition=iid_train labels=few labels.count=2")
    nodes = [{"partition-id": partition, "num-partitions": 4} for partition in range(4)]
    assert [has_labels(config, node_facts(node)) for node in nodes] == [True, True, False, False]
    assert not has_labels(config, node_facts(nodes[0] | {"role": "unlabelled"}))
    assert has_labels(config, node_facts(nodes[3] | {"role": "labelled"}))
    revealed = load(f"algorithm=fedavg_sl_upper {TINY} partition=iid_train labels=few labels.count=2")
    assert all(has_labels(revealed, node_facts(node)) for node in nodes)
    with pytest.raises(ValueError, match=r"revealed.*client 1\).*nothing to reveal"):
        has_labels(revealed, node_facts(nodes[1] | {"role": "unlabelled"}))


def test_no_batch_of_an_unlabelled_client_carries_a_label(tmp_path: Path) -> None:
    path = write(tmp_path / "stripes.npz")
    labelled, unlabelled = session(path, 0), session(path, 1)
    for batches in (unlabelled.train_batches(), unlabelled.all_train_batches(), unlabelled.train_batches(raw=True)):
        assert all(bool((labels == -1).all()) for _, labels in batches)
    assert all(bool((labels >= 0).all()) for _, labels in labelled.train_batches())
    # The truth, for measurements alone, follows the order of the batches.
    unlabelled.trace.clear()
    images = torch.cat([images for images, _ in unlabelled.train_batches(raw=True)])
    truth = unlabelled.truth()
    found = {image.tobytes(): label for image, label in zip(*stripes(96, 0), strict=True)}
    assert truth is not None
    assert truth.tolist() == [found[image.numpy().tobytes()] for image in images]
    assert session(path, 1, role="unlabelled").truth() is None


@pytest.mark.parametrize("algorithm", ["fedavg_fixmatch", "dccfssl", "rscfed"])
def test_hidden_labels_never_change_what_a_client_sends(algorithm: str, tmp_path: Path) -> None:
    path = write(tmp_path / "one" / "stripes.npz")
    of = session(path, 0)
    _, y = stripes(96, 0)
    other = y.copy()
    for partition in (1, 2, 3):
        mine = session(path, partition).split.train
        other[mine] = (y[mine] + 1) % CLASSES
    assert (other[of.split.train] == y[of.split.train]).all()
    write(tmp_path / "two" / "stripes.npz", y_train=other)
    runs = [run(tmp_path / name / "run", algorithm, SURE) for name in ("one", "two")]
    accuracies = []
    for (_, partition, first), (_, _, second) in zip(*(messages(grid, "train") for grid in runs), strict=True):
        kinds = {"weights"} & set(first.content) | ({"prototypes"} if contents.has_prototypes(first) else set())
        for record in kinds:
            assert same(tensors(first, record), tensors(second, record))
        metrics = [contents.metrics(message) for message in (first, second)]
        accuracies.append([each.pop("pseudo_label_accuracy", None) for each in metrics])
        assert metrics[0] == metrics[1]
        assert partition > 0 or accuracies[-1] == [None, None]
    assert any(one != two for one, two in accuracies)  # so the labels did change, and are used for this alone
    assert same(model_of(tmp_path / "one" / "run"), model_of(tmp_path / "two" / "run"))


@pytest.mark.parametrize("algorithm", ["fedconsist", "dccfssl", "rscfed"])
def test_no_class_fact_of_an_unlabelled_client_is_on_the_wire(algorithm: str, tmp_path: Path) -> None:
    grid = run(tmp_path / "run", algorithm, SURE)
    for _, partition, reply in messages(grid, "query"):
        header = reply.content["header"]
        assert header["role"] == ("labelled" if partition == 0 else "unlabelled")
        assert ("class-counts" in header) == (partition == 0)
        assert bool(header["class-ids"]) == (partition == 0)
        assert header["train-size"] == 24
    for _, partition, reply in messages(grid, "train"):
        assert set(reply.content) <= {"header", "weights"}
        kept = {"class-ids", "vectors", "counts"} if algorithm == "dccfssl" else set()
        assert set(contents.header(reply)) == {"round", "partition", "num-examples"} | kept
        assert set(contents.metrics(reply)) <= METRICS
        assert partition > 0 or "confident" not in contents.metrics(reply)
    lines = (tmp_path / "run" / "clients.csv").read_text().splitlines()
    columns = lines[0].split(",")
    for line in lines[2:]:
        row = dict(zip(columns, line.split(","), strict=True))
        assert (row["classes"], row["class_counts"], row["train_size"]) == ("", "", "24")


def test_a_node_that_has_no_labels_says_so_and_tells_no_accuracy(tmp_path: Path) -> None:
    roles = {0: "unlabelled", 2: "labelled"}
    clients = "algorithm.evaluation=clients partition.test_fraction=0.25 labels=all"
    grid = run(tmp_path / "run", "dccfssl", f"{SURE} {clients}", roles=roles)
    metrics = {partition: set(contents.metrics(reply)) for _, partition, reply in messages(grid, "train")}
    assert "unlabelled_loss" in metrics[0]
    assert "pseudo_label_accuracy" not in metrics[0]
    assert {"unlabelled_loss", "confident"}.isdisjoint(metrics[1] | metrics[2] | metrics[3])
    assert all(row["clients_without_test"] == 1 for row in rows_of(tmp_path / "run"))
    summary = summary_of(tmp_path / "run")
    assert (summary["labelled_clients"], summary["unlabelled_clients"]) == (3, 1)


@pytest.mark.parametrize(
    ("algorithm", "overrides", "roles", "words"),
    [
        ("fedavg", "labels=all", {2: "unlabelled"}, "client 2 has no labels, and fedavg needs labels on every client"),
        ("dccfssl", "", dict.fromkeys(range(4), "unlabelled"), "none of the 4 clients has labels"),
        ("fedavg_sl_upper", "", {3: "unlabelled"}, "nothing to reveal"),
    ],
)
def test_a_roster_without_the_labels_that_a_method_needs_ends_the_run(
    algorithm: str, overrides: str, roles: dict[int, str], words: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=words):
        run(tmp_path / "run", algorithm, overrides, roles=roles)
    assert words in summary_of(tmp_path / "run")["reason"]


def test_a_source_may_lack_labels_itself(tmp_path: Path) -> None:
    _, y = stripes(96, 0)
    y[::2] = -1
    path = write(tmp_path / "stripes.npz", y_train=y)
    held = session(path, 0)
    every = client_splits(build(held.config.partition, "partition"), held.dataset, 4, 0)
    mine = held.dataset.labels[every[0].train]
    assert 0 < (mine >= 0).sum() < 24
    assert len(held.split.train) == (mine >= 0).sum()  # a client with labels trains on those that have one
    assert len(session(path, 1).split.train) == 24
    grid = run(tmp_path / "run", "dccfssl", SURE, data=path)
    replies = {partition: reply for _, partition, reply in messages(grid, "train")}
    assert contents.header(replies[0])["num-examples"] == len(held.split.train)
    assert "pseudo_label_accuracy" not in contents.metrics(replies[1])  # not all of the truth is known
    assert not any(row["failures"] for row in rows_of(tmp_path / "run"))
    with pytest.raises(RuntimeError, match="48 of 96 samples have no label"):
        run(tmp_path / "dirichlet", "dccfssl", "partition=dirichlet_train", data=path)


def test_counts_of_a_labelled_client_are_reported(tmp_path: Path) -> None:
    grid = run(tmp_path / "run", "fedavg_sl_lower", "federation.rounds=1")
    (header,) = [reply.content["header"] for _, partition, reply in messages(grid, "query") if partition == 0]
    held = session(tmp_path / "stripes.npz", 0)
    counts = np.bincount(held.dataset.labels[held.split.train], minlength=CLASSES)
    assert header["class-counts"] == counts.tolist()
