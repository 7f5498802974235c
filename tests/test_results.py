import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from task.results import RunResult, find_runs, read_run
from task.tables import client_table, summary_lines
from tests.result_folders import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def edit_summary(run: Path, **changes: object) -> None:
    path = run / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_reads_everything_that_a_run_wrote(run: Path) -> None:
    result = read_run(run)
    assert result.is_complete
    assert result.status == "completed"
    assert (result.reason, result.notes) == ("", ())
    assert result.seed == 0
    assert result.label("algorithm") == "fedtgp"
    assert [entry["round"] for entry in result.rounds] == [1, 2, 3, 4, 5, 6]
    assert [client.partition for client in result.clients] == [0, 1, 2, 3]
    first = result.clients[0]
    assert first.parameters == 123_456
    assert first.class_counts is not None
    assert first.train_size is not None
    assert first.test_size is not None
    assert first.train_size + first.test_size == sum(first.class_counts)
    assert result.prototypes is not None
    assert result.prototypes.global_vectors.shape == (3, 16)
    assert result.class_names(4) == ["class 0", "class 1", "class 2", "3"]


def test_methods_without_prototypes_have_none(tmp_path: Path) -> None:
    assert read_run(write_run(tmp_path / "local", prototypes=False)).prototypes is None


def test_truncated_last_line_is_left_out_and_noted(run: Path) -> None:
    path = run / "rounds.jsonl"
    # The cut goes through a character of two bytes.
    path.write_bytes(path.read_bytes() + '{"round": 7, "reason": "ü'.encode()[:-1])
    result = read_run(run)
    assert len(result.rounds) == 6
    (note,) = result.notes
    assert "rounds.jsonl: line 7, the last, is truncated" in note
    assert f"note: {note}" in summary_lines(result)


def test_a_round_written_twice_counts_once(run: Path) -> None:
    path = run / "rounds.jsonl"
    path.write_text(path.read_text() + '{"round": 6, "accuracy": 0.5}\n')
    result = read_run(run)
    assert len(result.rounds) == 6
    assert result.rounds[-1]["accuracy"] == 0.5
    assert "round 6 stands twice" in result.notes[0]


@pytest.mark.parametrize("piece", ["config.yaml", "rounds.jsonl", "clients.csv"])
def test_missing_piece_of_a_completed_run_is_an_error(run: Path, piece: str) -> None:
    (run / piece).unlink()
    with pytest.raises(ValueError, match=f"{piece}: missing from the results of a completed run"):
        read_run(run)


@pytest.mark.parametrize(
    ("piece", "content", "says"),
    [
        ("summary.json", "{", "summary.json: not JSON"),
        ("summary.json", "[]", "must hold a JSON object, not list"),
        ("summary.json", '{"status": "fine"}', "status is 'fine', must be one of completed"),
        ("summary.json", '{"status": "completed", "best_accuracy": 87.5}', "best_accuracy is 87.5"),
        ("run.json", "no", "run.json: not JSON"),
        ("config.yaml", "a: [", "config.yaml: not YAML"),
        ("config.yaml", "just words", "must hold a mapping, not str"),
        ("rounds.jsonl", '{"round": 1\n{"round": 2}\n', "line 1 is not JSON"),
        ("rounds.jsonl", '{"round": true}\n', "line 1 must be a JSON object"),
        ("rounds.jsonl", '{"round": 1, "accuracy": NaN}\n', "line 1: accuracy is nan, must be null"),
        ("rounds.jsonl", '{"round": 1, "parameters": {"train_up": -1}}\n', "line 1: parameters is {'train_up': -1}"),
        ("rounds.jsonl", '{"round": 1, "bytes": 5}\n', "line 1: bytes is 5, must hold whole numbers"),
        ("rounds.jsonl", '{"round": 1, "client_traffic": {"3": 1.5}}\n', "line 1: client_traffic.3 is 1.5"),
        ("rounds.jsonl", '{"round": 1, "client_traffic": []}\n', "line 1: client_traffic is []"),
        ("clients.csv", "partition,name\n0,x\n", "lacks the column model, parameters"),
        ("clients.csv", "\xff\x00", "clients.csv: "),
        ("prototypes.npz", "PK\x03\x04 cut", "prototypes.npz: not a prototype file"),
    ],
)
def test_corrupt_piece_is_named_in_one_line(run: Path, piece: str, content: str, says: str) -> None:
    (run / piece).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=piece) as error:
        read_run(run)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("cpu", "cpu,1", "line 2 must have one value for each of the columns"),
        ("cnn_plain", "cnn_plain\n", "line 2 must have one value for each of the columns"),
        (",cnn_plain,123456", ",cnn_plain,many", "line 2: parameters is 'many', must be whole numbers"),
        ("0.79", "79", "line 2: last_accuracy is 79.0, must be null or a number from 0 to 1"),
        ("0.79", "good", "line 2: last_accuracy is nan"),
        ("0,client-0", ",client-0", "line 2: partition is '', must be one whole number"),
    ],
)
def test_corrupt_client_is_named(run: Path, old: str, new: str, says: str) -> None:
    path = run / "clients.csv"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"clients\.csv") as error:
        read_run(run)
    assert says in str(error.value)


def test_prototypes_are_never_unpickled_and_must_fit(run: Path) -> None:
    arrays = dict(np.load(run / "prototypes.npz"))
    np.savez(run / "prototypes.npz", **(arrays | {"global_vectors": arrays["global_vectors"][:1]}))
    with pytest.raises(ValueError, match=r"prototypes\.npz: global_class_ids must be \(n,\)"):
        read_run(run)
    np.savez(run / "prototypes.npz", **(arrays | {"global_vectors": np.array([{}], dtype=object)}))
    with pytest.raises(ValueError, match=r"prototypes\.npz: not a prototype file: Object arrays"):
        read_run(run)


def test_failed_run_is_visible_as_failed(run: Path) -> None:
    edit_summary(run, status="failed", reason="client 3:\nboom", rounds_done=2, last_accuracy=None)
    for piece in ("clients.csv", "prototypes.npz", "rounds.jsonl", "config.yaml"):
        (run / piece).unlink()
    result = read_run(run)
    assert not result.is_complete
    assert result.reason == "client 3: boom; 2 of 6 rounds done"
    assert summary_lines(result)[0].endswith("seed 0: failed")
    assert "not complete: client 3: boom; 2 of 6 rounds done" in summary_lines(result)


def test_run_without_summary_is_incomplete(run: Path) -> None:
    (run / "summary.json").unlink()
    result = read_run(run)
    assert (result.status, result.is_complete) == ("incomplete", False)
    assert "summary.json is missing" in result.reason
    assert result.reason.endswith("6 of 6 rounds done")


def test_completed_with_fewer_rounds_than_planned_is_not_complete(run: Path) -> None:
    edit_summary(run, rounds_done=5)
    assert read_run(run).reason == "5 of 6 rounds done"


def test_find_runs_looks_below_and_returns_each_once(tmp_path: Path) -> None:
    first = write_run(tmp_path / "sweep" / "0")
    second = write_run(tmp_path / "sweep" / "deep" / "1")
    hydra = tmp_path / "sweep" / "0b" / ".hydra"
    hydra.mkdir(parents=True)
    shutil.copy(first / "config.yaml", hydra)
    assert find_runs([tmp_path / "sweep"]) == [first, second]
    assert find_runs([first, tmp_path, first / ".." / "0"]) == [first, second]


def test_find_runs_refuses_what_holds_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run in this folder or below it"):
        find_runs([tmp_path])
    with pytest.raises(ValueError, match="none: no such folder"):
        find_runs([tmp_path / "none"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file: not a folder"):
        find_runs([tmp_path / "file"])


def means(run: RunResult) -> list[float]:
    return [float(word) for word in client_table(run).splitlines()[-1].split()[-2:]]


def test_client_table_is_aligned_and_ends_with_the_mean(run: Path) -> None:
    result = read_run(run)
    lines = client_table(result).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split()[:4] == ["partition", "model", "parameters", "device"]
    assert lines[2].split()[:4] == ["0", "cnn_plain", "123,456", "cpu"]
    sizes = np.array([client.test_size for client in result.clients])
    best = np.array([client.best_accuracy for client in result.clients])
    assert "mean over test samples" in lines[-1]
    assert means(result)[1] == pytest.approx(100 * (sizes * best).sum() / sizes.sum(), abs=0.006)


def test_client_table_without_sizes_averages_over_clients(run: Path) -> None:
    path = run / "clients.csv"
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    for row in rows:
        row[header.index("train_size")] = row[header.index("test_size")] = ""
    # This client has never been evaluated.
    rows[0][-3:] = ["", "", ""]
    path.write_text("\n".join(",".join(row) for row in [header, *rows]))
    result = read_run(run)
    assert "mean over clients" in client_table(result)
    assert means(result)[1] == pytest.approx(100 * (0.82 + 0.84 + 0.86) / 3, abs=0.006)
    assert client_table(result).splitlines()[2].split()[-2:] == ["-", "-"]


def test_summary_lines_say_what_how_good_at_what_cost_and_where(run: Path) -> None:
    what, accuracy, cost, where = summary_lines(read_run(run))
    assert what.startswith("fedtgp on fashion_small, dirichlet alpha=0.1 test_share=0.25, model htcnn4, 4 clients")
    assert "last 80.00 %, best 80.00 % in round 6 (prototype rule, each client's own model" in accuracy
    assert "6 rounds, 12.5 s; a round 2.1 kB up, 1.5 kB down; 0 failures" in cost
    assert where == f"results: {run}"
