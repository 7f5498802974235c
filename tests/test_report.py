import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from task import communication
from task.comparison import Group, group_runs, identities
from task.report import main
from task.reporting import clients, curves, prototypes
from task.reporting.study import Study
from task.reporting.text import as_csv
from task.results import RunResult, find_runs, read_run
from task.tables import exact_rows, markdown_table
from tests.result_folders import write_run

PNG = b"\x89PNG"


def read_all(folder: Path) -> list[RunResult]:
    return [read_run(run) for run in find_runs([folder])]


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("task.report._write", lambda *_: iter(()))


def labels(groups: list[Group]) -> list[str]:
    study = Study(groups)
    return [study.label(group) for group in groups]


def table(text: str) -> list[dict[str, str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_groups_average_over_seeds_only(tmp_path: Path) -> None:
    for seed, level in enumerate((0.8, 0.9, 0.85)):
        write_run(tmp_path / f"a{seed}", seed=seed, level=level)
        write_run(tmp_path / f"b{seed}", seed=seed, level=level - 0.2, alpha=10)
    write_run(tmp_path / "c", algorithm="local", rule="head", alpha=2)
    groups, repeated = group_runs(read_all(tmp_path))
    assert repeated == []
    rows = table(markdown_table(groups))
    # Numbers sort by value: 0.1 before 2 before 10.
    assert [row["partition"].split()[1] for row in rows] == ["alpha=0.1", "alpha=2", "alpha=10"]
    assert [row["n"] for row in rows] == ["3", "1", "3"]
    assert [row["rule"] for row in rows] == ["prototype", "head", "prototype"]
    assert [row["last accuracy (%)"] for row in rows] == ["85.00 ± 5.00", "80.00 ± -", "65.00 ± 5.00"]
    # The client's weight follows from the algorithm, the rule has its own column.
    assert list(identities(groups)[0]) == ["algorithm", "data", "partition", "model"]
    assert labels(groups) == ["fedtgp, alpha=0.1", "local, alpha=2", "fedtgp, alpha=10"]


def test_another_setting_or_number_of_clients_is_another_group(tmp_path: Path) -> None:
    write_run(tmp_path / "a", config={"train": {"lr": 0.01}})
    write_run(tmp_path / "b", config={"train": {"lr": 0.1}}, seed=1)
    write_run(tmp_path / "c", config={"train": {"lr": 0.1}}, clients=5)
    # What only names or places a run does not make it another one.
    write_run(tmp_path / "d", config={"train": {"lr": 0.1}, "name": "again"}, clients=5, seed=1)
    groups, _ = group_runs(read_all(tmp_path))
    found = {
        (row["lr"], row["num_clients"], len(group.runs)) for row, group in zip(identities(groups), groups, strict=True)
    }
    assert found == {("0.01", "4", 1), ("0.1", "4", 1), ("0.1", "5", 2)}


def test_the_same_seed_twice_is_one_sample(tmp_path: Path) -> None:
    write_run(tmp_path / "b-new", level=0.9, started="2026-02-01T00:00:00+0000")
    write_run(tmp_path / "a-old", level=0.1, started="2026-01-01T00:00:00+0000")
    ((group,), repeated) = group_runs(read_all(tmp_path))
    assert [run.folder.name for run in group.runs] == ["b-new"]
    assert [run.folder.name for run in repeated] == ["a-old"]


@pytest.mark.usefixtures("no_figures")
def test_failed_incomplete_and_lossy_runs_are_never_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "good", level=0.8)
    write_run(tmp_path / "lossy", level=0.9, seed=1, summary={"status": "completed with losses"})
    write_run(tmp_path / "bad", level=0.1, seed=2, summary={"status": "failed", "reason": "boom", "rounds_done": 3})
    (write_run(tmp_path / "killed", level=0.1, seed=3) / "summary.json").unlink()
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    (row,) = table(output)
    assert (row["n"], row["last accuracy (%)"]) == ("2", "85.00 ± 7.07")
    assert row["note"] == "1 of 2 runs completed with losses"
    assert "2 of 4 runs are in the table" in output
    assert f"not in the table: {tmp_path / 'bad'}: failed: boom; 3 of 6 rounds done" in output
    assert f"not in the table: {tmp_path / 'killed'}: incomplete: summary.json is missing" in output


def test_missing_values_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path / "a", level=0.8)
    write_run(tmp_path / "b", seed=1, summary={"last_accuracy": None, "best_accuracy": None})
    groups, _ = group_runs(read_all(tmp_path))
    assert table(markdown_table(groups))[0]["last accuracy (%)"] == "80.00 ± - (n=1)"


def test_csv_is_clean_and_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", level=0.8)
    write_run(tmp_path / "b", level=0.9, seed=1)
    assert main([str(tmp_path), "--format", "csv"]) == 0
    captured = capsys.readouterr()
    (row,) = csv.DictReader(io.StringIO(captured.out))
    assert float(row["last_accuracy_mean"]) == pytest.approx(0.85)
    assert float(row["last_accuracy_std"]) == pytest.approx(0.1 / 2**0.5, abs=1e-6)
    assert (row["bytes_up_a_round"], row["bytes_down_a_round"], row["n"]) == ("2100.0", "1500.0", "2")
    assert "figure: " in captured.err
    assert as_csv(exact_rows([])) == markdown_table([]) == ""


@pytest.mark.parametrize("projection", ["pca", "tsne"])
def test_figures_are_written_below_the_first_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], projection: str
) -> None:
    run = write_run(tmp_path / "run", class_names=["_hidden", "$x^", "ok"])
    assert main([str(run), "--projection", projection]) == 0
    kinds = ["accuracy-by-round", "accuracy-by-bytes", "accuracy-of-clients", "margin-by-round"]
    kinds += ["accuracy-by-client", "classes-by-client", "prototypes"]
    assert {path.name for path in (run / "report").iterdir()} == {"report.html", *(f"{kind}.png" for kind in kinds)}
    assert all(path.read_bytes().startswith(PNG) for path in (run / "report").glob("*.png"))
    # A second report replaces its own figures, and they are no runs.
    assert main([str(run), "--projection", projection]) == 0
    assert "1 of 1 runs" in capsys.readouterr().out


def test_one_figure_a_group_and_a_partition(tmp_path: Path) -> None:
    for algorithm in ("fedtgp", "fedproto"):
        for seed in (0, 1):
            write_run(tmp_path / f"in/{algorithm}{seed}", algorithm=algorithm, seed=seed)
    write_run(tmp_path / "in/local", algorithm="local", prototypes=False, rule="head")
    out = tmp_path / "new" / "out"
    assert main([str(tmp_path / "in"), "--output", str(out)]) == 0
    assert sorted(path.stem for path in out.iterdir()) == [
        "accuracy-by-bytes",
        "accuracy-by-client-fedproto",
        "accuracy-by-client-fedtgp",
        "accuracy-by-client-local",
        "accuracy-by-round",
        "accuracy-of-clients",
        "classes-by-client",
        "margin-by-round",
        "prototypes-fedproto",
        "prototypes-fedtgp",
        "report",
    ]
    assert not (tmp_path / "in" / "report").exists()


def test_a_users_own_file_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    own = tmp_path / "prototypes.png"
    own.write_bytes(PNG + b"mine")
    assert main([str(run), "--output", str(tmp_path)]) == 1
    assert own.read_bytes() == PNG + b"mine"
    assert "prototypes.png: exists and was not written by protofed-report" in capsys.readouterr().err


def test_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "file").write_text("x")
    assert main([str(run), "--output", str(tmp_path / "file")]) == 1
    assert f"{tmp_path / 'file'}: cannot be written: File exists" in capsys.readouterr().err


@pytest.mark.usefixtures("no_figures")
def test_unreadable_folders_give_status_1_and_hide_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    broken = write_run(tmp_path / "broken")
    (broken / "summary.json").write_text("{")
    (tmp_path / "empty").mkdir()
    assert main([str(run), str(tmp_path / "empty"), str(broken), str(tmp_path / "none")]) == 1
    captured = capsys.readouterr()
    assert len(table(captured.out)) == 1
    problems = captured.err.splitlines()
    assert len(problems) == 3
    assert all(line.startswith("protofed-report: ") for line in problems)
    assert "empty: no run in this folder" in problems[0]
    assert "broken/summary.json: not JSON" in problems[1]
    assert "none: no such folder" in problems[2]


def test_only_failed_runs_draw_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", summary={"status": "failed", "reason": "boom"})
    assert main([str(run)]) == 0
    assert "0 of 1 runs are in the table" in capsys.readouterr().out
    assert not (run / "report").exists()


@pytest.mark.parametrize("arguments", [[], ["x", "--projection", "umap"], ["x", "--format", "pdf"]])
def test_bad_command_line_leaves_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2


def test_curve_skips_rounds_that_a_seed_did_not_evaluate(tmp_path: Path) -> None:
    for seed in (0, 1):
        run = write_run(tmp_path / str(seed), seed=seed, level=0.8)
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        lines[seed]["accuracy"] = None
        (run / "rounds.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ((group,), _) = group_runs(read_all(tmp_path))
    rounds, values = curves.curve(group)
    assert rounds == [3, 4, 5, 6]
    assert [value.count for value in values] == [2, 2, 2, 2]
    assert values[-1].mean == pytest.approx(0.8)


def test_lines_bands_and_labels_of_the_accuracy_figure(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", seed=seed, level=0.7 + 0.2 * seed)
    write_run(tmp_path / "local", algorithm="local", rule="head", prototypes=False)
    groups, _ = group_runs(read_all(tmp_path))
    figure = curves.accuracy_by_round(Study(groups), [""])
    (axes,) = figure.axes
    assert [text.get_text() for text in figure.legends[0].texts] == ["fedtgp (n=2)", "local (n=1)"]
    assert np.asarray(axes.lines[0].get_ydata())[-1] == pytest.approx(80)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "accuracy (%)")


def test_heat_map_shows_counts_and_clients_that_share_none(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = run / "clients.csv"
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    rows[2][header.index("class_counts")] = ""
    path.write_text("\n".join(",".join(row) for row in [header, *rows]))
    result = read_run(run)
    axes = clients.classes_by_client(result).axes[0]
    shown = np.ma.filled(np.ma.masked_invalid(axes.images[0].get_array()), -1)
    assert shown.shape == (3, 4)
    assert shown[:, 0].tolist() == list(result.clients[0].class_counts or ())
    assert (shown[:, 2] == -1).all()


def test_prototypes_that_diverged_or_are_few(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    arrays = dict(np.load(run / "prototypes.npz"))
    arrays["global_vectors"][0] = np.nan
    np.savez(run / "prototypes.npz", **arrays)
    axes = prototypes.prototype_map(read_run(run), "pca").axes[0]
    assert sum(len(np.asarray(line.get_xdata())) for line in axes.lines) == 2 + len(arrays["client_class_ids"])
    empty = {name: array[:0] for name, array in arrays.items()}
    np.savez(run / "prototypes.npz", **empty)
    assert not prototypes.has_prototypes(read_run(run))
    np.savez(run / "prototypes.npz", **{name: array[1:3] for name, array in arrays.items()})
    for projection in prototypes.PROJECTIONS:
        prototypes.prototype_map(read_run(run), projection)


@pytest.mark.filterwarnings("error")
def test_long_names_leave_room_for_the_axes(tmp_path: Path) -> None:
    for number in range(12):
        config = {"train": {"a_setting_with_a_long_name": f"{'value' * 12}{number}", "lr": number}}
        write_run(tmp_path / str(number), config=config, class_names=["a class with a long name" * 9] * 3)
    groups, _ = group_runs(read_all(tmp_path))
    study, run = Study(groups), groups[0].runs[0]
    drawn = [
        curves.accuracy_by_round(study, study.settings),
        clients.accuracy_boxes(study, study.settings),
        clients.classes_by_client(run),
        prototypes.prototype_map(run, "pca"),
        clients.accuracy_by_client(run),
    ]
    for figure in drawn:
        figure.canvas.draw()
        box = figure.axes[0].get_window_extent()
        assert box.width > 180  # dots of 1/100 inch
        assert box.height > 80


def test_principal_components_keep_distances_of_a_plane() -> None:
    plane = np.random.default_rng(0).normal(size=(2, 16))
    vectors = np.random.default_rng(1).normal(size=(9, 2)) @ plane
    points, first, second = prototypes.PROJECTIONS["pca"](vectors)
    wanted = np.linalg.norm(vectors[:, None] - vectors[None], axis=-1)
    np.testing.assert_allclose(np.linalg.norm(points[:, None] - points[None], axis=-1), wanted, atol=1e-9)
    shares = [int(label.split("(")[1].split("%")[0]) for label in (first, second)]
    assert sum(shares) in (99, 100, 101)


def test_a_bad_command_line_does_not_wait_for_matplotlib() -> None:
    code = "import sys, task.report; sys.exit(any(m in sys.modules for m in ('matplotlib', 'torch', 'sklearn')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PAPER = {
    "name": "table1",
    "source": "FedTGP, table 1",
    "accuracy": {"fedtgp": [88.15, 0.43], "fedproto": [78.34, None]},
    "communication": {"fedtgp": 3.25},
    "note": "means of trials",
}


@pytest.mark.usefixtures("no_figures")
def test_the_papers_accuracy_stands_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for algorithm in ("fedtgp", "fedproto", "local"):
        write_run(tmp_path / algorithm, algorithm=algorithm, config={"experiment": PAPER})
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    rows = table(output)
    found = {row["algorithm"]: row["paper"] for row in rows}
    assert found == {"fedtgp": "88.15 ± 0.43", "fedproto": "78.34", "local": ""}
    assert list(rows[0]).index("paper") == list(rows[0]).index("best accuracy (%)") + 1
    assert "experiment" not in rows[0]
    (line,) = [line for line in output.splitlines() if line.startswith("paper: ")]
    assert line == "paper: FedTGP, table 1: means of trials"
    assert main([str(tmp_path), "--format", "csv"]) == 0
    exact = {row["algorithm"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert (exact["fedtgp"]["paper_accuracy_mean"], exact["fedtgp"]["paper_accuracy_std"]) == ("0.881500", "0.004300")
    assert (exact["fedproto"]["paper_accuracy_mean"], exact["fedproto"]["paper_accuracy_std"]) == ("0.783400", "")


@pytest.mark.usefixtures("no_figures")
def test_without_a_paper_there_is_no_column_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", config={"experiment": None})
    write_run(tmp_path / "b", seed=1)  # of before there were experiments
    write_run(tmp_path / "c", algorithm="local", config={"experiment": PAPER | {"name": "other"}})
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    rows = table(output)
    assert {row["algorithm"]: row["n"] for row in rows} == {"fedtgp": "2", "local": "1"}
    assert "paper" not in rows[0]
    assert "paper:" not in output
    assert main([str(tmp_path), "--format", "csv"]) == 0
    assert "paper" not in capsys.readouterr().out


@pytest.mark.usefixtures("no_figures")
def test_experiments_are_told_apart_by_name_and_not_by_the_papers_numbers(tmp_path: Path) -> None:
    write_run(tmp_path / "a", config={"experiment": PAPER})
    write_run(tmp_path / "b", config={"experiment": PAPER | {"source": "corrected"}}, seed=1)
    write_run(tmp_path / "c", config={"experiment": PAPER | {"name": "table2"}})
    groups, _ = group_runs(read_all(tmp_path))
    assert [len(group.runs) for group in groups] == [2, 1]
    assert [row["experiment"] for row in identities(groups)] == ["table1", "table2"]
    assert labels(groups) == ["fedtgp, table1", "fedtgp, table2"]


@pytest.mark.parametrize(
    "experiment", ["words", {"source": "x"}, PAPER | {"accuracy": {"fedtgp": [1]}}, PAPER | {"communication": [1]}]
)
def test_a_malformed_experiment_is_left_out_and_noted(experiment: object, tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", config={"experiment": experiment}))
    assert run.is_complete
    assert run.experiment is None
    (note,) = run.notes
    assert "config.yaml: experiment is malformed" in note


def test_communication_is_the_mean_over_the_rounds_after_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", config={"experiment": PAPER})
    write_run(tmp_path / "b", config={"experiment": PAPER}, seed=1)
    write_run(tmp_path / "c", config={"experiment": PAPER}, algorithm="local", counted=False)
    assert main([str(tmp_path), "--communication"]) == 0
    output = capsys.readouterr().out
    ours, old = table(output)
    assert (ours["algorithm"], ours["n"]) == ("fedtgp", "2")
    assert (ours["parameters up"], ours["parameters down"], ours["up + down"]) == ("400", "800", "1,200")
    assert (ours["paper (10^6)"], old["paper (10^6)"]) == ("3.25", "-")
    assert (ours["bytes up"], ours["bytes down"], ours["evaluation"]) == ("2 kB", "1 kB", "600 B")
    assert (ours["a client's parameters"], ours["a client's bytes"]) == ("300", "750 B")
    assert (old["bytes up"], old["parameters up"], old["a client's bytes"]) == ("2 kB", "-", "-")
    for words in ("rounds after the first", "10^6", "Flower's records", "1 of 3 runs", "paper: FedTGP, table 1"):
        assert words in output
    assert not (tmp_path / "report").exists()


def test_communication_as_csv_is_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", rounds=1, clients=3, config={"experiment": PAPER})
    assert main([str(tmp_path), "--communication", "--format", "csv"]) == 0
    captured = capsys.readouterr()
    (row,) = csv.DictReader(io.StringIO(captured.out))
    wanted = {
        "parameters_up": 300,
        "parameters_down": 0,  # of round 1, the only one
        "parameters": 300,
        "paper_parameters": 3_250_000,
        "bytes_up": 2000,
        "bytes_down": 1000,
        "evaluation_up": 100,
        "evaluation_down": 500,
        "client_parameters_up": 100,
        "client_parameters_down": 0,
        "client_bytes_up": 666,
        "client_bytes_down": 333,
    }
    assert {name: float(row[name]) for name in wanted} == wanted
    assert "a run of one round" in captured.err
    assert communication.exact_rows([]) == communication.readable_rows([]) == []
