from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from client_app.node_facts import node_facts
from client_app.state import ContextStore, DiskStore, open_store
from task.config import load


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 3), value), "num_batches_tracked": torch.tensor(5)}


def context() -> Context:
    return Context(run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config={})


@pytest.mark.parametrize("kind", ["disk", "context"])
def test_what_was_kept_comes_back_with_its_types(kind: str, tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "client", 3) if kind == "disk" else ContextStore(context(), 3)
    store.save(4, tensors(0.5), ())
    found = store.load(4)
    assert torch.equal(found["weight"], tensors(0.5)["weight"])
    assert found["num_batches_tracked"].dtype == torch.int64
    assert found["num_batches_tracked"].shape == ()


@pytest.mark.parametrize("kind", ["disk", "context"])
def test_another_rounds_state_is_never_returned(kind: str, tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "client", 3) if kind == "disk" else ContextStore(context(), 3)
    with pytest.raises(ValueError, match="client 3: its state of round 1 is lost"):
        store.load(1)
    store.save(2, tensors(1.0), ())
    with pytest.raises(ValueError, match="client 3: its state of round 1 is lost"):
        store.load(1)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 3)
    store.save(1, tensors(1.0), ())
    path = tmp_path / "round-000001.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"round-000001\.safetensors cannot be read"):
        store.load(1)


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name[6:12]) for path in folder.iterdir())


def test_only_what_may_be_asked_for_again_is_kept(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 3)
    for number, needed in ((1, (0,)), (3, (1, 0)), (4, (3, 1)), (6, (4, 4))):
        store.save(number, tensors(number), needed)
    assert kept(tmp_path) == [4, 6]
    # The reply of round 6 was dropped: the server still asks for round 4, and round 7 starts from it.
    store.save(7, tensors(7), (4, 4))
    assert kept(tmp_path) == [4, 7]


@pytest.mark.parametrize("kind", ["disk", "context"])
def test_a_straggler_leaves_newer_states_alone(kind: str, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 3) if kind == "disk" else ContextStore(context(), 3)
    store.save(6, tensors(6), ())
    store.save(8, tensors(8), (6,))
    store.save(7, tensors(7), (6,))  # its round had ended long before
    for number in (6, 7, 8):
        assert torch.equal(store.load(number)["weight"], tensors(number)["weight"])


def test_a_folder_that_cannot_be_written_names_the_client(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="client 3: its state cannot be written"):
        DiskStore(tmp_path / "file" / "x", 3).save(1, tensors(1.0), ())


def test_the_nodes_own_folder_wins(tmp_path: Path) -> None:
    node = node_facts({"partition-id": 2, "num-partitions": 3, "state-dir": str(tmp_path / "node")})
    store = open_store(load(f"federation.state_dir={tmp_path / 'run'}"), node, context(), "7")
    assert isinstance(store, DiskStore)
    assert store.folder == tmp_path / "node" / "7" / "client-00002"
