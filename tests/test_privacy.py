"""Noise on uploaded prototypes: what is sent, what it costs, and who may not claim it."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from scipy.stats import kstest, norm

import client_app.privacy
from client_app.privacy import clipped, gaussian, protected, random_bytes
from server_app.privacy import PrivacyLedger
from task.config import load
from task.jobs import plan
from task.messages import PrototypeSet, Upload
from task.privacy import PrivacyConfig, epsilon, require_accountant
from task.results import read_run
from task.tables import client_table, summary_lines
from tests import contents
from tests.algorithms import ALGORITHMS, fitting
from tests.fake_grid import FakeGrid, run_federation
from tests.stripes import messages, rows_of, run, stripes, summary_of, write

SETTINGS = PrivacyConfig("gaussian", clip=2.0, noise_multiplier=0.5, delta=1e-5)
C, K = 4, 3
COVERED = {"fedproto_official", *(name for name in ALGORITHMS if name.startswith("fedtgp"))}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def changed(**changes: Any) -> PrivacyConfig:
    return PrivacyConfig(**(vars(SETTINGS) | changes))


def upload(counts: bool = False, **changes: Any) -> Upload:
    vectors = torch.tensor([[3.0, 4.0, 0.0], [0.3, 0.4, 0.0]])
    sent = PrototypeSet(torch.tensor([1, 3]), vectors, torch.tensor([5, 6]) if counts else None)
    return Upload(**({"partition": 2, "round": 7, "prototypes": sent, "metrics": {"loss": 0.1}} | changes))


def delta_of(spent: float, noise_multiplier: float, uploads: int) -> float:
    """Balle and Wang, theorem 8: delta of a Gaussian mechanism, written down without the accountant."""
    mu = math.sqrt(uploads) / noise_multiplier
    return float(norm.cdf(mu / 2 - spent / mu) - math.exp(spent) * norm.cdf(-mu / 2 - spent / mu))


@pytest.mark.parametrize(
    ("noise", "uploads", "delta"), [(1.0, 1, 1e-5), (4.0, 20, 1e-5), (10.0, 100, 1e-6), (2, 3, 0.01)]
)
def test_epsilon_is_the_exact_one_of_that_many_uploads(noise: float, uploads: int, delta: float) -> None:
    assert delta_of(epsilon(noise, uploads, delta), noise, uploads) == pytest.approx(delta, rel=1e-6)


def test_epsilon_is_the_accountant_s_number() -> None:
    import dp_accounting

    assert epsilon(1.0, 1, 1e-5) == pytest.approx(4.3771781, abs=1e-6)
    assert epsilon(3.0, 0, 1e-5) == 0
    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp_accounting.GaussianDpEvent(8.0), count=20)  # composed by the accountant itself
    assert epsilon(8.0, 20, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
    renyi = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    renyi.compose(dp_accounting.GaussianDpEvent(8.0), count=20)
    assert epsilon(8.0, 20, 1e-5) <= renyi.get_epsilon(1e-5)  # an upper bound


def test_vectors_are_clipped_and_never_stretched() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [float("nan"), 1.0], [float("inf"), 0.0]])
    expected = [[1.2, 1.6], [0.3, 0.4], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    assert torch.allclose(clipped(vectors, 2.0), torch.tensor(expected, dtype=torch.float64), atol=1e-7)


def test_the_numbers_are_normal_and_new_every_time() -> None:
    one, two = (gaussian((200, 100), client_app.privacy.os.urandom).numpy().ravel() for _ in range(2))
    assert kstest(one, "norm").pvalue > 1e-4
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.05
    assert np.isfinite(gaussian((4,), lambda count: b"\xff" * count)).all()
    assert gaussian((1,), lambda count: b"\x00" * count).item() == -gaussian((1,), lambda count: b"\xff" * count).item()


@pytest.mark.parametrize("hide", [True, False])
def test_noise_has_the_standard_deviation_that_the_sensitivity_asks_for(hide: bool) -> None:
    """2 S sqrt(C) z, or of the J classes that are sent; measured over 3000 uploads."""
    privacy = changed(hide_classes=hide)
    sent = [protected(upload(), privacy, C, K, client_app.privacy.os.urandom).prototypes for _ in range(3000)]
    vectors = torch.stack([each.vectors for each in sent if each is not None])
    assert vectors.dtype == torch.float32
    classes = 4 if hide else 2
    std = 0.5 * 2 * 2.0 * math.sqrt(classes)
    assert privacy.noise_std(classes) == pytest.approx(std)
    assert vectors.shape == (3000, classes, K)
    assert vectors.std(dim=0).numpy() == pytest.approx(std, rel=0.06)
    means = vectors.mean(dim=0)
    expected = torch.tensor([[1.2, 1.6, 0.0], [0.3, 0.4, 0.0]])
    assert means[[1, 3] if hide else [0, 1]].numpy() == pytest.approx(expected.numpy(), abs=6 * std / 3000**0.5)
    if hide:
        assert means[[0, 2]].numpy() == pytest.approx(0, abs=6 * std / 3000**0.5)


def test_any_two_data_sets_are_within_the_sensitivity() -> None:
    """The farthest that two uploads can be from each other: every class at norm S, in opposite directions."""
    one = torch.full((C, K), 1e3)
    distance = torch.linalg.vector_norm(clipped(one, 2.0) - clipped(-one, 2.0))
    assert float(distance) == pytest.approx(SETTINGS.noise_std(C) / SETTINGS.noise_multiplier)


def test_nothing_but_noised_prototypes_leaves_a_client() -> None:
    source = random_bytes(changed(noise_seed=1), 2, 7)
    sent = protected(upload(), SETTINGS, C, K, source)
    assert (sent.partition, sent.round, sent.metrics, sent.weights, sent.examples) == (2, 7, {}, None, None)
    assert sent.prototypes is not None
    assert sent.prototypes.counts is None
    assert sent.prototypes.class_ids.tolist() == [0, 1, 2, 3]
    empty = protected(
        Upload(2, 7), SETTINGS, C, K, source
    ).prototypes  # a client without data is not to be told from one
    assert empty is not None
    assert empty.vectors.shape == (C, K)
    assert protected(Upload(2, 7), changed(hide_classes=False), C, K, source).prototypes is None
    for more in ({"weights": {"w": torch.zeros(1)}}, {"examples": 4}, {"counts": True}):
        with pytest.raises(ValueError, match="client 2: privacy=gaussian covers prototypes alone, nothing is sent"):
            protected(upload(**more), SETTINGS, C, K, source)


def test_noise_is_secret_unless_a_seed_says_otherwise() -> None:
    assert random_bytes(SETTINGS, 0, 1) is client_app.privacy.os.urandom
    seeded = changed(noise_seed=3)
    assert random_bytes(seeded, 0, 1)(8) == random_bytes(seeded, 0, 1)(8)
    assert len({random_bytes(seeded, *place)(8) for place in ((0, 1), (0, 2), (1, 1))}) == 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_methods_that_upload_more_than_prototypes_are_refused(algorithm: str) -> None:
    words = f"{fitting(algorithm)} privacy=gaussian"
    if algorithm in COVERED:
        assert load(words).privacy is not None
        return
    with pytest.raises(ValueError, match=r"(privacy='gaussian'|share_counts=True) is not allowed: .*$") as caught:
        load(words)
    assert "\n" not in str(caught.value)


def test_without_the_group_nothing_is_noised() -> None:
    assert load("").privacy is load("privacy=none").privacy is None


def test_fedproto_without_counts_is_covered() -> None:
    words = (
        "algorithm=fedproto algorithm.server.aggregation=uniform algorithm.client.share_counts=false privacy=gaussian"
    )
    assert not load(words).federation.report_sizes


@pytest.mark.parametrize(
    "words", ["clip=0", "clip=.inf", "noise_multiplier=0", "noise_multiplier=-1", "delta=0", "delta=1", "noise_seed=-1"]
)
def test_settings_out_of_range_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match=f"privacy.{words.split('=')[0]}"):
        load(f"privacy=gaussian privacy.{words}")


def test_a_missing_accountant_ends_the_command_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    require_accountant(None)
    with pytest.raises(ValueError, match=re.escape("pip install 'protofed[privacy]'")) as caught:
        plan(["privacy=gaussian"], tmp_path, 4)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="dp-accounting is not installed"):
        run_federation("privacy=gaussian", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def ledger(path: Path, **more: Any) -> PrivacyLedger:
    return PrivacyLedger(path, SETTINGS, [0, 1, 2], **({"report_sizes": False, "resumed": False} | more))


def test_the_ledger_counts_what_was_asked_for_and_outlives_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "privacy.json"
    ledger(path).charge([0, 2])
    after = ledger(path, resumed=True)
    after.charge([2])
    assert after.uploads == {0: 1, 1: 0, 2: 2}
    spent = after.fields()["epsilon"]
    assert spent["1"] == 0
    assert spent["2"] == pytest.approx(epsilon(0.5, 2, 1e-5), abs=2e-6)
    assert spent["2"] >= epsilon(0.5, 2, 1e-5)  # rounded up
    assert after.summary()["epsilon"] == spent["2"]
    for damage in ('{"0": 1}', "[]", '{"0": -1, "1": 0, "2": 0}', "{", '{"0": "x"}'):
        path.write_text(damage, encoding="utf-8")
        with pytest.raises(ValueError, match=r"privacy\.json"):
            ledger(path, resumed=True)


PRIVATE = "labels=all privacy=gaussian partition.max_samples=64"


def replies(grid: FakeGrid, kind: str) -> list[Message]:
    return [message for _, _, message in messages(grid, kind)]


def test_a_private_federation_sends_no_more_than_it_says(tmp_path: Path) -> None:
    grid = run(tmp_path / "run", "fedtgp", f"{PRIVATE} federation.rounds=3 federation.participation=0.5")
    for reply in replies(grid, "train"):
        assert set(reply.content) == {"header"}
        assert set(reply.content["header"]) == {"round", "partition", "class-ids", "vectors"}
        sent = contents.prototypes(reply)
        assert set(sent) == {"class-ids", "vectors"}
        assert sent["class-ids"].tolist() == [0, 1, 2, 3]
        assert not contents.metrics(reply)
    assert not replies(grid, "evaluate")
    for reply in replies(grid, "query"):
        assert reply.content["header"]["class-ids"] == []
        assert not {"train-size", "test-size", "class-counts"} & set(reply.content["header"])
    summary, rows = summary_of(tmp_path / "run"), rows_of(tmp_path / "run")
    assert not any(row["failures"] for row in rows)
    asked = {str(partition): sum(partition in row["sampled"] for row in rows) for partition in range(4)}
    assert summary["privacy"]["uploads_by_client"] == asked
    for partition, count in asked.items():
        assert summary["privacy"]["epsilon_by_client"][partition] == pytest.approx(epsilon(1.0, count, 1e-5), abs=2e-6)
    assert rows[-1]["privacy"]["epsilon"] == summary["privacy"]["epsilon_by_client"]
    assert summary["privacy"]["not_covered"] == []
    assert summary["last_accuracy"] is None
    shown = read_run(tmp_path / "run")
    assert "epsilon" in client_table(shown).splitlines()[0]
    assert f"privacy: epsilon at most {summary['privacy']['epsilon']:.2f}" in "\n".join(summary_lines(shown))


def test_what_is_not_covered_is_said(tmp_path: Path) -> None:
    words = "privacy.report_accuracy=true privacy.hide_classes=false federation.report_sizes=true privacy.noise_seed=1"
    grid = run(tmp_path / "run", "fedproto_official", f"{PRIVATE} partition=iid {words}")
    (classes, accuracy, sizes, seed) = summary_of(tmp_path / "run")["privacy"]["not_covered"]
    assert "hide_classes" in classes
    assert "report_accuracy" in accuracy
    assert "report_sizes" in sizes
    assert "noise_seed" in seed
    assert summary_of(tmp_path / "run")["last_accuracy"] is not None
    assert all(reply.content["header"]["class-ids"] for reply in replies(grid, "query"))
    assert sum(line.startswith("not covered: ") for line in summary_lines(read_run(tmp_path / "run"))) == 4


def test_a_client_reports_no_accuracy_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from server_app.strategies.base import RoundStrategy

    def ask(self: RoundStrategy, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        return self._address(list(self.run.roster), server_round, "evaluate")

    monkeypatch.setattr(RoundStrategy, "configure_evaluate", ask)
    with pytest.raises(RuntimeError, match=r"client 0: .*reports no accuracy: privacy\.report_accuracy=false"):
        run(tmp_path / "run", "fedtgp", PRIVATE)


def test_a_round_that_is_done_again_is_paid_again(tmp_path: Path) -> None:
    words = f"{PRIVATE} federation.rounds=4 federation.checkpoint_every=2 privacy.noise_seed=1"

    def die(reply: Message, partition: int, number: int) -> Message:
        if number == 4 and partition == 3:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", "fedtgp", words, spoil=die)
    run(tmp_path / "run", "fedtgp", f"{words} resume={tmp_path / 'run'}")
    # Four rounds, of which the last two were done twice, since the last checkpoint was that of round 2.
    assert summary_of(tmp_path / "run")["privacy"]["uploads_by_client"] == dict.fromkeys("0123", 6)
    with pytest.raises(
        ValueError, match=r"the configuration has changed \(privacy\.noise_multiplier was 1\.0, is 2\.0"
    ):
        run(tmp_path / "run", "fedtgp", f"{words} privacy.noise_multiplier=2.0 resume={tmp_path / 'run'}")
    (tmp_path / "run" / "privacy.json").unlink()
    with pytest.raises(ValueError, match="the epsilon spent is not known"):
        run(tmp_path / "run", "fedtgp", f"{words} federation.rounds=5 resume={tmp_path / 'run'}")


def test_a_giant_is_told_from_noise(tmp_path: Path) -> None:
    """However strong the noise, honest replies pass, and their bound follows from it."""
    run(tmp_path / "run", "fedtgp", f"{PRIVATE} privacy.noise_multiplier=1000")
    assert not any(row["failures"] for row in rows_of(tmp_path / "run"))
    assert SETTINGS.largest_norm(C, K) == pytest.approx(2 + 4 * (math.sqrt(3) + 10))


@pytest.mark.slow
def test_strong_noise_costs_accuracy_and_weak_noise_little(tmp_path: Path) -> None:
    """Few classes, narrow features, easy images: 8 clients learn from each other, and from noise they cannot."""
    images = dict(zip(("x_train", "y_train"), stripes(400, 0, 5.0), strict=True))
    images |= dict(zip(("x_test", "y_test"), stripes(200, 1, 5.0), strict=True))
    data = write(tmp_path / "stripes.npz", samples=400, tests=200, **images)
    method = "algorithm.server.aggregation=uniform algorithm.client.share_counts=false algorithm.client.weight=0.1"
    usual = f"{method} labels=all partition=iid train=sgd train.batch_size=8 train.lr=0.05 federation.rounds=5"
    private = "privacy=gaussian privacy.clip=2 privacy.report_accuracy=true privacy.noise_seed=0"
    accuracy = {}
    for noise in (1e-6, 2.0):
        folder, words = tmp_path / f"{noise}", f"{usual} {private} privacy.noise_multiplier={noise}"
        run(folder, "fedproto", words, data=data, num_nodes=8)
        accuracy[noise] = summary_of(folder)["last_accuracy"]
    assert accuracy[1e-6] > accuracy[2.0] + 0.1
