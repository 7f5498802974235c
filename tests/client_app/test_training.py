"""Local training through sessions: precision, devices, tiny clients, memory, the step itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from client_app.loop import fit_epochs
from client_app.main import _within_memory
from client_app.session import Session, choose_device, open_session
from client_app.trainers.prototype import PrototypeTrainer
from client_app.trainers.supervised import SupervisedTrainer
from task.data.shares import Split
from task.messages import Download, PrototypeSet

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def needs_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def session(overrides: str = "", partition: int = 0, samples: int | None = 40) -> Session:
    run_config: dict[str, Any] = {"overrides": f"partition=iid {overrides}"}
    node = {"partition-id": partition, "num-partitions": 4}
    found = open_session(Context(1, 1, node, RecordDict(), run_config))
    if samples is not None:
        found.split = Split(found.split.train[:samples], found.split.test[:samples])
    found.download = Download(prototypes(found), round=1, session="test")
    return found


def prototypes(of: Session) -> PrototypeSet:
    vectors = torch.randn(of.num_classes, of.config.model.feature_dim, generator=torch.Generator().manual_seed(0))
    return PrototypeSet(torch.arange(of.num_classes), vectors)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_every_precision_and_layout_learns(device: str, precision: str, channels_last: bool) -> None:
    overrides = f"train.device={device} train.precision={precision} train.channels_last={channels_last}"
    of = session(f"{overrides} train.local_epochs=6 train.lr=0.05", partition=1)
    upload = PrototypeTrainer(weight=0.01).fit(of)
    assert all(parameter.device.type == device for parameter in of.model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in of.model.parameters())
    assert upload.metrics["loss"] < 2.4
    assert upload.prototypes is not None
    assert upload.prototypes.vectors.dtype == torch.float32
    assert torch.isfinite(upload.prototypes.vectors).all()
    report = SupervisedTrainer().evaluate(of)
    assert 0 <= report.metrics["accuracy-prototype"] <= 1


@pytest.mark.parametrize("samples", [0, 1, 11, 21])
@pytest.mark.parametrize("model", ["htcnn4", "resnet10"])
def test_tiny_clients_and_single_samples_with_batchnorm(samples: int, model: str) -> None:
    of = session(f"model={model} train.batch_size=10", samples=samples)
    upload = PrototypeTrainer(share_counts=True).fit(of)
    report = SupervisedTrainer().evaluate(of)
    if samples == 0:
        assert upload.prototypes is None
        assert upload.metrics == {}
        assert report.metrics == {}
        assert report.examples == 0
    else:
        assert upload.prototypes is not None
        assert upload.prototypes.counts is not None
        assert int(upload.prototypes.counts.sum()) == samples
        assert np.isfinite(list(upload.metrics.values())).all()


def test_uploaded_prototypes_are_those_of_the_trained_model_in_eval_mode() -> None:
    of = session("model=resnet10 train.lr=0.05", samples=30)
    before = {name: tensor.clone() for name, tensor in of.model.state_dict().items()}
    upload = PrototypeTrainer().fit(of)
    assert any(not torch.equal(before[name], tensor) for name, tensor in of.model.state_dict().items())
    of.model.eval()
    images, labels = next(of.all_train_batches())
    with torch.no_grad():
        feats = of.model.features(images)
    assert upload.prototypes is not None
    assert upload.prototypes.class_ids.tolist() == sorted(set(labels.tolist()))
    for class_id, vector in zip(upload.prototypes.class_ids, upload.prototypes.vectors, strict=True):
        expected = torch.stack([f for f, label in zip(feats, labels, strict=True) if label == class_id]).mean(dim=0)
        assert torch.allclose(vector, expected, atol=1e-5)


def test_collecting_during_training_gives_other_prototypes() -> None:
    after = PrototypeTrainer().fit(session())
    during = PrototypeTrainer(collect="during_training").fit(session())
    assert after.prototypes is not None
    assert during.prototypes is not None
    assert after.prototypes.class_ids.tolist() == during.prototypes.class_ids.tolist()
    assert not torch.allclose(after.prototypes.vectors, during.prototypes.vectors)


def test_the_loop_is_plain_sgd() -> None:
    one, two = session("train.momentum=0.9 train.weight_decay=0.01"), session()
    cross_entropy = torch.nn.functional.cross_entropy
    fit_epochs(one, lambda images, labels: {"loss": cross_entropy(one.model(images), labels)})
    optimizer = torch.optim.SGD(two.model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
    for images, labels in two.train_batches():
        optimizer.zero_grad()
        cross_entropy(two.model(images), labels).backward()
        optimizer.step()
    for (name, ours), theirs in zip(one.model.state_dict().items(), two.model.state_dict().values(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6), name


def test_the_reported_loss_is_a_mean_over_samples() -> None:
    of = session(samples=13)  # a full batch of ten and one of three
    metrics = fit_epochs(of, lambda images, labels: {"loss": of.model(images).sum() * 0 + float(len(labels))})
    assert metrics["loss"] == pytest.approx((10 * 10 + 3 * 3) / 13)


def test_restoring_needs_no_first_weights_and_gives_the_same_features() -> None:
    one, two = session(partition=2), session("seed=9", partition=2)
    one.kept["mine"] = torch.arange(3)
    two.restore(one.state())
    assert two.kept["mine"].tolist() == [0, 1, 2]
    images, _ = next(one.test_batches())
    one.model.eval()
    two.model.eval()
    assert torch.equal(one.model(images), two.model(images))


def test_first_weights_differ_between_clients_unless_asked() -> None:
    def first(partition: int, overrides: str = "") -> torch.Tensor:
        return next(iter(session(f"model=cnn4 {overrides}", partition).model.parameters()))

    assert not torch.equal(first(0), first(1))
    assert torch.equal(first(0), first(0))
    assert torch.equal(first(0, "model.same_init=true"), first(1, "model.same_init=true"))


def test_cuda_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 3).type == "cpu"
    with pytest.raises(ValueError, match=r"client 3: train\.device=cuda"):
        choose_device("cuda", 3)


def test_out_of_memory_names_the_client_and_what_to_lower() -> None:
    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RuntimeError, match=r"client 0 \(plain\): out of GPU memory; lower train\.batch_size"):
        _within_memory(session(), work)


@pytest.mark.gpu
def test_the_servers_training_runs_on_the_gpu() -> None:
    from server_app.strategies.fedtgp import FedTGP
    from task.messages import Upload

    strategy = FedTGP(epochs=5)
    generator = torch.Generator().manual_seed(0)
    state = strategy.init_state(10, 64, generator)
    uploads = [Upload(0, 1, PrototypeSet(torch.arange(10), torch.randn(10, 64, generator=generator)))]
    states = [strategy.absorb(state, uploads, generator, torch.device(device))[0] for device in ("cpu", "cuda")]
    for name, tensor in states[0].items():
        assert torch.allclose(tensor, states[1][name], atol=1e-3), name
        assert states[1][name].device.type == "cpu"


def test_the_state_folder_of_a_session_is_in_the_results(tmp_path: Path) -> None:
    from client_app.state import DiskStore, open_store

    context = Context(1, 1, {"partition-id": 0, "num-partitions": 4}, RecordDict(), {"output-dir": str(tmp_path)})
    of = session()
    store = open_store(of.config, of.node, context, "9")
    assert isinstance(store, DiskStore)
    assert store.folder == tmp_path / "client-state" / "9" / "client-00000"
