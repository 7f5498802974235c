"""The FedTGP paper's experiments: its numbers and settings in conf/experiment, its tables in conf/sweep.

Those of the DCCFSSL paper are in ``test_fssl_experiments.py``.
"""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from task.command_line import expand
from task.config import CONF_DIR, build, load, to_yaml
from task.data.partition import client_splits
from task.data.prepare import prepare
from task.jobs import plan
from tests.fake_grid import run_federation
from tests.test_sweep import OUR_SWEEPS

OURS = "study"
NAMES = {path.stem for path in (CONF_DIR / "experiment").glob("*.yaml") if "fssl" not in path.stem}
FILES = sorted(NAMES - {OURS, "quick"})
METHODS = ["lg_fedavg", "fedgen", "fml", "fedkd", "feddistill", "fedproto", "fedtgp"]
PAPER_ROWS = [*METHODS[:-1], "fedtgp_paper"]
# Variants of a method that are shown beside the method's own number.
VARIANTS = {"fedtgp_paper": "fedtgp", "fedtgp_official": "fedtgp"}
VARIANTS |= {f"{method}_official": method for method in ("fml", "fedkd", "fedproto")}

# Typed from the paper: mean and standard deviation in percent, "-" where it has none.
DATA_SETS = ("cifar10", "cifar100", "flowers102", "tiny_imagenet")
FOUR_DATA_SETS = (
    [f"{data}_{kind}" for kind in ("pathological", "practical") for data in DATA_SETS],
    """
    86.82 0.26  57.01 0.66  58.88 0.28  32.04 0.17    84.55 0.51  40.65 0.07  45.93 0.48  24.06 0.10
    82.83 0.65  58.26 0.36  59.90 0.15  29.80 1.11    82.55 0.49  38.73 0.14  45.30 0.17  19.60 0.08
    87.06 0.24  55.15 0.14  57.79 0.31  31.38 0.15    85.88 0.08  39.86 0.25  46.08 0.53  24.25 0.14
    87.32 0.31  56.56 0.27  54.82 0.35  32.64 0.36    86.45 0.10  40.56 0.31  48.52 0.28  25.51 0.35
    87.24 0.06  56.99 0.27  58.51 0.34  31.49 0.38    86.01 0.31  41.54 0.08  49.13 0.85  24.87 0.31
    83.39 0.15  53.59 0.29  55.13 0.17  29.28 0.36    82.07 1.64  36.34 0.28  41.21 0.22  19.01 0.10
    90.02 0.30  61.86 0.30  68.98 0.43  34.56 0.27    88.15 0.43  46.94 0.12  53.68 0.31  27.37 0.12
""",
)
GROUPS = ("htfe2", "htfe3", "htfe4", "htfe9", "res34_htc4", "htfe8_htc4", "50_clients", "100_clients")
HETEROGENEITY = (
    [f"cifar100_{group}" for group in GROUPS],
    """
    46.61 0.24  45.56 0.37  43.91 0.16  42.04 0.26    -     -     -     -       37.81 0.12  35.14 0.47
    43.92 0.11  43.65 0.43  40.47 1.09  40.28 0.54    -     -     -     -       37.95 0.25  34.52 0.31
    45.94 0.16  43.05 0.06  43.00 0.08  42.41 0.28    41.03 0.20  39.23 0.42    38.47 0.14  36.09 0.28
    46.33 0.24  43.16 0.49  43.21 0.37  42.15 0.36    39.77 0.42  40.59 0.51    38.25 0.41  35.62 0.55
    46.88 0.13  43.53 0.21  43.56 0.14  42.09 0.20    44.72 0.13  41.67 0.06    38.51 0.36  36.06 0.24
    43.97 0.18  38.14 0.64  34.67 0.55  32.74 0.82    32.26 0.18  25.57 0.72    33.03 0.42  28.95 0.51
    49.82 0.29  49.65 0.37  46.54 0.14  48.05 0.19    48.18 0.27  44.53 0.16    43.17 0.23  41.57 0.30
""",
)
ABLATIONS = {
    "cifar100_practical": (40.11, 43.46, 40.37),
    "flowers102_practical": (46.81, 52.03, 49.39),
    "tiny_imagenet_practical": (22.26, 26.13, 23.12),
}
FEDTGP_ONLY = {"cifar100_tau_1": 43.23, "cifar100_tau_10": 44.81, "cifar100_tau_100": 46.94, "cifar100_tau_1000": 46.09}
FEDTGP_ONLY |= {"cifar100_server_epochs_1": 43.41, "cifar100_server_epochs_10": 44.62}
FEDTGP_ONLY |= {"cifar100_server_epochs_100": 46.94, "cifar100_server_epochs_1000": 47.01}
WITHOUT_NUMBERS = [f"cifar100_epochs_{epochs}" for epochs in (5, 10, 20)]
WITHOUT_NUMBERS += [f"cifar100_width_{width}" for width in (64, 256, 1024)]

SAME_EVERYWHERE = {
    "algorithm.client.weight": 0.1,
    "algorithm.server.margin_cap": 100,
    "algorithm.server.epochs": 100,
    "partition.test_fraction": 0.25,
    "partition.max_samples": None,
    "model.name": "htfe8",
    "model.feature_dim": 512,
    "train.local_epochs": 1,
    "train.batch_size": 10,
    "train.lr": 0.01,
    "train.lr_schedule": "constant",
    "federation.rounds": 1000,
    "federation.num_clients": 20,
    "federation.participation": 1.0,
}
CLASSES = {"cifar10": 2, "cifar100": 10, "flowers102": 10, "tiny_imagenet": 20}


def settings_of(name: str) -> dict[str, Any]:
    """What the experiment ``name`` must set, read off its name."""
    data = next(data for data in DATA_SETS if name.startswith(f"{data}_"))
    rest = name.removeprefix(f"{data}_")
    kind, _, number = rest.rpartition("_")
    own: dict[str, Any] = {
        "data.name": data,
        "partition._target_": "task.data.partition.Dirichlet",
        "partition.alpha": 0.1,
    }
    if rest == "pathological":
        own = {"data.name": data, "partition._target_": "task.data.partition.Pathological"}
        own["partition.classes_per_client"] = CLASSES[data]
    elif rest.startswith(("htfe", "res34")):
        own["model.name"] = rest
    elif rest.endswith("clients"):
        own |= {"federation.num_clients": int(kind), "federation.participation": 0.5}
    elif rest != "practical":
        keys = {"epochs": "train.local_epochs", "width": "model.feature_dim"}
        keys |= {"tau": "algorithm.server.margin_cap", "server_epochs": "algorithm.server.epochs"}
        own[keys[kind]] = int(number)
    return SAME_EVERYWHERE | own


def numbers_of(name: str) -> dict[str, list[float | None]]:
    """What the paper reports for the experiment ``name``, by method."""
    found: dict[str, list[float | None]] = {}
    for names, table in (FOUR_DATA_SETS, HETEROGENEITY):
        for method, line in zip(METHODS, table.strip().splitlines(), strict=True):
            cells = line.split()
            assert len(cells) == 2 * len(names)
            mean, std = cells[2 * names.index(name) :][:2] if name in names else ("-", "-")
            if mean != "-":
                found[method] = [float(mean), float(std)]
    if name in ABLATIONS:
        found |= dict(
            zip(("fedtgp_scl", "fedtgp_fm", "fedtgp_no_f"), ([x, None] for x in ABLATIONS[name]), strict=True)
        )
    if name in FEDTGP_ONLY:
        found["fedtgp"] = [FEDTGP_ONLY[name], None]
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    return tmp_path_factory.mktemp("cache")


def test_there_is_a_file_for_everything_in_the_paper() -> None:
    expected = [*FOUR_DATA_SETS[0], *HETEROGENEITY[0], *FEDTGP_ONLY, *WITHOUT_NUMBERS]
    assert sorted(expected) == FILES


@pytest.mark.parametrize("name", FILES)
def test_an_experiment_has_the_paper_s_settings_and_numbers(name: str) -> None:
    config = load(f"experiment={name}")
    tree = OmegaConf.create(to_yaml(config))
    expected = settings_of(name)
    assert {key: OmegaConf.select(tree, key) for key in expected} == expected
    experiment, numbers = config.experiment, numbers_of(name)
    assert experiment is not None
    assert experiment.name == name
    assert experiment.source.startswith("FedTGP (AAAI 2024), ")
    variants = {name: numbers[method] for name, method in VARIANTS.items() if method in numbers}
    assert experiment.accuracy == numbers | variants
    assert {path.stem for path in (CONF_DIR / "algorithm").glob("*.yaml")} >= experiment.accuracy.keys()
    traffic = (2.05, 8.69, 36.99, 33.04, 0.29, 1.48, 1.48)
    shown = {"fedtgp_paper": 1.48} | dict(zip(METHODS, traffic, strict=True))
    assert experiment.communication == (shown if name == "cifar100_practical" else {})


# Sweeps

SWEEPS = {
    "table1": (FOUR_DATA_SETS[0], PAPER_ROWS),
    "heterogeneity": (HETEROGENEITY[0][:4], PAPER_ROWS),
    "heads": (HETEROGENEITY[0][4:6], PAPER_ROWS[2:]),
    "clients": (HETEROGENEITY[0][6:], PAPER_ROWS),
    "local_epochs": (WITHOUT_NUMBERS[:3], PAPER_ROWS),
    "feature_width": (WITHOUT_NUMBERS[3:], PAPER_ROWS),
    "ablation": (list(ABLATIONS), ["fedtgp_scl", "fedtgp_fm", "fedtgp_no_f", "fedproto", "fedtgp_paper"]),
    "tau": (list(FEDTGP_ONLY)[:4], ["fedtgp_paper"]),
    "server_epochs": (list(FEDTGP_ONLY)[4:], ["fedtgp_paper"]),
}


def value_of(words: list[str], key: str) -> str:
    [value] = [word.removeprefix(f"{key}=") for word in words if word.startswith(f"{key}=")]
    return value


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_sweep_is_a_table_of_the_paper(sweep: str) -> None:
    experiments, algorithms = SWEEPS[sweep]
    jobs = expand([f"sweep={sweep}"])
    cells = [(value_of(words, "experiment"), value_of(words, "algorithm"), value_of(words, "seed")) for words in jobs]
    assert Counter(cells) == Counter((e, a, s) for e in experiments for a in algorithms for s in "012")
    for experiment in experiments:  # heads that differ are refused by some methods, settings by others
        load([*jobs[[cell[0] for cell in cells].index(experiment)], "debug=smoke"])


@pytest.mark.parametrize("algorithm", SWEEPS["ablation"][1])
def test_ablations_differ_by_one_part_only(algorithm: str) -> None:
    [words] = expand(["sweep=ablation", f"algorithm={algorithm}", "experiment=cifar100_practical", "seed=0"])
    assert load(words).algorithm.client["weight"] == 0.1


def test_the_study_runs_every_method_in_one_setting() -> None:
    jobs = expand(["sweep=study"])
    methods = ["local", *METHODS, "fedtgp_symmetric"]
    cells = Counter((value_of(words, "algorithm"), value_of(words, "seed")) for words in jobs)
    assert cells == Counter((method, seed) for method in methods for seed in "012")
    config = load(jobs[0])
    assert (config.data.name, config.model.name, config.partition["alpha"]) == ("fashion_small", "htcnn4", 0.1)
    assert (config.federation.num_clients, config.federation.rounds) == (20, 50)
    assert (config.train.lr, config.train.lr_schedule) == (0.02, "linear")
    assert plan([*jobs[0], "debug=smoke"], Path("/"), 4).num_clients == 4
    [other] = expand(["sweep=study", "data=npz", "data.source.path=/x.npz", "algorithm=local", "seed=3"])
    assert load(other).data.name == "npz"


def test_every_sweep_is_checked_here_or_among_our_own() -> None:
    names = {path.stem for path in (CONF_DIR / "sweep").glob("*.yaml")}
    assert {name for name in names if not name.startswith("dccfssl_")} == {*SWEEPS, OURS, *OUR_SWEEPS}


# Runs

FAMILIES = ("local", "lg_fedavg", "fedgen", "fml", "fedkd", "feddistill", "fedproto", "fedtgp_paper")


def algorithm_for(name: str) -> str:
    """One of the eight families; a file of one method keeps it, and unequal heads are not shared."""
    if name in FEDTGP_ONLY:
        return "fedtgp_paper"
    allowed = FAMILIES[3:] if "htc4" in name else FAMILIES
    return allowed[FILES.index(name) % len(allowed)]


def smoke(name: str, more: str, folder: Path, cache: Path) -> None:
    """Run the experiment ``name`` as ``debug=smoke`` does, on still fewer images, and check what it says."""
    algorithm = algorithm_for(name)
    words = (
        f"experiment={name} algorithm={algorithm} debug=smoke partition.max_samples=40 data.cache_dir={cache} {more}"
    )
    run_federation(words, str(folder), num_nodes=4)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["rounds_done"], summary["algorithm"]) == ("completed", 2, algorithm)
    assert (summary["experiment"], summary["data"]) == (name, f"{settings_of(name)['data.name']} (stand-in)")
    assert summary["last_accuracy"] is not None
    shown = OmegaConf.load(folder / "config.yaml").experiment
    # Noise is not compared with a paper.
    assert (shown.name, shown.accuracy, shown.communication, shown.note) == (name, {}, {}, "")


def test_all_families_are_among_the_runs() -> None:
    assert {algorithm_for(name) for name in FILES} == set(FAMILIES)


LONG = "cifar100_server_epochs_1000"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == LONG else n for n in FILES])
def test_every_experiment_runs_with_small_models(name: str, tmp_path: Path, cache: Path) -> None:
    width = "" if "width" in name else "model.feature_dim=64"
    smoke(name, f"model=htcnn4 {width}", tmp_path / "run", cache)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_experiment_runs(name: str, tmp_path: Path, cache: Path) -> None:
    smoke(name, "", tmp_path / "run", cache)


def test_one_experiment_runs_with_its_own_models(tmp_path: Path, cache: Path) -> None:
    smoke("cifar100_htfe9", "", tmp_path / "run", cache)


def test_few_clients_still_hold_all_classes_of_a_pathological_setting(cache: Path) -> None:
    config = load("experiment=cifar100_pathological debug=smoke")
    dataset = prepare(build(config.data.source), cache)
    splits = client_splits(build(config.partition), dataset, 4, 0)
    held = [{int(dataset.labels[i]) for i in (*split.train, *split.test)} for split in splits]
    assert [len(classes) for classes in held] == [25, 25, 25, 25]
    assert set.union(*held) == set(range(100))
