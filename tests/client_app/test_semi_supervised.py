"""The local steps of the semi-supervised methods, on sessions of clients with and without labels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from client_app.loop import fit_epochs
from client_app.session import Session
from client_app.trainers.dccfssl import DCCFSSLTrainer
from client_app.trainers.fixmatch import FixMatchTrainer
from client_app.trainers.global_model import GlobalModelTrainer
from client_app.trainers.rscfed import RSCFedTrainer
from task.data.shares import Split
from task.messages import Download, PrototypeSet, Upload
from task.methods.rscfed import TRAININGS
from task.models.split import weights_of
from tests.client_app.test_training import session as plain_session
from tests.shared_model import run_of
from tests.stripes import TINY
from tests.test_labels import session as stripes_session

SURE, NEVER = 0.1, 1.1


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def session(is_labelled: bool = False, overrides: str = "", samples: int = 40, **weights: Tensor) -> Session:
    model = "" if "model=" in overrides else TINY
    of = plain_session(f"algorithm=fedavg {model} train=fssl train.batch_size=10 {overrides}", 1, samples)
    of.is_labelled = is_labelled
    of.download = Download(None, run_of(of).auxiliary().state_dict() | weights, round=1, session="test")
    return of


def moved(upload: Upload, of: Session) -> bool:
    """Whether any parameter (no buffer) of the uploaded model differs from the downloaded one."""
    assert upload.weights is not None
    assert of.download.weights is not None
    names = [name for name, _ in of.model.named_parameters()]
    return any(not torch.equal(upload.weights[name], of.download.weights[name]) for name in names)


def protos(of: Session, classes: int = 10) -> PrototypeSet:
    vectors = torch.randn(classes, 16, generator=torch.Generator().manual_seed(0))
    return PrototypeSet(torch.arange(classes), vectors)


@pytest.mark.parametrize(
    ("trainer", "moves"),
    [
        (FixMatchTrainer(threshold=NEVER), False),
        (FixMatchTrainer(threshold=NEVER, proximal=0.1), False),  # the term is 0, and weight decay has no step
        (FixMatchTrainer(threshold=SURE, proximal=0.1), True),
        (FixMatchTrainer(threshold=SURE), True),
        (DCCFSSLTrainer(lambda_lcc=0.0, lambda_gcc=0.0, threshold=NEVER), False),
        (DCCFSSLTrainer(lambda_lcc=0.0, threshold=NEVER), False),
        (DCCFSSLTrainer(lcc_unlabelled="drop", threshold=NEVER), False),
        (DCCFSSLTrainer(threshold=NEVER), True),  # two views of one image still attract
    ],
)
def test_what_teaches_nothing_moves_nothing(trainer: GlobalModelTrainer, moves: bool) -> None:
    of = session()
    of.download = Download(protos(of), of.download.weights, 1, "test")
    upload = trainer.fit(of)
    assert moved(upload, of) == moves
    assert upload.metrics["unlabelled_loss"] == 0 or trainer.threshold == SURE  # type: ignore[attr-defined]
    assert upload.metrics["confident"] == (1.0 if trainer.threshold == SURE else 0.0)  # type: ignore[attr-defined]


def test_a_client_without_labels_needs_a_threshold() -> None:
    with pytest.raises(ValueError, match="client 1 has no labels"):
        FixMatchTrainer().fit(session())


@pytest.mark.parametrize("samples", [0, 1, 2, 11])
@pytest.mark.parametrize("is_labelled", [True, False])
def test_clients_with_few_images(samples: int, is_labelled: bool) -> None:
    trainings = torch.ones(1, dtype=torch.int64)
    for trainer in (FixMatchTrainer(threshold=SURE), DCCFSSLTrainer(threshold=SURE), RSCFedTrainer()):
        of = session(is_labelled, samples=samples)
        if isinstance(trainer, RSCFedTrainer):
            of.download = Download(None, {**(of.download.weights or {}), TRAININGS: trainings}, 1, "test")
        upload = trainer.fit(of)
        assert upload.examples == (samples or None)
        assert (upload.weights is None) == (samples == 0)
        tensors = (upload.weights or {}).values()
        assert all(torch.isfinite(tensor).all() for tensor in tensors)


@pytest.mark.parametrize("is_labelled", [True, False])
def test_half_precision_and_channels_last(is_labelled: bool) -> None:
    trainings = torch.ones(1, dtype=torch.int64)
    for trainer in (FixMatchTrainer(threshold=SURE), DCCFSSLTrainer(threshold=SURE), RSCFedTrainer()):
        of = session(is_labelled, "train.precision=bf16 train.channels_last=true", samples=10)
        if isinstance(trainer, RSCFedTrainer):
            of.download = Download(None, {**(of.download.weights or {}), TRAININGS: trainings}, 1, "test")
        else:
            of.download = Download(protos(of), of.download.weights, 1, "test")
        upload = trainer.fit(of)
        assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in (upload.weights or {}).values())
        assert 0 < sum(value for name, value in upload.metrics.items() if "loss" in name) < 50


def test_the_supervised_loss_is_that_of_the_weak_view() -> None:
    # Without flips and shifts a weak view is the image itself, so this is plain supervised training.
    still = {"flip": False, "crop_padding": 0.0}
    found = []
    for trainer in (FixMatchTrainer(view="weak", views=still), FixMatchTrainer(view="plain")):
        of = session(True)
        found.append(trainer.fit(of).weights or {})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    of = session(True)
    other = FixMatchTrainer(view="weak").fit(of).weights or {}
    assert any(not torch.equal(other[name], found[0][name]) for name in other)


def test_clip_bounds_a_step() -> None:
    of = session(True, "train.clip=0.001 train.lr=1.0 train.momentum=0 train.weight_decay=0", samples=10)
    upload = FixMatchTrainer().fit(of)
    names = [name for name, _ in of.model.named_parameters()]
    first, last = of.download.weights or {}, upload.weights or {}
    length = sum(float((last[name] - first[name]).square().sum()) for name in names) ** 0.5
    assert length == pytest.approx(0.001, rel=1e-2)


def test_the_rate_of_unlabelled_clients_scales_their_step() -> None:
    steps = []
    for rate in (1.0, 0.5):
        of = session(overrides="train.momentum=0 train.weight_decay=0", samples=10)
        last = FixMatchTrainer(threshold=SURE, unlabelled_rate=rate).fit(of).weights or {}
        steps.append(last["head.weight"] - (of.download.weights or {})["head.weight"])
    assert steps[0].abs().max() > 0
    assert torch.allclose(steps[1], 0.5 * steps[0], atol=1e-7)


def test_prototypes_are_those_of_the_trained_model_on_authentic_images() -> None:
    of = session(True, "train.local_epochs=8", samples=60)
    upload = DCCFSSLTrainer().fit(of)
    model, images, labels = of.model.eval(), *(torch.cat(parts) for parts in zip(*of.all_train_batches(), strict=True))
    with torch.no_grad():
        feats = functional.normalize(model.features(images))
        right = model(images).argmax(1) == labels
    assert 0 < int(right.sum()) < 60
    assert upload.prototypes is not None
    assert upload.prototypes.counts is not None
    for class_id, vector, count in zip(
        *(getattr(upload.prototypes, n) for n in ("class_ids", "vectors", "counts")), strict=True
    ):
        chosen = right & (labels == class_id)
        assert int(count) == int(chosen.sum())
        assert torch.allclose(vector, feats[chosen].mean(0), atol=1e-6)
    every = DCCFSSLTrainer(authenticate=False).fit(session(True, samples=60)).prototypes
    assert every is not None
    assert every.counts is not None
    assert int(every.counts.sum()) == 60


@pytest.mark.parametrize("setting", [{"authentication_view": "weak"}, {"normalise": False}, {"teacher": "global"}])
def test_readings_of_the_paper_change_what_is_sent(setting: dict[str, Any]) -> None:
    uploads = []
    for changes in ({}, setting):
        of = session(overrides="train.local_epochs=3")
        of.download = Download(protos(of), of.download.weights, 1, "test")
        # With the model as it came no answer is sure of more than this; the trained one is.
        uploads.append(DCCFSSLTrainer(threshold=0.11, **changes).fit(of))
    one, two = uploads
    assert one.prototypes is not None
    assert two.prototypes is not None
    changed = one.prototypes.vectors.shape != two.prototypes.vectors.shape
    assert changed or not torch.equal(one.prototypes.vectors, two.prototypes.vectors)


def test_images_that_are_floats_already_are_refused_by_name(tmp_path: Path) -> None:
    of = session()
    of.dataset = type(of.dataset)(
        (of.dataset.images[:2000] / 255).astype("float32"),
        of.dataset.labels[:2000],
        of.dataset.is_test[:2000],
        of.dataset.class_names,
        of.dataset.label_mapping,
        None,
        tmp_path,
    )
    of.split = Split(torch.arange(20).numpy(), of.split.test)
    with pytest.raises(ValueError, match="client 1: images are float32"):
        FixMatchTrainer(threshold=SURE).fit(of)
    assert FixMatchTrainer(view="plain").fit(_labelled(of)).weights is not None


def _labelled(of: Session) -> Session:
    of.is_labelled = True
    of.__dict__.pop("_train_data", None)
    return of


def test_momentum_goes_on_where_it_ended() -> None:
    # Two epochs in one go, or one epoch twice with the momentum carried over, are the same steps.
    def step_of(of: Session) -> Any:
        return lambda images, labels: {"loss": functional.cross_entropy(of.model(images), labels)}

    whole, halves = (plain_session(f"{TINY} train=fssl train.local_epochs={n} train.batch_size=10") for n in (2, 1))
    halves.model.load_state_dict(whole.model.state_dict())
    fit_epochs(whole, step_of(whole))
    momentum: dict[str, Tensor] = {}
    for _ in range(2):
        fit_epochs(halves, step_of(halves), momentum=momentum)
    one, two = weights_of(whole.model), weights_of(halves.model)
    assert all(torch.allclose(one[name].float(), two[name].float(), atol=1e-6) for name in one)
    assert set(momentum) == {name for name, _ in halves.model.named_parameters()}


def test_a_model_with_batchnorm_is_as_good_in_tests_as_in_training() -> None:
    # With a momentum of 0.001 its running statistics would be those of no data, and tests would be at chance.
    of = session(
        True, "model=cnn_small partition.max_samples=2000 train.batch_size=16 train.local_epochs=3", samples=400
    )
    FixMatchTrainer().fit(of)
    images, labels = (torch.cat(parts) for parts in zip(*of.all_train_batches(), strict=True))
    with torch.no_grad():
        accuracy = [(of.model.train(mode)(images).argmax(1) == labels).float().mean().item() for mode in (True, False)]
    assert accuracy[0] > 0.4
    assert abs(accuracy[0] - accuracy[1]) < 0.2


def test_a_teacher_follows_its_student_and_lives_on(tmp_path: Path) -> None:
    from tests.stripes import write

    of = stripes_session(write(tmp_path / "stripes.npz"), 1, overrides="labels=few train=fssl train.batch_size=8")
    first = run_of(of).auxiliary().state_dict()
    trainer = RSCFedTrainer()
    for number, trainings in ((1, 1), (2, 2)):
        weights = first | {TRAININGS: torch.tensor([trainings])}
        of.download = Download(None, weights, number, "test")
        of.__dict__.pop("_generator", None)
        before = int(of.kept.get("steps", torch.tensor(0)))
        upload = trainer.fit(of)
        assert int(of.kept["steps"]) == before + 3 * trainings  # 24 images in batches of 8
        assert set(upload.weights or {}) == {f"{i}/{name}" for i in range(trainings) for name in first}
    models = upload.weights or {}
    assert any(not torch.equal(models[f"0/{name}"], models[f"1/{name}"]) for name in first)
    assert {name.split("/")[0] for name in of.kept} == {"teacher", "momentum", "steps"}
    # After one step of its life the teacher is the student, later it moves by less and less.
    alone = stripes_session(tmp_path / "stripes.npz", 1, overrides="labels=few train=fssl train.batch_size=24")
    alone.download = Download(None, first | {TRAININGS: torch.tensor([1])}, 1, "test")
    sent = trainer.fit(alone).weights or {}
    assert all(torch.equal(alone.kept[f"teacher/{name}"], sent[f"0/{name}"]) for name in first)
    for wrong in ({}, {TRAININGS: torch.tensor([0])}):
        alone.download = Download(None, first | wrong, 1, "test")
        with pytest.raises(ValueError, match="server sent trainings"):
            trainer.fit(alone)
