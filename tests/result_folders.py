"""Writes result folders of runs that never happened, in the format of ``server_app/recorder.py``."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

MODELS = ("cnn_plain", "cnn_wide", "cnn_residual", "cnn_separable")


def write_run(
    folder: Path,
    *,
    algorithm: str = "fedtgp",
    alpha: float = 0.1,
    seed: int = 0,
    rounds: int = 6,
    clients: int = 4,
    classes: int = 3,
    level: float = 0.8,
    rule: str = "prototype",
    prototypes: bool = True,
    class_names: list[str] | None = None,
    counted: bool = True,
    summary: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    started: str = "2026-01-01T10:00:00+0000",
) -> Path:
    """Write a completed run that ends at the accuracy ``level``; ``summary`` and ``config`` replace single keys.

    Without ``counted`` it is of an earlier version, which counted neither parameters nor what each client sent.
    """
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    partition = {"_target_": "task.data.partition.Dirichlet", "alpha": alpha, "test_share": 0.25}
    settings = {
        "seed": seed,
        "name": None,
        "algorithm": {
            "name": algorithm,
            "inference": rule,
            "client": {"weight": len(algorithm)},
        },
        "data": {"name": "fashion_small", "cache_dir": str(folder.parent)},
        "partition": partition,
        "model": {"name": "htcnn4", "feature_dim": 512, "entries": [{"name": name} for name in MODELS]},
        "train": {"lr": 0.01, "device": "auto"},
        "federation": {"rounds": rounds, "num_clients": None},
    } | (config or {})
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "run.json").write_text(json.dumps({"overrides": "", "session": "s", "started": started}))
    accuracies = [level * (1 - 0.6 ** (number + 1)) for number in range(rounds - 1)] + [level]
    _write_rounds(folder / "rounds.jsonl", accuracies, rule, clients, counted)
    counts = random.gamma(alpha * 3, 1, (clients, classes))
    counts = np.round(800 * counts / counts.sum(1, keepdims=True)).astype(int)
    counts[:, 0] += 3
    _write_clients(folder / "clients.csv", counts, level, rounds)
    if prototypes:
        _write_prototypes(folder / "prototypes.npz", counts, random)
    (folder / "summary.json").write_text(
        json.dumps(
            {
                "status": "completed",
                "reason": None,
                "algorithm": algorithm,
                "seed": seed,
                "rounds": rounds,
                "rounds_done": rounds,
                "num_clients": clients,
                "last_accuracy": level,
                "best_accuracy": max(accuracies),
                "best_round": 1 + int(np.argmax(accuracies)),
                "accuracy_rule": rule,
                "accuracy_model": "each client's own",
                "accuracy_averaging": "test samples",
                "failures": 0,
                "bytes_up": 0,
                "bytes_down": 0,
                "seconds": 12.5,
                "versions": {},
                "class_names": [f"class {i}" for i in range(classes)] if class_names is None else class_names,
                "data": "fashion_small",
                "partition": partition,
                "model": "htcnn4",
            }
            | (summary or {})
        )
    )
    return folder


def _write_rounds(path: Path, accuracies: list[float], rule: str, clients: int, counted: bool) -> None:
    # Of each client: in round 1 nothing comes down, from then on 200 parameters.
    downs = [0] + [200] * (len(accuracies) - 1)
    traffic = [
        {"bytes_down": 1000 // clients, "bytes_up": 2000 // clients, "parameters_down": down, "parameters_up": 100}
        for down in downs
    ]
    lines = [
        {
            "round": number,
            "accuracy": accuracy,
            "loss": 0.4,
            "rule": rule,
            "sampled": list(range(clients)),
            "failures": [],
            "bytes": {"train_down": 1000, "train_up": 2000, "evaluate_down": 500, "evaluate_up": 100},
            "metrics": {"margin": 10.0},
            "seconds": {"train": 1.0, "server": 0.1, "evaluate": 0.5, "round": 1.7},
        }
        | (
            {
                "parameters": {"train_down": clients * downs[number - 1], "train_up": clients * 100},
                "client_traffic": {str(client): traffic[number - 1] for client in range(clients)},
            }
            if counted
            else {}
        )
        for number, accuracy in enumerate(accuracies, 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _write_clients(path: Path, counts: np.ndarray, level: float, rounds: int) -> None:
    names = "partition name model parameters device train_size test_size classes class_counts"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names.split(), "last_accuracy", "best_accuracy", "best_round"])
        for partition, row in enumerate(counts):
            total, classes = int(row.sum()), np.flatnonzero(row)
            best = min(1.0, level + 0.02 * (partition % 7))
            facts = [partition, f"client-{partition}", MODELS[partition % 4], 123_456, "cpu"]
            sizes = [total - total // 4, total // 4]
            writer.writerow(
                [
                    *facts,
                    *sizes,
                    " ".join(map(str, classes)),
                    " ".join(map(str, row)),
                    best - 0.01,
                    best,
                    rounds,
                ]
            )


def _write_prototypes(path: Path, counts: np.ndarray, random: np.random.Generator) -> None:
    centres = 4 * random.normal(size=(counts.shape[1], 16))
    owners, ids = np.nonzero(counts)
    np.savez(
        path,
        global_class_ids=np.arange(counts.shape[1]),
        global_vectors=(1.3 * centres).astype(np.float32),
        client_partitions=owners,
        client_class_ids=ids,
        client_vectors=(centres[ids] + random.normal(size=(len(ids), 16))).astype(np.float32),
    )
