"""Nodes with data, names and models of their own; nodes that leave and come back."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from PIL import Image

from client_app.session import open_session
from task.messages import Placement
from tests import contents
from tests.fake_grid import FakeGrid, run_federation

ROUNDS = "federation.rounds=2 model.feature_dim=16 data=own"
WORDS = {"cat": 40, "cow": 120, "dog": 200}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def pictures(brightness: int, number: int, size: int, seed: int) -> np.ndarray[Any, Any]:
    """Images ``(number, size, size)`` of one class, which differs from others in its brightness."""
    noise = np.random.default_rng(seed).integers(-20, 20, (number, size, size))
    return (noise + brightness).clip(0, 255).astype(np.uint8)


def folder_of(path: Path, classes: dict[str, int], size: int = 28) -> Path:
    for name, number in classes.items():
        (path / name).mkdir(parents=True)
        for index, image in enumerate(pictures(WORDS[name], number, size, 1)):
            Image.fromarray(image).save(path / name / f"{index}.png")
    return path


def archive_of(path: Path, names: list[str], number: int = 12, size: int = 28, test: int = 0) -> Path:
    parts = {"train": number, "test": test}
    arrays: dict[str, Any] = {"class_names": np.array(names)}
    for part, count in parts.items():
        suffix = f"_{part}" if test else ""
        if count:
            arrays[f"x{suffix}"] = np.concatenate([pictures(WORDS[name], count, size, 2) for name in names])
            arrays[f"y{suffix}"] = np.repeat(np.arange(len(names)), count)
    np.savez(path, **arrays)
    return path


def hospitals(folder: Path) -> list[dict[str, Any]]:
    """A folder of images without a test split; an archive with one class; one with a test part and another order."""
    archive_of(folder / "north.npz", ["dog", "cat"], test=4)
    archive_of(folder / "west.npz", ["cow"])
    return [
        {"name": "west", "data": str(folder / "west.npz")},
        {"name": "south", "data": str(folder_of(folder / "south", {"cat": 8, "cow": 12}))},
        {"name": "north", "data": str(folder / "north.npz"), "role": "labelled", "device": "cpu"},
    ]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def clients_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "clients.csv").open() as file:
        return list(csv.DictReader(file))


def test_hospitals_with_other_classes_sizes_and_models_train_together(tmp_path: Path) -> None:
    nodes = hospitals(tmp_path)
    overrides = f"{ROUNDS} model=htcnn4 federation.num_clients=3"
    nodes[0]["model"], nodes[1]["model"] = "residual", "plain"
    rows = rows_of(run(tmp_path / "run", overrides, nodes))
    assert not any(row["failures"] or row["absent"] for row in rows)
    north, south, west = clients_of(tmp_path / "run")
    assert [client["name"] for client in (north, south, west)] == ["north", "south", "west"]
    assert [client["model"] for client in (north, south, west)] == ["plain", "plain", "residual"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["class_names"] == ["cat", "cow", "dog"]
    assert [client["classes"] for client in (north, south, west)] == ["0 2", "0 1", "1"]
    assert [client["class_counts"] for client in (north, south, west)] == ["16 0 16", "8 12 0", "0 12 0"]
    # north brings its own test part; of the others a quarter becomes one.
    assert [(client["train_size"], client["test_size"]) for client in (north, south, west)] == [
        ("24", "8"),
        ("15", "5"),
        ("9", "3"),
    ]


def run(folder: Path, overrides: str, facts: list[dict[str, Any]], **grid: Any) -> Path:
    run_federation(overrides, str(folder), num_nodes=len(facts), facts=facts, **grid)
    return folder


def test_labels_follow_their_names(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "a.npz", ["dog", "cat"])
    node = {"name": "north", "data": str(path), "cache-dir": str(tmp_path / "cache")}
    context = Context(1, 1, node, RecordDict(), {"overrides": "data=own"})
    dataset = open_session(context, Placement(0, 2, ("cat", "cow", "dog"))).dataset
    means = [float(dataset.images[dataset.labels == label].mean()) for label in (0, 2)]
    assert means == pytest.approx([WORDS["cat"], WORDS["dog"]], abs=3)
    assert dataset.num_classes == 3
    with pytest.raises(
        ValueError, match=r"node 'north': class 'dog' is not among the 2 agreed: cat, dogs \(nearest: 'dogs'\)"
    ):
        open_session(context, Placement(0, 2, ("cat", "dogs")))


def test_images_of_other_sizes(tmp_path: Path) -> None:
    archive_of(tmp_path / "a.npz", ["cat", "dog"])
    archive_of(tmp_path / "b.npz", ["cat", "dog"], size=20)
    facts = [{"name": name, "data": str(tmp_path / f"{name}.npz")} for name in ("a", "b")]
    overrides = f"{ROUNDS} federation.num_clients=2 model=cnn_small"
    run(tmp_path / "any", overrides, facts)  # each has a model of its own, for its own images
    with pytest.raises(
        ValueError, match=r"one shape; found \(1, 20, 20\) of client 1 \(b\), \(1, 28, 28\) of client 0 \(a\)"
    ):
        run(tmp_path / "shared", f"{overrides} algorithm=fml", facts)
    run(tmp_path / "resized", f"{overrides} algorithm=fml data.source.resize=24", facts)
    assert not rows_of(tmp_path / "resized")[-1]["failures"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": "/no/such/place"}, ["node 'west'", "data='/no/such/place'", "there is nothing"]),
        ({"model": "vgg99"}, ["node 'west': client 2", "'vgg99' must be one of"]),
        ({"name": "a b"}, ["name='a b'"]),
        ({"name": "north"}, ["two nodes say name='north'"]),
        ({"role": "teacher"}, ["node 'west'", "role='teacher'", "labelled, unlabelled"]),
        ({"data": None}, ["data=own", "names none"]),
    ],
)
def test_bad_facts_are_refused_by_name_before_round_one(
    change: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    nodes = hospitals(tmp_path)
    nodes[0] = {key: value for key, value in ({"name": "west", "data": nodes[0]["data"]} | change).items() if value}
    with pytest.raises((ValueError, RuntimeError)) as caught:
        run(tmp_path / "run", f"{ROUNDS} federation.num_clients=3", nodes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not rows_of(tmp_path / "run")


def test_a_configured_class_list_refuses_other_classes(tmp_path: Path) -> None:
    nodes = [{key: node[key] for key in ("name", "data")} for node in hospitals(tmp_path)]
    overrides = f"{ROUNDS} federation.num_clients=3"
    with pytest.raises(RuntimeError, match="class 'cow' is not among the 2 agreed: dog, cat"):
        run(tmp_path / "two", f"{overrides} data.classes=[dog,cat]", nodes)
    run(tmp_path / "three", f"{overrides} data.classes=[dog,cow,cat]", nodes)
    assert [client["classes"] for client in clients_of(tmp_path / "three")] == ["0 2", "1 2", "1"]


def test_only_who_needs_it_is_told_its_place(tmp_path: Path) -> None:
    archive_of(tmp_path / "a.npz", ["cat", "dog"])
    archive_of(tmp_path / "b.npz", ["cow"])
    facts = [
        {"partition-id": index, "num-partitions": 2, "data": str(tmp_path / f"{name}.npz")}
        for index, name in enumerate("ab")
    ]
    grid = run_federation(ROUNDS, str(tmp_path / "run"), num_nodes=2, facts=facts)
    trained = [message for message in grid.sent if message.metadata.message_type == "train"]
    assert all("class-names" in contents.header(message) for message in trained)
    facts[1]["data"] = facts[0]["data"]
    grid = run_federation(f"{ROUNDS} overwrite=true", str(tmp_path / "run"), num_nodes=2, facts=facts)
    assert not any("class-names" in contents.header(message) for message in grid.sent if message.content)


def test_a_node_leaves_and_comes_back_with_another_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unsteady(FakeGrid):
        """Node 1 is away in rounds 2 and 3, and is another one from round 4 on."""

        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            messages = list(messages)
            replies = super().send_and_receive(messages, timeout=timeout)
            number = int(messages[0].metadata.group_id or 0) if messages else 0
            if messages and messages[0].metadata.message_type == "evaluate":
                gone = [node for node, each in self.contexts.items() if each.node_config["partition-id"] == 1]
                if number == 1:
                    self.away = self.contexts.pop(gone[0])
                if number == 3:
                    self.contexts[123] = self.away
            return replies

    run_config = "partition.max_samples=160 federation.rounds=5 federation.num_clients=3 federation.min_clients=2"
    folder = tmp_path / "run"
    monkeypatch.setattr("tests.fake_grid.FakeGrid", Unsteady)
    run_federation(run_config, str(folder), num_nodes=3)
    rows = rows_of(folder)
    assert [row["absent"] for row in rows] == [[], [1], [1], [], []]
    assert [row["sampled"] for row in rows] == [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2], [0, 1, 2]]
    failures = [failure for row in rows for failure in row["failures"]]
    assert {failure["partition"] for failure in failures} == {1}
    assert {failure["phase"] for failure in failures} == {"train", "evaluate"}
    assert {failure["reason"] for failure in failures} == {"its SuperNode is not connected"}
    assert set(rows[4]["client_accuracy"]) == {"0", "1", "2"}
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed with losses"


def test_a_run_with_names_resumes_with_the_same_places(tmp_path: Path) -> None:
    nodes = [{key: node[key] for key in ("name", "data")} for node in hospitals(tmp_path)]
    folder = tmp_path / "run"

    def spoil(reply: Message, partition: int, number: int) -> Message:
        if number == 2:
            raise KeyboardInterrupt
        return reply

    overrides = f"{ROUNDS} federation.num_clients=3 federation.checkpoint_every=1"
    with pytest.raises(KeyboardInterrupt):
        run(folder, overrides, nodes, spoil=spoil)
    run(tmp_path / "not-used", f"{overrides} resume={folder}", nodes)
    run(tmp_path / "whole", overrides, nodes)
    accuracies = [[row["client_accuracy"] for row in rows_of(each)] for each in (folder, tmp_path / "whole")]
    assert accuracies[0] == accuracies[1]
    assert [client["name"] for client in clients_of(folder)] == ["north", "south", "west"]
