"""The DCCFSSL paper's experiments: what it reports, its settings in conf/experiment, its tables in conf/sweep."""

import itertools
import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from task.command_line import expand
from task.config import CONF_DIR, load, to_yaml
from tests.fake_grid import run_federation
from tests.test_experiments import value_of

FILES = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml") if "fssl" in path.stem)
OURS = ["fssl", "fssl_small", "fssl_study"]
SETTINGS = ("iid", "noniid")
MAIN = [f"dccfssl_{data}_{how}" for data, how in itertools.product(("cifar10", "cifar100", "stl10"), SETTINGS)]
LAMBDA = [f"dccfssl_cifar10_{how}_lambda" for how in SETTINGS]
RATIOS = {(1, 49): 0.02, (10, 40): 0.2, (25, 25): 0.5, (40, 10): 0.8, (45, 5): 0.9, (50, 0): 1.0}
LABELS = [f"dccfssl_cifar10_{how}_{n}_{m}" for how in SETTINGS for n, m in RATIOS]

# Typed from the paper's text: two accuracies, and differences in points.
ONE_LABELLED = {"iid": 75.76, "noniid": 54.84}
ABOVE_LOWER = {"iid": 34.81, "noniid": 19.26}
ONE_ABOVE_UPPER, ABOVE_UPPER, WITHOUT_DCC = 0.78, 11.64, 4.66
GAPS = {
    "dccfssl_cifar10_iid": ("11.64", "13.08", "4.66"),
    "dccfssl_cifar10_noniid": ("9.52", "8.25", "4.03"),
    "dccfssl_cifar100_iid": ("7.25", "13.54"),
    "dccfssl_cifar100_noniid": ("3.18", "16.21"),
    "dccfssl_stl10_iid": ("9.88",),
    "dccfssl_stl10_noniid": ("2.92",),
}
METHODS = ["fedavg_sl_lower", "fedavg_fixmatch", "fedprox_fixmatch", "fedconsist", "rscfed", "fedavg_sl_upper"]
ABLATIONS = ["dccfssl_no_lcc", "dccfssl_no_gcc", "dccfssl_no_dcc", "dccfssl_no_ara"]


def numbers_of(name: str) -> dict[str, float]:
    """What the paper reports for the experiment ``name``, or what follows from it, in percent by method."""
    upper = ONE_LABELLED["iid"] - ONE_ABOVE_UPPER
    if name.endswith("_1_49"):
        how = name.split("_")[2]
        found = {"dccfssl": ONE_LABELLED[how], "fedavg_sl_lower": ONE_LABELLED[how] - ABOVE_LOWER[how]}
        return found | ({"fedavg_sl_upper": upper} if how == "iid" else {})
    if name == "dccfssl_cifar10_iid":
        ours = upper + ABOVE_UPPER
        return {"fedavg_sl_upper": upper, "dccfssl": ours, "dccfssl_no_dcc": ours - WITHOUT_DCC}
    return {}


def test_there_is_a_file_for_everything_in_the_paper() -> None:
    assert sorted([*OURS, *MAIN, *LAMBDA, *LABELS]) == FILES


@pytest.mark.parametrize("name", [*MAIN, *LAMBDA, *LABELS])
def test_an_experiment_has_the_paper_s_settings_and_numbers(name: str) -> None:
    config = load(f"experiment={name}")
    _, data, how, *rest = name.split("_")
    scheme = {"iid": "Iid", "noniid": "Dirichlet"}[how]
    expected = {
        "algorithm.name": "dccfssl",
        "algorithm.client.lambda_lcc": 1.0,
        "algorithm.client.lambda_gcc": 1.0,
        "algorithm.evaluation": "server",
        "data.name": data,
        "partition._target_": f"task.data.partition.{scheme}",
        "partition.pool": "train",
        "partition.test_fraction": 0.0,
        "partition.max_samples": None,
        "model.name": "wrn16_2",
        "train.local_epochs": 1,
        "train.batch_size": 64,
        "federation.num_clients": 50,
        "federation.rounds": 500,
        "federation.participation": 0.2,
    }
    expected |= {"partition.alpha": 0.5, "partition.min_size": 2 if data == "stl10" else 10} if how == "noniid" else {}
    expected |= {"data.source.resize": 32} if data == "stl10" else {}
    tree = OmegaConf.create(to_yaml(config))
    assert {key: OmegaConf.select(tree, key) for key in expected} == expected
    assert config.labels.labelled_clients(50) == (int(rest[0]) if len(rest) == 2 else 5)
    assert config.experiment is not None
    assert config.experiment.name == name
    assert config.experiment.source.startswith("DCCFSSL (TMC 2024), ")
    found = {algorithm: pytest.approx(mean) for algorithm, mean in numbers_of(name).items()}
    assert {algorithm: mean for algorithm, (mean, _) in config.experiment.accuracy.items()} == found
    assert all(std is None for _, std in config.experiment.accuracy.values())
    assert all(gap in config.experiment.note for gap in GAPS.get(name, ()))
    assert bool(found) == ("derived" in config.experiment.note)


@pytest.mark.parametrize("name", FILES)
def test_few_clients_are_still_of_both_kinds(name: str) -> None:
    config = load(f"experiment={name} debug=smoke")
    assert (config.federation.num_clients, config.federation.clients_a_round(4)) == (None, 4)
    n = config.labels.labelled_clients(4)
    assert n == 4 if name.endswith("50_0") else 1 <= n <= 3
    expected = {(25, 25): 2, (40, 10): 3, (45, 5): 3, (50, 0): 4}
    assert n == next((n for (a, b), n in expected.items() if name.endswith(f"_{a}_{b}")), 1)


# Sweeps

SWEEPS = {
    "dccfssl_table1": (MAIN, [*METHODS, "dccfssl"]),
    "dccfssl_ablation": (MAIN, [*ABLATIONS, "dccfssl"]),
    "dccfssl_lambda": (LAMBDA, ["dccfssl"]),
    "dccfssl_labels": ([*LABELS, *MAIN[:2]], ["dccfssl"]),
    "dccfssl_study": (["fssl_study"], [*METHODS, *ABLATIONS, "dccfssl", "dccfssl_expanded"]),
}
MORE = {
    "dccfssl_lambda": {f"algorithm.client.lambda_{kind}": ("0.1", "1", "10") for kind in ("lcc", "gcc")},
    "dccfssl_study": {"partition": ("iid_train", "dirichlet_train")},
}


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_sweep_is_a_table_of_the_paper(sweep: str) -> None:
    experiments, algorithms = SWEEPS[sweep]
    keys = {"experiment": experiments, "algorithm": algorithms, "seed": "012", **MORE.get(sweep, {})}
    jobs = expand([f"sweep={sweep}"])
    cells = Counter(tuple(value_of(words, key) for key in keys) for words in jobs)
    assert cells == Counter(itertools.product(*keys.values()))
    for algorithm in algorithms:  # each method accepts the settings, and debug=smoke shrinks them
        words = next(words for words in jobs if value_of(words, "algorithm") == algorithm)
        federation = load([*words, "debug=smoke"]).federation
        assert (federation.num_clients, federation.rounds) == (None, 2)


def test_the_study_is_in_one_setting() -> None:
    config = load("experiment=fssl_study partition=dirichlet_train")
    assert (config.data.name, config.model.name, config.partition["alpha"]) == ("fashion_small", "cnn_small", 0.5)
    assert (config.federation.num_clients, config.federation.rounds, config.federation.participation) == (20, 60, 1.0)
    assert config.labels.labelled_clients(20) == 2


def test_every_sweep_is_checked_here() -> None:
    assert {path.stem for path in (CONF_DIR / "sweep").glob("dccfssl_*.yaml")} == set(SWEEPS)


# Runs


def algorithm_for(name: str) -> str:
    """One of the methods; a file of one method keeps it."""
    every = [*METHODS, *ABLATIONS]
    return every[MAIN.index(name)] if name in MAIN else "dccfssl"


def smoke(name: str, more: str, folder: Path) -> None:
    """Run the experiment ``name`` as ``debug=smoke`` does and check what it says."""
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    algorithm = algorithm_for(name)
    words = f"experiment={name} algorithm={algorithm} debug=smoke data.cache_dir={folder.parent}/cache {more}"
    run_federation(words, str(folder), num_nodes=4)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["rounds_done"], summary["algorithm"]) == ("completed", 2, algorithm)
    source = "cifar10" if name == "fssl" else name.split("_")[1]  # dccfssl_SOURCE_..., and those on the embedded images
    assert summary["data"] == ("fashion_small" if name.startswith("fssl_") else f"{source} (stand-in)")
    assert summary["last_accuracy"] is not None
    config = load(words)
    n = 4 if config.algorithm.unlabelled == "revealed" else config.labels.labelled_clients(4)
    assert (summary["labelled_clients"], summary["unlabelled_clients"]) == (n, 4 - n)
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    assert not any(row["failures"] for row in rows)
    shown = OmegaConf.load(folder / "config.yaml").get("experiment")
    assert shown is None or (shown.accuracy, shown.note) == ({}, "")  # noise is not compared with a paper


LIGHT = "model=cnn_small model.entries.0.width=2 partition.max_samples=100"
LONG = {name for name in LABELS if name.endswith(("_10_40", "_25_25", "_40_10"))} | {LAMBDA[1], "fssl_small", "fssl"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in FILES])
def test_every_experiment_runs_with_a_small_model(name: str, tmp_path: Path) -> None:
    smoke(name, LIGHT, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_experiment_runs(name: str, tmp_path: Path) -> None:
    smoke(name, "", tmp_path / "run")
