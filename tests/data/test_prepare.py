import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from task.data.partition import Given, client_splits
from task.data.pfllib import Pfllib
from task.data.prepare import _prepare, cache_root, prepare
from task.data.sources import Npz

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fresh_process_cache():
    _prepare.cache_clear()


def _npz(folder, n=6, labels=None):
    x = np.arange(n * 8 * 9 * 3, dtype=np.uint8).reshape(n, 8, 9, 3)
    np.savez(folder / "a.npz", x=x, y=np.array(["dog", "cat"] * (n // 2)) if labels is None else labels)
    return Npz(str(folder / "a.npz")), x


def test_prepared_data_is_the_source_data(tmp_path):
    source, x = _npz(tmp_path)
    dataset = prepare(source, tmp_path / "cache")
    np.testing.assert_array_equal(dataset.images, x.transpose(0, 3, 1, 2))
    assert isinstance(dataset.images, np.memmap)
    assert dataset.labels.tolist() == [1, 0] * 3
    assert dataset.class_names == ("cat", "dog")
    assert dataset.label_mapping == {"cat": 0, "dog": 1}
    assert dataset.num_classes == 2
    assert dataset.image_shape == (3, 8, 9)
    assert dataset.given is None
    meta = json.loads((dataset.folder / "meta.json").read_text(encoding="utf-8"))
    assert meta["label_mapping"] == {"cat": 0, "dog": 1}


def test_second_call_reads_nothing(tmp_path, monkeypatch):
    source, _ = _npz(tmp_path)
    first = prepare(source, tmp_path / "cache")
    monkeypatch.setattr(Npz, "read", lambda self: pytest.fail("read twice"))
    assert prepare(source, str(tmp_path / "cache")) is first
    _prepare.cache_clear()
    assert prepare(source, tmp_path / "cache").digest == first.digest


def test_changed_file_is_prepared_again(tmp_path):
    source, _ = _npz(tmp_path)
    first = prepare(source, tmp_path / "cache")
    _npz(tmp_path, n=8)
    _prepare.cache_clear()
    second = prepare(source, tmp_path / "cache")
    assert len(second.labels) == 8
    assert first.folder != second.folder


def test_bad_labels_leave_nothing_behind(tmp_path):
    source, _ = _npz(tmp_path, labels=np.array([0, 1, 2, np.nan, 1, 1]))
    with pytest.raises(ValueError, match=r"data\.source: label nan of sample 3"):
        prepare(source, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] in ([], [".lock"])


def test_interrupted_preparation_is_done_again(tmp_path):
    source, _ = _npz(tmp_path)
    folder = prepare(source, tmp_path / "cache").folder
    leftover = folder.rename(folder.with_name(f"{folder.name}.tmp"))
    (leftover / "meta.json").write_text("{")
    _prepare.cache_clear()
    assert len(prepare(source, tmp_path / "cache").labels) == 6
    assert not leftover.exists()


def test_damaged_data_names_the_folder(tmp_path):
    source, _ = _npz(tmp_path)
    folder = prepare(source, tmp_path / "cache").folder
    (folder / "images.npy").write_bytes(b"")
    _prepare.cache_clear()
    with pytest.raises(ValueError, match=rf"{folder.name}: prepared data is damaged, delete this folder"):
        prepare(source, tmp_path / "cache")


def test_unwritable_cache_names_the_key(tmp_path):
    source, _ = _npz(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"data\.cache_dir: prepared data cannot be written"):
        prepare(source, tmp_path / "file" / "cache")
    with pytest.raises(ValueError, match=r"data\.cache_dir: must be an absolute path"):
        prepare(source, "cache")


def test_cache_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "protofed"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "protofed"


def test_processes_that_start_together_prepare_once(tmp_path):  # C25
    code = (
        "import sys; from tests.data.slow_source import Slow; from task.data.prepare import prepare; "
        "assert len(prepare(Slow(sys.argv[1]), sys.argv[2]).labels) == 4"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log"), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, cwd=REPOSITORY) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "read\n"


def test_given_division_survives(tmp_path):
    for client, n in enumerate((4, 0)):
        for part, count in (("train", n), ("test", 2)):
            (tmp_path / part).mkdir(exist_ok=True)
            x = np.full((count, 1, 8, 8), client, dtype=np.float32)
            np.savez(tmp_path / part / f"{client}.npz", data={"x": x, "y": np.full(count, client)})
    dataset = prepare(Pfllib(str(tmp_path)), tmp_path / "cache")
    assert [(len(train), len(test)) for train, test in dataset.given] == [(4, 2), (0, 2)]
    splits = client_splits(Given(), dataset, 2, 0)
    assert splits[0].train.tolist() == [0, 1, 2, 3]
    assert dataset.labels[splits[1].test].tolist() == [1, 1]
    assert client_splits(Given(), dataset, 2, 0) is splits
    with pytest.raises(ValueError, match=r"federation\.num_clients: must be 2"):
        client_splits(Given(), dataset, 3, 0)
