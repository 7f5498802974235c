"""What is counted as sent: the parameters of the papers' communication table, from real federations in one process.

The table: CIFAR-100, HtFE8, 20 clients, K = 512, C = 100, one round up and down, S being the sum over the clients of
the classes that each holds for training.
"""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from task import communication
from task.config import load
from task.messages import PrototypeSet, Shared, Upload, parameters_in, prototype_parameters_in
from task.models.assign import build_auxiliary
from task.models.heads import build_head
from task.models.split import parameter_count
from task.payload import nbytes
from task.report import main
from task.results import read_run
from task.schema import Config
from tests import contents
from tests.fake_grid import FakeGrid, run_federation
from tests.shared_model import BATCHNORM

CLIENTS, CLASSES, WIDTH = 20, 100, 512
FEDKD_DENSE = 36_988_320
SHARED_MODELS = {"lg_fedavg": 2_052_000, "fedgen": 8_687_520, "fml": FEDKD_DENSE}
VECTORS = {"feddistill": CLASSES, "fedproto": WIDTH, "fedtgp": WIDTH}
METHODS = [*SHARED_MODELS, "fedkd", *VECTORS]
QUICK = {
    "fedgen": "algorithm.server.steps=1",
    # One step leaves BatchNorm's statistics fresh; pulled, too, a ResNet152 sends prototypes too large to be believed.
    "fedtgp": "algorithm.server.epochs=1 algorithm.client.weight=0.0",
}
# Small bodies, and the auxiliary model that is HtFE8's by default: its first entry.
LIGHT = (
    "model=htfe8 'model.entries=[{name: plain, _target_: task.models.small.plain, width: 1, features: 64},"
    "{name: residual, _target_: task.models.small.residual, width: 1, norm: batch}]' "
    "'model.auxiliary={name: cnn4, _target_: task.models.zoo.cnn4}'"
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three images of noise a class, shaped like those of CIFAR-100, each client holding ten classes or so."""
    folder = tmp_path_factory.mktemp("noise")
    images = np.random.default_rng(0).integers(0, 256, (3 * CLASSES, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "noise.npz", x=images, y=np.repeat(np.arange(CLASSES), 3))
    return (
        f"data=npz data.source.path={folder}/noise.npz data.cache_dir={folder}/cache partition=pathological "
        "partition.classes_per_client=10 partition.balanced=true partition.test_fraction=0.1 "
        "train.batch_size=50 train.lr=0.00001 federation.rounds=2 federation.evaluate_every=2"
    )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def held_classes(folder: Path) -> int:
    """Return S, and make sure that there is no class that nobody trains on."""
    with (folder / "clients.csv").open() as file:
        held = [row["classes"].split() for row in csv.DictReader(file)]
    assert len(held) == CLIENTS
    assert len({class_id for each in held for class_id in each}) == CLASSES
    return sum(map(len, held))


def scalars(messages: list[Message], records: tuple[str, ...] = ("weights", "prototypes")) -> int:
    """Count the numbers of floating point in the arrays of messages, without BatchNorm's statistics."""
    arrays = [
        (name, array) for message in messages if "weights" in records for name, array in weights(message).items()
    ]
    counted = [message for message in messages if "prototypes" in records and contents.has_prototypes(message)]
    return sum(contents.vectors(message).size for message in counted) + sum(
        int(np.prod(array.shape)) for name, array in arrays if array.dtype == "float32" and "running_" not in name
    )


def weights(message: Message) -> dict[str, Any]:
    return dict(message.content.get("weights", {}).items())


def check_table(algorithm: str, overrides: str, folder: Path) -> None:
    """Run two rounds and compare the second with the paper's table."""
    grid = run_federation(
        f"algorithm={algorithm} {overrides} {QUICK.get(algorithm, '')}", str(folder), num_nodes=CLIENTS
    )
    first, second = rows_of(folder)
    assert not first["failures"] + second["failures"]
    found = second["parameters"]
    held = held_classes(folder)
    if algorithm in VECTORS:
        width = VECTORS[algorithm]
        assert found == {"train_up": width * held, "train_down": width * CLASSES * CLIENTS}
    elif algorithm == "fedkd":
        # What goes down was compressed at the end of the round before.
        up, down = second["metrics"]["ratio_up"], first["metrics"]["ratio_down"]
        assert 0 < up < 1
        assert 0 < down < 1
        assert found["train_up"] == pytest.approx(up * FEDKD_DENSE / 2, abs=0.01)
        assert found["train_down"] == pytest.approx(down * FEDKD_DENSE / 2, abs=0.01)
        assert first["parameters"]["train_down"] == FEDKD_DENSE / 2  # nobody held the student before
    else:
        assert sum(found.values()) == SHARED_MODELS[algorithm]
    check_wire(grid, second)
    means = communication.means(read_run(folder))
    assert means["parameters_up"] == found["train_up"]
    assert means["client_parameters_down"] == found["train_down"] / CLIENTS


def check_wire(grid: FakeGrid, row: dict[str, Any]) -> None:
    """Compare a round's line with the messages themselves, in all and client by client."""
    traffic = row["client_traffic"]
    assert list(traffic) == [str(partition) for partition in row["sampled"]]
    for way, messages in (("down", grid.sent), ("up", grid.replies)):
        trained = [
            message
            for message in messages
            if message.metadata.message_type == "train" and message.metadata.group_id == str(row["round"])
        ]
        assert len(trained) == len(traffic)
        assert row["parameters"][f"train_{way}"] == scalars(trained)
        assert row["prototype_parameters"][f"train_{way}"] == scalars(trained, ("prototypes",))
        assert row["bytes"][f"train_{way}"] == sum(nbytes(message.content) for message in trained)
        # Of one client: its node is that of the message.
        nodes = {context.node_id: str(context.node_config["partition-id"]) for context in grid.contexts.values()}
        for message in trained:
            metadata = message.metadata
            client = traffic[nodes[metadata.dst_node_id if way == "down" else metadata.src_node_id]]
            assert client[f"parameters_{way}"] == scalars([message])
            assert client[f"prototypes_{way}"] == scalars([message], ("prototypes",))
            assert client[f"bytes_{way}"] == nbytes(message.content) > 4 * scalars([message])


def shared_parts(config: Config) -> tuple[int, int]:
    """Return the parameters of the head and of the auxiliary model."""
    auxiliary = build_auxiliary(config.model, num_classes=CLASSES, image_shape=(3, 32, 32), seed=0)
    return parameter_count(build_head(config.model, CLASSES)), parameter_count(auxiliary)


@pytest.mark.parametrize("algorithm", METHODS)
def test_parameters_are_those_of_the_papers_table(algorithm: str, noise: str, tmp_path: Path) -> None:
    assert shared_parts(load("model=htfe8")) == shared_parts(load(LIGHT))
    check_table(algorithm, f"{noise} {LIGHT}", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", METHODS)
def test_parameters_of_htfe8_are_those_of_the_papers_table(algorithm: str, noise: str, tmp_path: Path) -> None:
    try:
        check_table(algorithm, f"{noise} model=htfe8", tmp_path / "run")
    finally:  # two gigabytes, which pytest would keep
        shutil.rmtree(tmp_path, ignore_errors=True)


def test_what_counts_as_a_parameter() -> None:
    weights = {
        "change/base.1.weight": torch.ones(3),
        "change/base.1.running_mean": torch.ones(3),
        "change/base.1.running_var": torch.ones(3),
        "change/base.1.num_batches_tracked": torch.tensor(1),
        "change/head.weight/u": torch.ones(5, 2),
        "label_counts": torch.arange(7),
    }
    ids = torch.arange(2)
    prototypes = PrototypeSet(ids, torch.ones(2, 11), ids + 1)
    assert parameters_in(Shared()) == 0
    assert parameters_in(Shared(weights=weights)) == 3 + 10
    both = Upload(0, 1, prototypes, weights, examples=5)
    assert parameters_in(both) == 3 + 10 + 22
    assert (prototype_parameters_in(both), prototype_parameters_in(Shared(weights=weights))) == (22, 0)


@pytest.mark.parametrize("algorithm", ["fml", "fedkd"])
def test_batchnorm_statistics_are_in_the_bytes_only(algorithm: str, tmp_path: Path) -> None:
    overrides = f"algorithm={algorithm} {BATCHNORM} partition.max_samples=160 federation.rounds=2"
    grid = run_federation(overrides, str(tmp_path / "run"))
    config = load(overrides)
    model = build_auxiliary(config.model, num_classes=10, image_shape=(1, 28, 28), seed=0)
    dense = parameter_count(model)
    assert dense < sum(tensor.numel() for tensor in model.state_dict().values())
    first, second = rows_of(tmp_path / "run")
    check_wire(grid, second)
    up, down = second["metrics"].get("ratio_up", 1), first["metrics"].get("ratio_down", 1)
    assert second["parameters"] == pytest.approx({"train_down": 4 * down * dense, "train_up": 4 * up * dense})


def test_a_dropped_reply_counts_with_its_bytes_and_a_failed_client_with_none(tmp_path: Path) -> None:
    spoilt: list[Message] = []

    def spoil(reply: Message, partition: int, number: int) -> Message:
        if number == 2 and reply.metadata.message_type == "train":
            if partition == 1:
                vectors = contents.vectors(reply)
                vectors[0, 0] = np.nan
                contents.put_vectors(reply, vectors)
                spoilt.append(reply)
            if partition == 2:
                raise OSError("disk on fire")
        return reply

    overrides = "algorithm=fedproto partition.max_samples=240 federation.rounds=2"
    run_federation(overrides, str(tmp_path / "run"), spoil=spoil)
    first, second = rows_of(tmp_path / "run")
    assert [failure["partition"] for failure in second["failures"]] == [1, 2]
    traffic = second["client_traffic"]
    assert traffic["1"]["bytes_up"] == nbytes(spoilt[0].content) > 0
    assert (traffic["1"]["parameters_up"], traffic["2"]["parameters_up"], traffic["2"]["bytes_up"]) == (0, 0, 0)
    assert traffic["1"]["parameters_down"] == traffic["2"]["parameters_down"] == traffic["0"]["parameters_down"] > 0
    for row in (first, second):
        for kind in ("bytes", "parameters"):
            for way in ("up", "down"):
                each = [traffic[f"{kind}_{way}"] for traffic in row["client_traffic"].values()]
                assert row[kind][f"train_{way}"] == sum(each)


def test_totals_are_in_the_summary_also_after_a_resume_of_an_earlier_versions_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    base = "algorithm=lg_fedavg partition.max_samples=160 federation.participation=0.5"
    run_federation(f"{base} federation.rounds=2", str(folder))
    summary = json.loads((folder / "summary.json").read_text())
    head = WIDTH * 10 + 10
    assert summary["parameters_up"] == summary["parameters_down"] == 2 * 2 * head
    new = ("parameters", "prototype_parameters", "client_traffic")
    old = [{k: v for k, v in row.items() if k not in new} for row in rows_of(folder)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    run_federation(f"{base} federation.rounds=3 resume={folder}", str(folder))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["parameters_up"] is summary["parameters_down"] is None
    means = communication.means(read_run(folder))
    assert (means["parameters_up"], means["client_parameters_up"]) == (2 * head, head)


# Parameters of WRN-16-2, and what the paper's fourth table says that prototypes add: C d / P, in percent.
@pytest.mark.parametrize(("classes", "size", "share"), [(10, 692_810, "0.1848"), (100, 704_420, "1.817")])
def test_prototypes_add_to_wrn16_2_what_the_papers_table_says(
    classes: int, size: int, share: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two clients with labels hold every class. Without authentication (-ARA) a class needs no right answer to have a
    # prototype, so that both send all of them. The size of the images is not in the count: 8x8 is quick.
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3 * classes, 8, 8, 3), dtype=np.uint8)
    labels = np.tile(np.arange(classes), 3)
    parts = {"x_train": images[:-classes], "y_train": labels[:-classes]}
    np.savez(tmp_path / "noise.npz", **parts, x_test=images[-classes:], y_test=labels[-classes:])
    overrides = (
        f"algorithm=dccfssl_no_ara data=npz data.source.path={tmp_path}/noise.npz data.cache_dir={tmp_path}/cache "
        f"partition=pathological partition.classes_per_client={classes} partition.balanced=true partition.pool=train "
        "partition.test_fraction=0.0 model=wrn16_2 train=fssl train.batch_size=50 train.lr=0.0001 federation.rounds=2"
    )
    grid = run_federation(overrides, str(tmp_path / "run"), num_nodes=2)
    first, second = rows_of(tmp_path / "run")
    assert not first["failures"] + second["failures"]
    check_wire(grid, first)
    check_wire(grid, second)
    assert first["prototype_parameters"] == {"train_down": 0, "train_up": 2 * classes * 128}
    assert second["prototype_parameters"] == {"train_down": 2 * classes * 128, "train_up": 2 * classes * 128}
    for client in second["client_traffic"].values():
        assert client["prototypes_up"] == classes * 128
        assert client["parameters_up"] - client["prototypes_up"] == size
    assert main([str(tmp_path / "run"), "--communication"]) == 0
    output = capsys.readouterr().out
    header, _, cells = (line.split("|") for line in output.splitlines() if line.startswith("|"))
    shown = {key.strip(): cell.strip() for key, cell in zip(header, cells, strict=True)}
    assert shown["prototypes up (% of weights)"] == share
    assert "what prototypes add" in output
