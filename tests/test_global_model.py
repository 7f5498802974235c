"""One global model: central tests, sampling, what stays on clients, and the supervised methods, through the apps."""

from pathlib import Path

import numpy as np
import pytest
import torch

from client_app.trainers.supervised import SupervisedTrainer
from server_app.central import CentralTest
from server_app.strategies.fedavg import FedAvg
from task.config import build, load
from task.data.loaders import normalise
from task.data.partition import client_splits
from task.messages import Download, Upload
from task.models.split import weights_of
from tests import contents
from tests.client_app.test_training import session
from tests.fake_grid import run_federation
from tests.shared_model import run_of
from tests.stripes import CLASSES, TINY, messages, model_of, rows_of, run, same, state_of, stripes, summary_of, tensors


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_server_tests_the_global_model_on_the_sources_own_test_split(tmp_path: Path) -> None:
    grid = run(tmp_path / "run", "fedavg_sl_upper", "federation.rounds=4 federation.evaluate_every=3")
    rows, summary = rows_of(tmp_path / "run"), summary_of(tmp_path / "run")
    assert [row["accuracy"] is not None for row in rows] == [False, False, True, True]
    assert not messages(grid, "evaluate", sent=True)
    model = session(f"algorithm=fedavg {TINY}").model
    model.head = torch.nn.Linear(16, CLASSES)
    model.load_state_dict(model_of(tmp_path / "run"))
    x, y = stripes(80, 1)
    with torch.no_grad():
        right = model.eval()(normalise(torch.from_numpy(x).permute(0, 3, 1, 2))).argmax(1).numpy() == y
    assert rows[-1]["accuracy"] == rows[-1]["accuracy_head"] == pytest.approx(right.mean())
    assert summary["accuracy_model"] == "global"
    assert summary["tail_rounds"] == 2
    assert summary["tail_accuracy_std"] == pytest.approx(np.std([rows[2]["accuracy"], rows[3]["accuracy"]]))
    assert (summary["labelled_clients"], summary["unlabelled_clients"]) == (4, 0)  # revealed


def test_the_lines_of_rounds_have_the_same_fields_whoever_tests(tmp_path: Path) -> None:
    run(tmp_path / "server", "fedavg_fixmatch", "federation.rounds=1")
    clients = "algorithm.evaluation=clients partition.test_fraction=0.25 federation.rounds=1"
    grid = run(tmp_path / "clients", "fedavg_fixmatch", clients)
    one, two = (rows_of(tmp_path / name)[0] for name in ("server", "clients"))
    assert one.keys() == two.keys()
    assert (one["clients_evaluated"], two["clients_evaluated"]) == (0, 4)
    replies = [contents.metrics(reply)["accuracy-head"] for _, _, reply in messages(grid, "evaluate")]
    assert two["accuracy"] == pytest.approx(np.mean(replies))  # all clients have 6 test images
    sent = [tensors(message) for _, _, message in messages(grid, "evaluate", sent=True)]
    assert all(same(each, model_of(tmp_path / "clients")) for each in sent)


def test_a_source_without_test_images_says_what_to_do(tmp_path: Path) -> None:
    overrides = f"algorithm=fedavg_sl_lower {TINY} labels=few partition=iid_train federation.rounds=1 data=digits"
    with pytest.raises(
        ValueError, match=r"data=digits has no test split of its own; use .*evaluation=clients"
    ) as caught:
        run_federation(overrides, str(tmp_path / "run"), num_nodes=2)
    assert "\n" not in str(caught.value)
    assert "no test split" in summary_of(tmp_path / "run")["reason"]


def test_a_server_without_images_or_with_other_classes_says_what_to_do(tmp_path: Path) -> None:
    overrides = f"algorithm=fedavg_sl_lower {TINY} partition=iid_train data.cache_dir={tmp_path}"
    missing = load(f"{overrides} data=npz data.source.path={tmp_path}/missing.npz")
    with pytest.raises(ValueError, match=r"the server has no images .*missing.npz.*evaluation=clients"):
        CentralTest(missing, ("a", "b"), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"knows classes that no client knows.*evaluation=clients"):
        CentralTest(load(overrides), ("a", "b"), torch.device("cpu"))


def test_clients_keep_nothing_on_disk(tmp_path: Path) -> None:
    run(tmp_path / "run", "dccfssl")
    assert not (tmp_path / "run" / "client-state").exists()


def test_fedavg_with_one_client_is_local_training(tmp_path: Path) -> None:
    overrides = f"{TINY} partition=iid partition.max_samples=60 train.momentum=0.9 federation.rounds=2"
    run_federation(f"algorithm=fedavg {overrides}", str(tmp_path / "run"), num_nodes=1)
    alone = session(f"algorithm=fedavg {overrides}", samples=None)
    scheme = build(alone.config.partition, "partition")
    (alone.split,) = client_splits(scheme, alone.dataset, 1, 0)
    alone.model = run_of(alone).auxiliary()
    for number in (1, 2):
        alone.__dict__.pop("_generator", None)
        alone.download = Download(round=number, session="test")
        SupervisedTrainer().fit(alone)
    assert same(weights_of(alone.model), model_of(tmp_path / "run"))


def test_fedprox_without_its_term_is_fedavg(tmp_path: Path) -> None:
    for name, more in (("fedavg", ""), ("fedprox", "algorithm.client.proximal=0"), ("held", "")):
        algorithm = "fedprox" if name == "held" else name
        run(tmp_path / name, algorithm, f"labels=all partition.test_fraction=0.25 {more}")
    models = [model_of(tmp_path / name) for name in ("fedavg", "fedprox", "held")]
    assert same(models[0], models[1])
    assert not same(models[0], models[2])
    assert rows_of(tmp_path / "held")[1]["metrics"]["train_proximal_loss"] > 0


def test_lower_samples_the_labelled_clients_alone_and_upper_reveals_labels(tmp_path: Path) -> None:
    overrides = "labels.count=3 federation.participation=0.4 federation.rounds=4"
    run(tmp_path / "lower", "fedavg_sl_lower", overrides, num_nodes=6)
    sampled = [row["sampled"] for row in rows_of(tmp_path / "lower")]
    assert all(len(each) == 2 and set(each) <= {0, 1, 2} for each in sampled)
    assert len({tuple(each) for each in sampled}) > 1
    run(tmp_path / "few", "fedavg_sl_lower", "labels.count=2 federation.rounds=1", num_nodes=6)
    assert rows_of(tmp_path / "few")[0]["sampled"] == [0, 1]  # fewer have labels than a round takes
    for name in ("few", "all"):
        run(tmp_path / f"upper-{name}", "fedavg_sl_upper", f"labels={name}")
    assert same(model_of(tmp_path / "upper-few"), model_of(tmp_path / "upper-all"))


@pytest.mark.parametrize("algorithm", ["fedavg_fixmatch", "dccfssl", "rscfed", "fedavg_sl_upper"])
def test_clients_without_labels_wait_while_the_others_warm_up(tmp_path: Path, algorithm: str) -> None:
    run(tmp_path / "run", algorithm, "labels.count=2 labels.warmup_rounds=2 federation.rounds=3", num_nodes=4)
    everybody = [0, 1, 2, 3]
    waiting = everybody if algorithm == "fedavg_sl_upper" else [0, 1]  # where labels are revealed, nobody waits
    rows = rows_of(tmp_path / "run")
    assert [row["sampled"] for row in rows[:2]] == [waiting] * 2
    assert set(rows[2]["sampled"]) - {0, 1}


def test_the_warm_up_is_the_run_of_the_labelled_clients_alone(tmp_path: Path) -> None:
    run(tmp_path / "lower", "fedavg_sl_lower", "labels.count=2 federation.rounds=2")
    run(tmp_path / "warm", "fedavg_fixmatch", "labels.count=2 labels.warmup_rounds=2 federation.rounds=3")
    lower, warm = rows_of(tmp_path / "lower"), rows_of(tmp_path / "warm")
    assert [row["loss"] for row in warm[:2]] == [row["loss"] for row in lower]


def test_weights_are_numbers_of_samples_or_a_share_of_the_labelled(tmp_path: Path) -> None:
    for algorithm, labelled in (("fedavg_fixmatch", 0.25), ("fedconsist", 0.5)):
        overrides = "partition=dirichlet_train partition.min_size=4 federation.rounds=1"
        grid = run(tmp_path / algorithm, algorithm, overrides)
        replies = [reply for _, _, reply in sorted(messages(grid, "train"), key=lambda each: each[1])]
        sizes = np.array([reply.content["header"]["num-examples"] for reply in replies], dtype=float)
        assert len(set(sizes)) > 1
        weights = sizes / sizes.sum()
        if algorithm == "fedconsist":
            weights = np.concatenate([[labelled], (1 - labelled) * sizes[1:] / sizes[1:].sum()])
        assert rows_of(tmp_path / algorithm)[0]["metrics"]["labelled_weight"] == pytest.approx(weights[0])
        for name, tensor in model_of(tmp_path / algorithm).items():
            sent = [tensors(reply)[name] for reply in replies]
            if tensor.is_floating_point():
                expected = sum(weight * each.double() for weight, each in zip(weights, sent, strict=True))
                assert torch.allclose(tensor.double(), expected, atol=1e-6), name
            else:
                assert torch.equal(tensor, sent[int(weights.argmax())])


def test_foreign_models_and_missing_sizes_are_refused_by_name() -> None:
    strategy = FedAvg()
    strategy.run = run_of(session(f"algorithm=fedavg {TINY}"))
    state = strategy.init_state(CLASSES, 16, torch.Generator())
    model = strategy.downlink(state).weights or {}
    for word, weights, examples in (("head.bias", {"head.bias": torch.zeros(3)}, 5), ("num-examples", model, None)):
        with pytest.raises(ValueError, match=f"client 3 sent .*{word}"):
            strategy.inspect(state, Upload(3, 1, weights={**model, **weights}, examples=examples))


@pytest.mark.parametrize("algorithm", ["fedprox_fixmatch", "dccfssl", "rscfed"])
def test_same_seed_same_state_in_any_order_of_replies_and_after_a_resume(algorithm: str, tmp_path: Path) -> None:
    base = "labels.share=0.4 federation.participation=0.7 federation.checkpoint_every=1 algorithm.client.threshold=0.26"
    run(tmp_path / "whole", algorithm, f"{base} federation.rounds=4", num_nodes=6)
    run(tmp_path / "cut", algorithm, f"{base} federation.rounds=2", num_nodes=6, shuffle=5)
    resumed = f"{base} federation.rounds=4 resume={tmp_path / 'cut'}"
    run(tmp_path / "cut", algorithm, resumed, num_nodes=6, shuffle=6)
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "cut")
    assert same(state_of(tmp_path / "whole"), state_of(tmp_path / "cut"))
    assert not any(row["failures"] for row in rows_of(tmp_path / "whole"))
    assert any(row["metrics"].get("train_confident") for row in rows_of(tmp_path / "whole"))
