"""Cases C08 to C18: algorithms."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Message

from server_app.strategies.fedtgp import FedTGP
from task.averaging import part
from task.config import build, load
from task.data.partition import client_splits
from task.data.prepare import prepare
from task.losses import class_mean_distance, sample_squared_error
from task.methods.fedtgp import adaptive_margin, centroids
from task.metrics import evaluate
from task.models.assign import build_auxiliary
from tests import contents
from tests.algorithms import ALGORITHMS, fitting
from tests.cases.small import (
    EVERY,
    KINDS,
    TWO,
    WITH_BATCHNORM,
    States,
    dirichlet,
    federate,
    has_global_model,
    rows,
    run,
    settings,
    summary,
    words,
)
from tests.fake_grid import FakeGrid
from tests.stripes import write

WITH_PROTOTYPE_TERM = [name for name in ALGORITHMS if name.startswith(("fedtgp", "fedproto"))]
# What each method adds to cross-entropy, under the name of its metric, from the round in which it can act.
TERMS = dict.fromkeys(WITH_PROTOTYPE_TERM, ("prototype_loss", 2))
TERMS |= {
    "fedtgp_symmetric": ("contrast_loss", 1),
    "feddistill": ("distillation_loss", 2),
    "fedgen": ("generated_loss", 2),
}
TERMS |= {"fml": ("shared_loss", 1), "fml_official": ("shared_loss", 1)}
TERMS |= {"fedkd": ("student_loss", 1), "fedkd_official": ("student_loss", 1)}
TERMS |= {"fedprox": ("proximal_loss", 1), "fedprox_fixmatch": ("proximal_loss", 1)}
TERMS |= dict.fromkeys(("fedavg_fixmatch", "fedconsist", "rscfed"), ("unlabelled_loss", 1))
TERMS |= {"dccfssl": ("lcc_loss", 1), "dccfssl_no_gcc": ("lcc_loss", 1), "dccfssl_no_ara": ("lcc_loss", 1)}
TERMS |= {"dccfssl_expanded": ("lcc_loss", 1)}
TERMS |= {"dccfssl_no_lcc": ("gcc_loss", 2), "dccfssl_no_dcc": ("unlabelled_loss", 1)}
FSSL = [name for name in ALGORITHMS if settings(name).get("unlabelled", "refused") != "refused"]
"""Methods for clients without labels."""


def trains(grid: FakeGrid, *, sent: bool = False) -> list[tuple[int, int, Message]]:
    """Return round, partition and message of all training replies, or of all training messages sent."""
    found = []
    for message in grid.sent if sent else grid.replies:
        node = message.metadata.dst_node_id if sent else message.metadata.src_node_id
        if message.metadata.message_type == "train":
            partition = int(grid.contexts[node].node_config["partition-id"])
            found.append((int(message.metadata.group_id or 0), partition, message))
    return found


def test_c08_every_method_but_plain_averages_is_among_those_whose_terms_are_watched() -> None:
    plain = {"local", "lg_fedavg", "fedavg", "fedavg_sl_lower", "fedavg_sl_upper"}
    assert set(TERMS) | plain == set(ALGORITHMS)


@pytest.mark.parametrize("algorithm", sorted(TERMS))
def test_c08_prototype_loss_is_always_zero(algorithm: str, tmp_path: Path) -> None:
    name, first = TERMS[algorithm]
    trust = " algorithm.client.threshold=0.0" if "threshold" in settings(algorithm).client else ""
    # Against a single prototype there is no contrast: enough training that samples of several classes are authentic.
    more = "labels=all train.local_epochs=5" if name == "gcc_loss" else ""
    run(algorithm, tmp_path / "run", f"{trust} train.lr=0.05 federation.rounds=3 {more}")
    for row in rows(tmp_path / "run"):
        if row["round"] >= max(first, 3 if name == "gcc_loss" else 1):
            assert row["metrics"][f"train_{name}"] > 0, row["metrics"]


# The weight of each such term, a value that switches it off, and one that does not.
WEIGHTS = dict.fromkeys([*WITH_PROTOTYPE_TERM, "feddistill"], ("weight", 0.0, 5.0))
WEIGHTS |= {"fedgen": ("alpha", 0.0, 5.0), "fml": ("alpha", 1.0, 0.5), "fml_official": ("alpha", 1.0, 0.5)}
WEIGHTS |= {"fedprox": ("proximal", 0.0, 1.0), "rscfed": ("consistency", 0.0, 5.0)}
WEIGHTS |= {"dccfssl_no_gcc": ("lambda_lcc", 0.0, 1.0), "dccfssl_no_lcc": ("lambda_gcc", 0.0, 1.0)}


@pytest.mark.parametrize("algorithm", sorted(WEIGHTS))
def test_c08_the_term_changes_what_is_learnt(algorithm: str, tmp_path: Path) -> None:
    key, off, on = WEIGHTS[algorithm]
    learnt = []
    for weight in (off, on):
        trust = " algorithm.client.threshold=0.0" if "threshold" in settings(algorithm).client else ""
        grid = run(algorithm, tmp_path / str(weight), f"algorithm.client.{key}={weight}{trust}")
        learnt.append([_arrays(message) for number, _, message in trains(grid) if number == 2])
    assert any(not np.array_equal(one, two) for one, two in zip(*learnt, strict=True))


def _arrays(message: Message) -> Any:
    """Return all floats of a message in one row."""
    every = [array.numpy() for array in message.content.get("weights", {}).values()]
    every += [contents.vectors(message)] if contents.has_prototypes(message) else []
    return np.concatenate([array.ravel() for array in every if array.dtype == np.float32])


def test_c09_zero_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"federation\.rounds=0 is not allowed: at least 1"):
        load("federation.rounds=0")


@pytest.mark.parametrize("algorithm", WITH_PROTOTYPE_TERM)
def test_c09_evaluation_before_any_global_prototype_exists(algorithm: str, tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if number == 1:
            contents.remove_prototypes(reply)  # as of a client without data
        return reply

    more = "federation.participation=0.1 federation.rounds=2"
    run(algorithm, tmp_path / "run", more, num_nodes=10, spoil=spoil)
    first, second = rows(tmp_path / "run")
    untrained = settings(algorithm).server.get("send_untrained", False)  # FedTGP of the paper has prototypes at once
    assert (first["accuracy"] is not None) == untrained
    assert 0 <= first["accuracy_head"] <= 1
    assert 0 <= second["accuracy"] <= 1  # of clients, too, that were never sampled: by their first weights
    if not untrained:
        assert summary(tmp_path / "run")["best_round"] == 2


def test_c10_lambda_means_two_different_things(tmp_path: Path) -> None:
    one, official = (load(f"algorithm={name}").algorithm.client for name in ("fedtgp_paper", "fedtgp_official"))
    assert (one["distance"], one["weight"]) == ("class_mean_l2", 0.1)
    assert (official["distance"], official["weight"]) == ("sample_mse", 10.0)
    feats_BK, protos_CK, labels_B = torch.rand(6, 8), torch.rand(3, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    known_C, wide = torch.ones(3, dtype=torch.bool), torch.nn.functional.pad
    narrow = [loss(feats_BK, labels_B, protos_CK, known_C) for loss in (class_mean_distance, sample_squared_error)]
    padded = [
        loss(wide(feats_BK, (0, 8)), labels_B, wide(protos_CK, (0, 8)), known_C)
        for loss in (class_mean_distance, sample_squared_error)
    ]
    assert padded[0] == pytest.approx(float(narrow[0]))  # the default form does not know K
    assert padded[1] == pytest.approx(float(narrow[1]) / 2)  # the public code's divides by it, as documented
    for name in ("fedtgp_paper", "fedtgp_official"):
        run(name, tmp_path / name)
    losses = [
        rows(tmp_path / name)[1]["metrics"]["train_prototype_loss"] for name in ("fedtgp_paper", "fedtgp_official")
    ]
    assert losses[0] != losses[1]


def test_c11_adaptive_margin_of_text_and_of_code() -> None:
    centres = torch.tensor([[0.0], [1.0], [10.0]])
    assert adaptive_margin(centres, "max_pair", 100.0) == 10.0
    assert adaptive_margin(centres, "max_of_min", 100.0) == 9.0
    assert adaptive_margin(centres, "max_pair", 4.0) == adaptive_margin(centres, "max_of_min", 4.0) == 4.0


@pytest.mark.parametrize("margin", ["max_pair", "max_of_min", "fixed", "none"])
def test_c11_a_round_with_exactly_one_class(margin: Any, tmp_path: Path) -> None:
    write(tmp_path / "stripes.npz", y_train=np.ones(64, np.int64), samples=64, tests=32, y_test=np.ones(32, np.int64))
    run("fedtgp", tmp_path / "run", f"algorithm.server.margin={margin} algorithm.server.margin_cap=7.0")
    for row in rows(tmp_path / "run"):
        assert row["metrics"]["margin"] == (7.0 if margin == "fixed" else 0.0)
        assert math.isfinite(row["metrics"]["server_loss"])
    assert FedTGP(margin=margin, margin_cap=7.0)._margin(*centroids(torch.ones(3, 2), torch.ones(3).long())) in (0, 7)


@pytest.mark.parametrize("algorithm", EVERY)
def test_c12_rule_model_and_average_stand_with_the_numbers(algorithm: str, tmp_path: Path) -> None:
    run(algorithm, tmp_path / "run", "federation.rounds=1")
    found, row = summary(tmp_path / "run"), rows(tmp_path / "run")[0]
    assert found["accuracy_rule"] == row["rule"] == settings(algorithm).inference
    assert found["accuracy_model"] == ("global" if has_global_model(algorithm) else "each client's own")
    assert found["accuracy_averaging"] == "test samples"
    assert row["accuracy_head"] is not None
    if found["accuracy_rule"] == "prototype":
        assert row["accuracy"] == row["accuracy_prototype"] is not None
        run(algorithm, tmp_path / "head", "federation.rounds=1 algorithm.inference=head")
        assert rows(tmp_path / "head")[0]["accuracy"] == row["accuracy_head"]
        assert summary(tmp_path / "head")["accuracy_rule"] == "head"
    if algorithm not in KINDS:
        return
    run(algorithm, tmp_path / "plain", "federation.rounds=1 federation.report_sizes=false")
    averaged_by_server = dirichlet(algorithm) != "dirichlet"
    wanted = "test samples" if averaged_by_server else "clients"
    assert summary(tmp_path / "plain")["accuracy_averaging"] == wanted


SHARING_BATCHNORM = [name for name in ALGORITHMS if has_global_model(name)] + ["fml", "fml_official", "fedkd"]


@pytest.mark.parametrize("algorithm", [*SHARING_BATCHNORM, "fedkd_official"])
def test_c13_batchnorm_statistics_and_counters(algorithm: str, tmp_path: Path, states: States) -> None:
    # Two clients with one class each: class 0 is dark, class 1 is light.
    rng = np.random.default_rng(0)
    labels = np.arange(64) % 2
    images = (40 + 150 * labels[:, None, None, None] + rng.integers(0, 30, (64, 16, 16, 1))).astype(np.uint8)
    arrays = {"x_train": images, "y_train": labels, "x_test": images[:16], "y_test": labels[:16]}
    write(tmp_path / "stripes.npz", class_names=np.array(["dark", "light"]), **arrays)
    scheme = "dirichlet_train" if dirichlet(algorithm) != "dirichlet" else "dirichlet"
    more = f"partition={scheme} partition.alpha=0.01 partition.min_size=4 train.lr=0.05"
    run(algorithm, tmp_path / "run", f"{more} federation.rounds=3", num_nodes=2, model=WITH_BATCHNORM)
    before, after = states[0]
    model = {name.removeprefix("model/"): tensor for name, tensor in after.items() if not name.startswith("change/")}
    if algorithm.startswith("fedkd"):  # it is sent in factors
        model = {name: tensor for name, tensor in model.items() if name.endswith(("mean", "var", "tracked"))}
    counters = [tensor for name, tensor in model.items() if name.endswith("num_batches_tracked")]
    assert counters
    assert all(tensor.dtype == torch.int64 and int(tensor) > 0 for tensor in counters)
    moved = [  # the statistics, not the weights alone
        name
        for name, tensor in before.items()
        if name.endswith("running_mean") and not torch.equal(tensor, after[name])
    ]
    assert moved
    variances = [tensor for name, tensor in model.items() if name.endswith("running_var")]
    assert all(bool((tensor >= 0).all()) and bool(torch.isfinite(tensor).all()) for tensor in variances)
    config = load(f"{words(algorithm, tmp_path)} {more}")
    if has_global_model(algorithm):
        dataset = prepare(build(config.data.source, "data.source"), tmp_path / "cache")
        net = build_auxiliary(config.model, num_classes=2, image_shape=dataset.image_shape, seed=0)
        net.load_state_dict(part("model/", states[-1][1]), strict=True)
        # Without labels on one of two clients a class may stay unlearnt; with them the eval-mode model is no chance.
        images_B = torch.from_numpy(np.array(dataset.images)).float().div(127.5).sub(1)
        found = evaluate(net, [(images_B, torch.from_numpy(dataset.labels))])
        assert found is not None
        assert math.isfinite(found.loss)
        assert found.by_head >= 0.5


def test_c13_running_statistics_are_the_weighted_mean_not_the_first_clients(tmp_path: Path, states: States) -> None:
    grid = run("fedavg", tmp_path / "run", "federation.rounds=1", num_nodes=3)
    replies = [message.content for _, _, message in trains(grid)]
    sizes = [int(reply["header"]["num-examples"]) for reply in replies]  # type: ignore[index, arg-type]
    for name, tensor in part("model/", states[0][1]).items():
        sent = [reply["weights"][name].numpy() for reply in replies]  # type: ignore[index, union-attr]
        if name.endswith("num_batches_tracked"):
            assert int(tensor) == int(sent[int(np.argmax(sizes))])
        else:
            mean = sum(size * each for size, each in zip(sizes, sent, strict=True)) / sum(sizes)
            assert np.allclose(tensor.numpy(), mean, atol=1e-5)


def test_c14_feature_sizes_differ_between_clients(tmp_path: Path) -> None:
    widths = (512, 768, 100)
    entries = ", ".join(
        f"{{name: n{width}, _target_: task.models.small.plain, width: 1, features: {width}}}" for width in widths
    )
    base = words("fedtgp", tmp_path).replace(TWO, f"'model.entries=[{entries}]' model.feature_dim=512")
    federate(base, tmp_path / "run", 3)
    assert not any(row["failures"] for row in rows(tmp_path / "run"))
    clients = (tmp_path / "run" / "clients.csv").read_text("utf-8").splitlines()[1:]
    assert [line.split(",")[2] for line in clients] == ["n512", "n768", "n100"]


@pytest.mark.parametrize("algorithm", [*WITH_PROTOTYPE_TERM, "feddistill", "dccfssl"])
def test_c14_a_prototype_of_another_width_is_rejected_with_the_client(algorithm: str, tmp_path: Path) -> None:
    def spoil(reply: Message, partition: int, number: int) -> Message:
        if partition == 1 and reply.metadata.message_type == "train":
            contents.remove_prototypes(reply)
            sent: dict[str, Any] = {"class-ids": [0], "vectors": bytes(4 * 500)}
            sent |= {"counts": [1]} if algorithm in ("fedproto", "dccfssl") else {}
            reply.content["header"] = ConfigRecord(dict(reply.content["header"]) | sent)  # type: ignore[arg-type]
        return reply

    run(algorithm, tmp_path / "run", "labels=all" if has_global_model(algorithm) else "", spoil=spoil)
    for row in rows(tmp_path / "run"):
        [failure] = row["failures"]
        assert failure["partition"] == 1
        assert "client 1 sent 2000 bytes of vectors: float32" in failure["reason"]


def _spoilt(reply: Message, value: float) -> bool:
    """Put ``value`` into the first float array of a training reply; tell whether there was one."""
    if contents.has_prototypes(reply):
        vectors = contents.vectors(reply)
        if vectors.size:
            vectors[0, 0] = value
            contents.put_vectors(reply, vectors)
            return True
    for name, array in dict(reply.content.get("weights", {})).items():  # type: ignore[arg-type]
        found = array.numpy().copy()
        if found.dtype == np.float32 and found.size:
            found.reshape(-1)[0] = value
            reply.content["weights"][name] = Array(found)  # type: ignore[index, assignment]
            return True
    return False


@pytest.mark.parametrize(
    ("algorithm", "value"),
    [(name, math.nan) for name in ALGORITHMS if name != "local"]
    + [(name, -math.inf) for name in KINDS if name != "local"],
)
def test_c15_one_client_sends_nan_or_inf(algorithm: str, value: float, tmp_path: Path, states: States) -> None:
    spoilt = []

    def spoil(reply: Message, partition: int, number: int) -> Message:
        if number == 2 and reply.metadata.message_type == "train" and not spoilt and _spoilt(reply, value):
            spoilt.append(partition)
        return reply

    more = "labels.count=2" if has_global_model(algorithm) and "labels=few" in fitting(algorithm) else ""
    run(algorithm, tmp_path / "run", f"{more} federation.rounds=3", spoil=spoil)
    found = rows(tmp_path / "run")
    assert len(found) == 3
    assert len(spoilt) == 1
    assert [(each["partition"], each["phase"]) for row in found for each in row["failures"]] == [(spoilt[0], "train")]
    assert "not finite" in found[1]["failures"][0]["reason"]
    assert summary(tmp_path / "run")["status"] == "completed with losses"
    for _, after in states:
        assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())


COUNTING = ["fedproto", "lg_fedavg", "fedgen", "fedavg", "fedconsist", "rscfed", "dccfssl"]


@pytest.mark.parametrize("count", [math.nan, -5, 0])
@pytest.mark.parametrize("algorithm", COUNTING)
def test_c15_a_sample_count_that_is_none_is_dropped(
    algorithm: str, count: float, tmp_path: Path, states: States
) -> None:
    spoilt = []

    def spoil(reply: Message, partition: int, number: int) -> Message:
        if number != 1 or reply.metadata.message_type != "train" or spoilt:
            return reply
        if algorithm == "fedproto":
            header: Any = reply.content["header"]
            reply.content["header"] = ConfigRecord({**header, "counts": [count] * len(header["counts"])})
        else:
            header = reply.content["header"]
            reply.content["header"] = ConfigRecord({**header, "num-examples": count})
        spoilt.append(partition)
        return reply

    run(algorithm, tmp_path / "run", spoil=spoil)
    assert [each["partition"] for row in rows(tmp_path / "run") for each in row["failures"]] == spoilt
    assert all(bool(torch.isfinite(tensor).all()) for tensor in states[-1][1].values())


def test_c16_fedgen_with_every_backbone_of_the_group_half_of_the_classes_and_a_hundred(tmp_path: Path) -> None:
    more = (  # noise in the shape of CIFAR-100, as debug=smoke has it
        "algorithm=fedgen algorithm.server.steps=3 data=cifar100 data.stand_in=true model=htcnn4 "
        "partition=pathological partition.classes_per_client=50 partition.max_samples=400 federation.rounds=2 "
        f"data.cache_dir={tmp_path}/cache"
    )
    federate(more, tmp_path / "run", 4)
    assert not any(row["failures"] for row in rows(tmp_path / "run"))
    assert len(summary(tmp_path / "run")["class_names"]) == 100
    assert math.isfinite(rows(tmp_path / "run")[-1]["metrics"]["generator_loss"])


@pytest.mark.parametrize("algorithm", ["fedgen", "lg_fedavg"])
def test_c16_unequal_heads_are_refused_up_front(algorithm: str) -> None:
    with pytest.raises(ValueError, match=r"model\.heads=.* averages the heads, so all must have the same widths"):
        load(f"algorithm={algorithm} model=res34_htc4")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_c16_fedgen_with_the_papers_eight_architectures(tmp_path: Path) -> None:
    more = (
        "algorithm=fedgen algorithm.server.steps=3 data=cifar10 data.stand_in=true model=htfe8 partition=pathological "
        f"partition.classes_per_client=5 partition.max_samples=64 data.cache_dir={tmp_path}/cache federation.rounds=1"
    )
    federate(more, tmp_path / "run", 8)
    assert not rows(tmp_path / "run")[0]["failures"]


@pytest.mark.parametrize("algorithm", [name for name in FSSL if settings(name).unlabelled == "trained"])
def test_c17_batches_and_pools_of_clients_without_labels(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from client_app.session import Session

    shapes: dict[bool, set[int]] = {True: set(), False: set()}
    original = Session.train_batches

    def watched(self: Session, *args: Any, **kwargs: Any) -> Any:
        for images, labels in original(self, *args, **kwargs):
            assert bool((labels >= 0).all()) if self.is_labelled else bool((labels == -1).all())
            shapes[self.is_labelled].add(len(images))
            yield images, labels

    monkeypatch.setattr(Session, "train_batches", watched)
    # 16 images a client in batches of 7; then clients of 2 images, less than one batch.
    for samples, sizes in ((64, {7, 2}), (8, {2})):
        for found in shapes.values():
            found.clear()
        folder = tmp_path / str(samples)
        folder.mkdir()
        write(folder / "stripes.npz", samples=samples, tests=8)
        more = "labels.count=2 train.batch_size=7 federation.rounds=3"
        run(algorithm, folder / "run", more)
        assert shapes[True] == shapes[False] == sizes
        assert all(row["clients_without_train"] == 0 for row in rows(folder / "run"))
    config = load(f"{words(algorithm, folder)} labels.count=2")
    dataset = prepare(build(config.data.source, "data.source"), folder / "cache")
    splits = client_splits(build(config.partition, "partition"), dataset, 4, 0)
    pools = [set(split.train.tolist()) for split in splits]  # a client's images all have labels, or none has
    assert not (pools[0] | pools[1]) & (pools[2] | pools[3])


@pytest.mark.parametrize("algorithm", FSSL)
@pytest.mark.parametrize(("labelled", "others"), [(50, 0), (1, 49)])
def test_c18_all_or_one_of_fifty_labelled_and_two_a_round(
    algorithm: str, labelled: int, others: int, tmp_path: Path, states: States
) -> None:
    write(tmp_path / "stripes.npz", samples=100, tests=16)
    more = f"labels.count={labelled} federation.participation=0.04 federation.rounds=4"
    run(algorithm, tmp_path / "run", more, num_nodes=50)
    found = rows(tmp_path / "run")
    assert not any(row["failures"] for row in found)
    assert summary(tmp_path / "run")["labelled_clients"] == (
        50 if settings(algorithm).unlabelled == "revealed" else labelled
    )
    if settings(algorithm).unlabelled == "left_out" and others:
        assert all(row["sampled"] == [0] for row in found)
    elif others and settings(algorithm).unlabelled == "trained":
        assert any(0 not in row["sampled"] for row in found)
    else:  # as supervised
        assert all("train_loss" in row["metrics"] and "train_unlabelled_loss" not in row["metrics"] for row in found)
    for _, after in states:
        assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())


@pytest.mark.parametrize("algorithm", FSSL)
def test_c18_nobody_labelled_is_refused_with_a_reason(algorithm: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"labels\.count=0 is not allowed: .*nothing can be learnt"):
        load(f"{fitting(algorithm)} labels.count=0")
    roles = dict.fromkeys(range(3), "unlabelled")
    with pytest.raises((ValueError, RuntimeError), match=r"at least one is needed|there is nothing to reveal"):
        run(algorithm, tmp_path / "run", num_nodes=3, roles=roles)


def test_c18_the_weight_factor_is_defined_at_both_borders() -> None:
    from task.methods.dccfssl_aggregation import expansion_factor

    assert expansion_factor(50, 0) == 1.0
    assert expansion_factor(1, 49) == 49.0
    with pytest.raises(ValueError, match="at least 1 labelled client is needed"):
        expansion_factor(0, 50)
