import csv
import io
import re
from pathlib import Path

import pytest

from task.report import main
from task.reporting.differences import Baseline, Difference
from task.reporting.text import as_latex
from tests.reporting.test_study import study_of
from tests.result_folders import write_run


def test_the_interval_is_students() -> None:
    found = Difference.of([1.0, 2.0, 3.0])
    assert found is not None
    # The 97.5 % point of t with two degrees of freedom is 4.302653, the standard error 1 / sqrt(3).
    half = 4.302653 / 3**0.5
    assert (found.mean, found.pairs) == (2.0, 3)
    assert found.low == pytest.approx(2 - half, abs=1e-5)
    assert found.high == pytest.approx(2 + half, abs=1e-5)
    assert not found.is_clear
    assert str(found) == "+2.00 [-0.48, +4.48]"


def test_one_pair_has_no_interval_and_equal_pairs_have_a_point() -> None:
    assert str(Difference.of([-1.25])) == "-1.25 (one pair)"
    assert Difference.of([0.5, 0.5]) == Difference(0.5, 0.5, 0.5, 2)
    assert Difference.of([]) is None


def write_pairs(folder: Path) -> None:
    """Write two settings: ours is 1, 3 points above local under alpha 0.1 and 2 below under alpha 1."""
    for seed, (ours, base) in enumerate(((0.81, 0.80), (0.73, 0.70), (0.99, None))):
        write_run(folder / f"a{seed}", seed=seed, level=ours)
        if base is not None:
            write_run(folder / f"b{seed}", algorithm="local", seed=seed, level=base)
    write_run(folder / "a-far", alpha=1, level=0.58)
    write_run(folder / "b-far", alpha=1, algorithm="local", level=0.60)


def test_pairs_have_the_same_seed_and_the_same_setting(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    study = study_of(tmp_path)
    baseline = Baseline.chosen(None, study)
    assert baseline is not None
    assert baseline.method == "local"
    near, far = (study.group("fedtgp", setting) for setting in study.settings)
    assert near is not None
    assert far is not None
    over = baseline.over(near)
    assert over is not None
    assert (over.mean, over.pairs) == (pytest.approx(2.0), 2)
    assert str(baseline.over(far)) == "-2.00 (one pair)"
    all_pairs = baseline.over_all("fedtgp")
    assert all_pairs is not None
    assert (all_pairs.mean, all_pairs.pairs) == (pytest.approx((1 + 3 - 2) / 3), 3)
    assert baseline.over_all("local") is None


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("task.report._write", lambda *_: iter(()))


@pytest.mark.usefixtures("no_files")
def test_the_command_line_chooses_the_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(tmp_path)
    assert main([str(tmp_path), "--baseline", "fedtgp", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    local = [row for row in rows if row["algorithm"] == "local"]
    assert [row["difference_mean"] for row in local] == ["-0.020000", "0.020000"]
    assert [row["difference_pairs"] for row in local] == ["2", "1"]
    assert local[1]["difference_low"] == ""
    assert main([str(tmp_path), "--baseline", "none"]) == 0
    assert "over" not in capsys.readouterr().out.splitlines()[0]
    assert main([str(tmp_path), "--baseline", "fedavg"]) == 2
    assert "--baseline='fedavg' is not allowed: one of fedtgp, local, none" in capsys.readouterr().err


@pytest.mark.usefixtures("no_files")
def test_the_grid_as_markdown_and_latex(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(tmp_path)
    assert main([str(tmp_path), "--grid"]) == 0
    output = re.sub(" +", " ", capsys.readouterr().out)
    assert "| fedtgp | 84.33 ± 13.32 (n=3) | 58.00 (n=1; seed 1, 2 missing) |" in output
    assert "not full: local, alpha=0.1: seed 2 missing" in output
    assert main([str(tmp_path), "--grid", "--format", "latex"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == r"\begin{tabular}{lrr}"
    assert lines[3] == r"method & alpha=0.1 & alpha=1 \\"
    assert lines[5].startswith(r"fedtgp & 84.33 $\pm$ 13.32 (n=3) &")
    assert lines[-1] == r"\end{tabular}"


def test_latex_prints_signs_as_they_are() -> None:
    text = as_latex([{"a_b": "50 % & $x$ {#} ~^\\"}])
    assert r"a\_b \\" in text
    assert r"50 \% \& \$x\$ \{\#\} \textasciitilde{}\textasciicircum{}\textbackslash{} \\" in text
    assert as_latex([]) == ""
