"""Every benchmark runs and prints its table; whether it reaches its ratio is no matter for a test."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
BENCHMARKS = sorted(path.stem for path in HERE.glob("bench_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_quick_run_prints_its_table(name: str) -> None:
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", "--quick"]
    ended = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=500)
    lines = ended.stdout.splitlines()
    assert ended.returncode in (0, 1), ended.stderr
    assert "Traceback" not in ended.stderr
    assert any(line.startswith(("ok  ", "MISS", "skipped")) for line in lines), ended.stdout
