"""Cases C01 to C07: data and partitioning."""

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message
from PIL import Image

from task.config import build, load
from task.data.folders import ImageFolder
from task.data.loaders import batch_bounds
from task.data.partition import Dirichlet
from task.models.assign import build_model, check_models
from tests import contents
from tests.algorithms import ALGORITHMS
from tests.cases.small import (
    EVERY,
    KINDS,
    WITH_BATCHNORM,
    States,
    dirichlet,
    federate,
    has_global_model,
    rows,
    run,
    summary,
    words,
)
from tests.stripes import stripes, write

MODELS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))
SMALL_MODELS = ["htcnn4", "cnn_small", "cnn4", "wrn16_2"]


def refusal(overrides: str, folder: Path, num_nodes: int = 4) -> str:
    """Run a federation that must end before round 1, and return the only line of its reason."""
    with pytest.raises((ValueError, RuntimeError)) as caught:
        federate(overrides, folder, num_nodes)
    text = str(caught.value)
    assert "\n" not in text
    assert not (folder / "rounds.jsonl").exists() or not rows(folder)
    return text


def test_c01_dirichlet_split_never_finishes() -> None:
    labels, began = np.arange(2000) % 10, time.monotonic()
    with pytest.raises(ValueError, match=r"2000 samples .* 200 clients .* 10 each .* 2000 draws .*; lower partition"):
        Dirichlet(alpha=0.001, min_size=10).split(labels, 10, 200, 0)
    splits = Dirichlet(alpha=0.001, min_size=0).split(labels, 10, 200, 0)
    assert sum(len(split.train) + len(split.test) for split in splits) == 2000
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 1e300])
def test_c01_a_class_without_a_sample_and_extreme_alphas(alpha: float) -> None:
    labels = np.arange(180) % 9  # class 9 of ten has none
    splits = Dirichlet(alpha=alpha, min_size=0).split(labels, 10, 30, 0)
    every = np.concatenate([part for split in splits for part in (split.train, split.test)])
    assert sorted(every) == list(range(180))


@pytest.mark.parametrize("algorithm", EVERY)
def test_c02_clients_without_data_are_skipped_and_counted(algorithm: str, tmp_path: Path) -> None:
    more = (
        f"partition={dirichlet(algorithm)} partition.alpha=0.01 partition.min_size=0 federation.rounds=3 "
        "federation.participation=0.1 federation.evaluate_every=3"
    )
    run(algorithm, tmp_path / "run", more, num_nodes=50)
    found = rows(tmp_path / "run")
    assert len(found) == 3
    assert not any(row["failures"] for row in found)
    assert all(0 <= row["clients_without_train"] <= len(row["sampled"]) for row in found)
    if dirichlet(algorithm) == "dirichlet":  # elsewhere the server tests
        assert found[-1]["clients_evaluated"] + found[-1]["clients_without_test"] == 50
        assert found[-1]["clients_without_test"] > 0
    assert summary(tmp_path / "run")["clients_without_training"] > 0
    numbers = [value for row in found for value in row["metrics"].values()]
    assert all(math.isfinite(value) for value in numbers)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_c02_a_round_of_empty_clients_leaves_the_global_state(
    algorithm: str, tmp_path: Path, states: States, caplog: pytest.LogCaptureFixture
) -> None:
    more = (
        f"partition={dirichlet(algorithm)} partition.alpha=0.01 partition.min_size=0 partition.max_samples=4 "
        "federation.rounds=4 federation.participation=0.05 federation.evaluate_every=4"
    )
    run(algorithm, tmp_path / "run", more, num_nodes=30)
    found = rows(tmp_path / "run")
    empty = [row["round"] for row in found if row["clients_without_train"] == len(row["sampled"])]
    assert empty
    bookkeeping = ("change/", "rounds_M", "store_MCK", "counts_MC", "own_M")  # of FedKD and DCCFSSL: who was asked when
    for number in empty:
        assert f"round {number}: no client had an image to train on; the global state stays" in caplog.text
        before, after = states[number - 1]
        assert all(torch.equal(after[name], before[name]) for name in before if not name.startswith(bookkeeping))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_c03_last_batch_of_one_sample_with_batchnorm(algorithm: str, tmp_path: Path) -> None:
    scheme = "iid_train" if dirichlet(algorithm) != "dirichlet" else "iid partition.test_fraction=0"
    write(tmp_path / "stripes.npz", samples=27 if "train" in scheme else 15, tests=12)
    for batch_size in (4, 8)[: 2 if algorithm in KINDS else 1]:  # 9 = 2 * 4 + 1 = 8 + 1 training samples a client
        folder = tmp_path / f"run-{batch_size}"
        more = f"partition={scheme} train.batch_size={batch_size} federation.rounds=1 train.local_epochs=2"
        run(algorithm, folder, more, num_nodes=3, model=WITH_BATCHNORM)
        clients = (folder / "clients.csv").read_text("utf-8").splitlines()[1:]
        assert [line.split(",")[5] for line in clients] == ["9", "9", "9"]
        assert not rows(folder)[0]["failures"]
        assert rows(folder)[0]["clients_without_train"] == 0


@pytest.mark.parametrize("algorithm", KINDS)
def test_c03_clients_with_one_sample_train_and_count(algorithm: str, tmp_path: Path) -> None:
    write(tmp_path / "stripes.npz", samples=3, tests=9)
    scheme = "iid_train" if dirichlet(algorithm) != "dirichlet" else "iid partition.max_samples=3"
    grid = run(algorithm, tmp_path / "run", f"partition={scheme}", num_nodes=3, model=WITH_BATCHNORM)
    assert not any(row["failures"] or row["clients_without_train"] for row in rows(tmp_path / "run"))
    trained = [reply for reply in grid.replies if reply.metadata.message_type == "train"]
    for reply in trained:
        if contents.has_prototypes(reply) and not algorithm.startswith("dccfssl"):  # there only of trusted samples
            assert len(contents.prototypes(reply)["class-ids"]) <= 1


def test_c03_no_batch_of_one_is_ever_left_for_batchnorm() -> None:
    for total in range(2, 60):
        for size in range(2, 20):
            bounds = batch_bounds(total, size, has_batchnorm=True)
            assert min(stop - start for start, stop in bounds) > 1
            assert (bounds[0][0], bounds[-1][1]) == (0, total)


@pytest.mark.parametrize("algorithm", [name for name in KINDS if not has_global_model(name)])
def test_c04_client_with_a_single_class(algorithm: str, tmp_path: Path) -> None:
    more = "partition=pathological partition.classes_per_client=1"
    run(algorithm, tmp_path / "run", more, num_nodes=4)
    row, text = rows(tmp_path / "run")[-1], (tmp_path / "run" / "rounds.jsonl").read_text("utf-8")
    assert "NaN" not in text
    assert "Infinity" not in text
    assert 0 <= row["accuracy"] <= 1
    assert row["clients_evaluated"] == 4  # no metric is undefined for one class, so none is left out
    assert row["clients_without_test"] == 0
    clients = (tmp_path / "run" / "clients.csv").read_text("utf-8").splitlines()
    assert [line.split(",")[7] for line in clients[1:]] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (np.arange(40) % 10 + 1, [str(label) for label in sorted(range(1, 11))]),
        (np.array(["dog", "cat"])[np.arange(40) % 2], ["cat", "dog"]),
        (np.array([0, 5, 9])[np.arange(40) % 3], ["0", "5", "9"]),
        (np.array([1.0, 2.0])[np.arange(40) % 2], ["1", "2"]),
    ],
)
def test_c05_labels_that_start_at_one_are_strings_or_have_gaps(
    labels: np.ndarray, names: list[str], tmp_path: Path
) -> None:
    images, _ = stripes(len(labels), 0)
    np.savez(tmp_path / "stripes.npz", x=images, y=labels)
    more = "partition=pathological partition.classes_per_client=1"  # so one client has only "dog"
    grid = run("fedproto", tmp_path / "run", more, num_nodes=len(names))
    assert summary(tmp_path / "run")["class_names"] == names
    for reply in grid.replies:
        if reply.metadata.message_type == "query":
            header = reply.content["header"]
            assert list(header["class-names"]) == names  # type: ignore[index, arg-type]
            assert list(header["class-ids"]) == [header["partition"]]  # type: ignore[index, arg-type]


@pytest.mark.parametrize("label", [1.5, math.nan, math.inf, 1e300, 2**63 + 3])
def test_c05_labels_that_are_no_class_are_named_before_round_one(label: float, tmp_path: Path) -> None:
    images, labels = stripes(40, 0)
    wrong = labels.astype(np.uint64 if isinstance(label, int) else np.float64)
    wrong[7] = label
    np.savez(tmp_path / "stripes.npz", x=images, y=wrong)
    assert "label" in refusal(words("fedproto", tmp_path), tmp_path / "run")


def test_c05_nodes_that_know_other_classes_are_refused(tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if partition == 2 and reply.metadata.message_type == "query":
            facts = dict(reply.content["header"])  # type: ignore[arg-type]
            facts |= {"class-names": ["dog"], "class-ids": [0], "class-counts": [9]}
            reply.content["header"] = ConfigRecord(facts)
        return reply

    with pytest.raises(ValueError, match="client 2 does not know the same classes"):
        run("fedproto", tmp_path / "run", spoil=spoil)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 150, 150), (3, 64, 48)])
@pytest.mark.parametrize(
    "group", [pytest.param(name, marks=() if name in SMALL_MODELS else pytest.mark.slow) for name in MODELS]
)
def test_c06_every_bundled_model_takes_grey_large_and_oblong_images(group: str, shape: tuple[int, int, int]) -> None:
    model = load(f"model={group}").model
    check_models(model, shape)
    built = build_model(model, 0, num_classes=7, image_shape=shape, seed=0).eval()
    with torch.no_grad():
        assert built(torch.zeros(2, *shape)).shape == (2, 7)


def test_c06_images_that_do_not_fit_are_refused_with_model_and_shapes(tmp_path: Path) -> None:
    images, labels = stripes(40, 0)
    np.savez(tmp_path / "stripes.npz", x=images[:, :12, :12], y=labels)
    text = refusal(words("fedproto", tmp_path), tmp_path / "run")
    assert "model plain: images of shape (1, 12, 12) do not fit; expected (channels, height, width)" in text


def test_c06_four_channels_are_refused_by_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGBA", (20, 20)).save(tmp_path / name / "picture.png")
    with pytest.raises(ValueError, match=r"a/picture\.png: has mode RGBA, expected L or RGB; set data\.source\.mode"):
        ImageFolder(root=str(tmp_path)).read()
    assert ImageFolder(root=str(tmp_path), mode="rgb").read().images.shape == (2, 20, 20, 3)
    np.savez(tmp_path / "four.npz", x=np.zeros((5, 20, 20, 4), np.uint8), y=np.arange(5))
    source = {"_target_": "task.data.sources.Npz", "path": str(tmp_path / "four.npz")}
    with pytest.raises(ValueError, match=r"four\.npz: x: images must have .* 1 or 3 channels, got .*20, 20, 4"):
        build(source, "data.source").read()


def test_c07_empty_test_splits_are_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "stripes.npz", samples=8, tests=0)
    run("fedtgp", tmp_path / "run", "partition=iid partition.test_fraction=0.25", num_nodes=5)
    row = rows(tmp_path / "run")[-1]  # sizes 2 2 2 1 1: who has one sample trains on it
    assert (row["clients_evaluated"], row["clients_without_test"]) == (3, 2)
    assert sorted(row["client_accuracy"]) == ["0", "1", "2"]
    assert row["accuracy"] == pytest.approx(np.mean(list(row["client_accuracy"].values())))
    assert summary(tmp_path / "run")["last_accuracy"] == row["accuracy"]


def test_c07_without_any_test_image_there_is_no_accuracy_rather_than_zero(tmp_path: Path) -> None:
    run("fedtgp", tmp_path / "run", "partition=iid partition.test_fraction=0")
    assert rows(tmp_path / "run")[-1]["accuracy"] is None
    assert summary(tmp_path / "run")["best_accuracy"] is None


@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg", "dccfssl"])
def test_c07_the_last_round_is_always_evaluated(algorithm: str, tmp_path: Path) -> None:
    run(algorithm, tmp_path / "run", "federation.rounds=10 federation.evaluate_every=7", num_nodes=2)
    evaluated = [row["round"] for row in rows(tmp_path / "run") if row["accuracy"] is not None]
    assert evaluated == [7, 10]
    assert summary(tmp_path / "run")["last_evaluated_round"] == 10
    assert has_global_model(algorithm) == (algorithm != "fedproto")
