import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord

from task.confusion import from_cells, to_cells
from task.messages import EvaluationReport, Expected
from task.metrics import evaluate
from task.models.split import SplitModel
from task.payload import HEADER, decode_evaluation, encode_evaluation
from task.reporting.clients import confusion
from task.reporting.files import read_confusion, read_history
from task.results import read_run
from tests.fake_grid import run_federation
from tests.reporting.test_study import study_of

EXPECTED = Expected(partition=1, round=2, num_classes=3, feature_dim=4)
MATRIX = torch.tensor([[2, 1, 0], [0, 0, 0], [0, 0, 5]])


def test_cells_are_the_matrix() -> None:
    cells, counts = to_cells(MATRIX)
    assert (cells, counts) == ([0, 1, 8], [2, 1, 5])
    assert torch.equal(from_cells(cells, counts, 3), MATRIX)
    assert from_cells([], [], 2).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("cells", "counts"), [([9], [1]), ([0, 0], [1, 1]), ([0], [1, 2]), ([0], [0]), ([0, 1], [2**31, 1])]
)
def test_cells_that_cannot_be_are_refused(cells: list[int], counts: list[int]) -> None:
    with pytest.raises(ValueError, match="confusion"):
        from_cells(cells, counts, 3)


def test_a_report_carries_the_matrix() -> None:
    report = EvaluationReport(1, 2, 8, {"loss": 1.0, "accuracy-head": 0.5}, MATRIX)
    found = decode_evaluation(encode_evaluation(report), EXPECTED).confusion
    assert found is not None
    assert torch.equal(found, MATRIX)
    without = EvaluationReport(1, 2, 8, {"loss": 1.0, "accuracy-head": 0.5})
    assert decode_evaluation(encode_evaluation(without), EXPECTED).confusion is None


def test_a_malformed_matrix_names_the_client() -> None:
    content = encode_evaluation(EvaluationReport(1, 2, 8, {"loss": 1.0, "accuracy-head": 0.5}, MATRIX))
    header = content[HEADER]
    assert isinstance(header, ConfigRecord)
    header["confusion-cells"] = [0, 1, 99]
    with pytest.raises(ValueError, match=r"client 1 sent confusion cells that are not in 0\.\.8"):
        decode_evaluation(content, EXPECTED)
    too_many = encode_evaluation(EvaluationReport(1, 2, 7, {"loss": 1.0, "accuracy-head": 0.5}, MATRIX))
    with pytest.raises(ValueError, match="client 1 sent confusion counts of 8 samples: at most num-examples=7"):
        decode_evaluation(too_many, EXPECTED)


@pytest.mark.parametrize("rule", ["head", "prototype"])
def test_evaluation_counts_as_a_slow_loop_does(rule: str) -> None:
    torch.manual_seed(0)
    model = SplitModel(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 4)), torch.nn.Linear(4, 3), 4)
    images, labels = torch.randn(20, 1, 2, 3), torch.randint(0, 3, (20,))
    protos_CK = torch.randn(3, 4)
    batches = [(images[:12], labels[:12]), (images[12:], labels[12:])]
    found = evaluate(model, batches, protos_CK, torch.ones(3, dtype=torch.bool), confusion_by=rule)
    assert found is not None
    assert found.confusion is not None
    wanted = np.zeros((3, 3), int)
    with torch.no_grad():
        for image, label in zip(images, labels, strict=True):
            features = model.features(image[None])[0]
            distances = [float((features - prototype).norm()) for prototype in protos_CK]
            answer = int(np.argmin(distances)) if rule == "prototype" else int(model.head(features).argmax())
            wanted[int(label), answer] += 1
    assert found.confusion.tolist() == wanted.tolist()
    share = found.by_head if rule == "head" else found.by_prototype
    assert share == pytest.approx(np.trace(wanted) / 20)
    assert evaluate(model, batches, None, None, confusion_by="prototype").confusion is None  # type: ignore[union-attr]


def test_a_federation_keeps_the_matrix_and_prototypes_of_several_rounds(tmp_path: Path) -> None:
    small = "algorithm=fedproto data=digits partition.max_samples=240 federation.num_clients=3 federation.rounds=4"
    grid = run_federation(f"{small} federation.snapshots=3", str(tmp_path / "run"), 3)
    asked = [m.metadata.group_id for m in grid.sent if HEADER in m.content and "confusion" in m.content[HEADER]]
    assert asked == ["4"] * 3  # the last round alone
    run = read_run(tmp_path / "run")
    counts = read_confusion(run.folder / "confusion.csv")
    assert counts is not None
    tested = sum(client.test_size or 0 for client in run.clients)
    assert counts.sum() == tested
    assert np.trace(counts) / tested == pytest.approx(run.summary["last_accuracy"])
    history = read_history(run)
    assert [number for number, _ in history] == [1, 2, 4]
    assert len(history[0][1].client_class_ids) == len(history[2][1].client_class_ids)
    assert not np.array_equal(history[0][1].client_vectors, history[2][1].client_vectors)
    ((group,), found) = study_of(tmp_path).groups, None
    found = confusion(group)
    assert found is not None
    assert found.tolist() == counts.tolist()
    with (run.folder / "confusion.csv").open() as file:
        assert next(csv.reader(file)) == ["true", *map(str, range(10))]


def test_clients_that_keep_their_sizes_keep_the_matrix_too(tmp_path: Path) -> None:
    small = "algorithm=local data=digits partition.max_samples=240 federation.num_clients=3 federation.rounds=1"
    run_federation(f"{small} federation.report_sizes=false federation.snapshots=0", str(tmp_path / "run"), 3)
    assert not (tmp_path / "run" / "confusion.csv").exists()
    assert not (tmp_path / "run" / "prototypes").exists()


@pytest.mark.parametrize("text", ["", "true,0\n0,x\n", "true,0,1\n0,1,2\n", "true,0\n0,-1\n"])
def test_a_malformed_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "confusion.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"confusion\.csv: not a confusion matrix"):
        read_confusion(path)
