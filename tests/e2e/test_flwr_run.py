import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from task.superlink import CONNECTION, LocalSuperLink
from tests.e2e.commands import REPOSITORY

pytestmark = pytest.mark.e2e
SMOKE = "debug=smoke"


@pytest.fixture(scope="module")
def link() -> Iterator[LocalSuperLink]:
    """A SuperLink on a free port, since Flower's own has a fixed one that may be in use."""
    with LocalSuperLink() as link:
        yield link


def flwr_run(link: LocalSuperLink, folder: Path, overrides: str, *more: str) -> tuple[dict[str, object], str]:
    """Run the project as the README says; return the summary (empty where there is none) and the log."""
    flwr = shutil.which("flwr", path=link.environment["PATH"])
    assert flwr is not None
    run_config = f"overrides='{overrides}' output-dir='{folder}'"
    done = subprocess.run(
        [flwr, "run", str(REPOSITORY), CONNECTION, "--stream", "--run-config", run_config, *more],
        env=link.environment,
        cwd=folder.parent,
        capture_output=True,
        encoding="utf-8",
        timeout=400,
        check=False,
    )
    log = done.stdout + done.stderr
    summary = folder / "summary.json"
    return (json.loads(summary.read_text("utf-8")) if summary.exists() else {}), log


def test_two_nodes_by_default(link: LocalSuperLink, tmp_path: Path) -> None:
    summary, log = flwr_run(link, tmp_path / "run 1", f"algorithm=fedproto {SMOKE}")
    assert summary.get("status") == "completed", log
    assert (summary["algorithm"], summary["num_clients"], summary["rounds_done"]) == ("fedproto", 2, 2)
    again, log = flwr_run(link, tmp_path / "run 1", f"algorithm=fedtgp {SMOKE}")
    assert again == summary
    assert "overwrite=true" in log


@pytest.mark.slow
def test_more_nodes_when_asked(link: LocalSuperLink, tmp_path: Path) -> None:
    more = ("--federation-config", "num-supernodes=5 client-resources-num-cpus=1")
    summary, log = flwr_run(link, tmp_path / "run", SMOKE, *more)
    assert (summary.get("status"), summary.get("num_clients")) == ("completed", 5), log


def test_a_bad_setting_is_refused(link: LocalSuperLink, tmp_path: Path) -> None:
    summary, log = flwr_run(link, tmp_path / "run", "federation.ronds=5")
    assert not summary
    assert "nearest known: federation.rounds" in log
