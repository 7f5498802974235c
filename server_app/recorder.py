"""The results folder: one line a round as it happens, and tables, prototypes and a summary at the end."""

import csv
import io
import json
import os
import platform
import shutil
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from server_app.listeners import FOLDERS as LISTENER_FOLDERS
from server_app.listeners import Audience
from server_app.roster import Roster
from task.config import to_yaml
from task.messages import PrototypeSet
from task.schema import Config

ROUNDS, CLIENTS, PROTOTYPES, SUMMARY, CONFIG, RUN, PRIVACY, CONFUSION = (
    "rounds.jsonl",
    "clients.csv",
    "prototypes.npz",
    "summary.json",
    "config.yaml",
    "run.json",
    "privacy.json",
    "confusion.csv",
)
OWN_FILES = (ROUNDS, CLIENTS, PROTOTYPES, SUMMARY, CONFIG, RUN, PRIVACY, CONFUSION)
CHECKPOINT, CLIENT_STATE, SNAPSHOTS = "checkpoint", "client-state", "prototypes"
OWN_FOLDERS = (CHECKPOINT, CLIENT_STATE, SNAPSHOTS, *LISTENER_FOLDERS)
PrototypesByClient = dict[int, PrototypeSet]


class Recorder:
    """Writes the results of one run into ``folder``.

    Parameters
    ----------
    folder : Path
        The results folder; made if missing.
    config : Config
        The configuration of the run.
    overrides : str
        The Hydra overrides that gave it, so that the run can be repeated and resumed.
    session : str
        The name of the run in its clients' state folders.

    resumed_round : int
        The last round to keep of the run that goes on in this folder; 0 for a new run.

    Raises
    ------
    ValueError
        The folder holds an earlier run, lacks the rounds to keep, or cannot be written; it is left as it was.
    """

    def __init__(self, folder: Path, config: Config, overrides: str, session: str, resumed_round: int = 0) -> None:
        self.folder, self.config, self.started = folder, config, time.monotonic()
        self.audience = Audience(config)
        lines = self._kept_lines(resumed_round)
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        run = {
            "overrides": overrides,
            "session": session,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": versions(),
        }
        try:
            if not resumed_round:
                self._clear()
            (folder / SUMMARY).unlink(missing_ok=True)
            self._write_text(CONFIG, to_yaml(config))
            self._write_text(RUN, json.dumps(run, indent=2) + "\n")
            self._write_text(ROUNDS, "".join(line + "\n" for line in lines))
        except OSError as error:
            raise ValueError(f"output-dir={str(folder)!r} cannot be written: {error}") from error
        self.audience.begin(folder, session, resumed_round)

    def _kept_lines(self, resumed_round: int) -> list[str]:
        """Return the lines of the rounds to keep."""
        path = self.folder / ROUNDS
        if not resumed_round:
            used = [name for name in OWN_FILES if (self.folder / name).exists()]
            if used and not self.config.overwrite:
                where = f"{self.folder} already holds a run ({used[0]})"
                raise ValueError(f"{where}: give another folder, or overwrite=true, which deletes it")
            return []
        try:
            lines = path.read_text(encoding="utf-8").splitlines()[:resumed_round]
            found = [json.loads(line)["round"] for line in lines]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read, so the run cannot be resumed: {error}") from error
        if found != list(range(1, resumed_round + 1)):
            raise ValueError(f"{path} does not hold rounds 1 to {resumed_round}, so the run cannot be resumed")
        return lines

    def _clear(self) -> None:
        for name in OWN_FILES:
            (self.folder / name).unlink(missing_ok=True)
        for name in OWN_FOLDERS:
            if (self.folder / name).is_dir():
                shutil.rmtree(self.folder / name)

    def read_client_prototypes(self) -> PrototypesByClient:
        """Return the last prototypes of each client, as the run that goes on had written them."""
        return _read_client_prototypes(self.folder / PROTOTYPES)

    def append(self, row: dict[str, Any]) -> None:
        """Add the line of a round; it is on disk when this returns."""
        self.rows.append(row)
        with (self.folder / ROUNDS).open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.audience.hear(row)

    def write_confusion(self, counts_CC: Tensor) -> None:
        """Write how often each true class (row) was taken for which (column), by class id."""
        header = ",".join(["true", *map(str, range(len(counts_CC)))])
        lines = [",".join(map(str, [number, *row])) for number, row in enumerate(counts_CC.tolist())]
        self._write_text(CONFUSION, "\n".join([header, *lines]) + "\n")

    def write_prototypes(
        self, global_: PrototypeSet | None, by_client: PrototypesByClient, name: str = PROTOTYPES
    ) -> None:
        """Write the last global prototypes and the last ones of each client; nothing for methods without any."""
        every = [*by_client.values()] if global_ is None else [global_, *by_client.values()]
        if not every:
            return
        width = every[0].vectors.shape[1]  # K, or whatever the vectors are that a method exchanges
        empty = np.zeros((0, width), np.float32), np.zeros(0, np.int64)
        vectors, ids = (global_.vectors.numpy(), global_.class_ids.numpy()) if global_ is not None else empty
        sets = sorted(by_client.items())
        buffer = io.BytesIO()
        np.savez(
            buffer,
            global_class_ids=ids,
            global_vectors=vectors,
            client_partitions=np.repeat([p for p, _ in sets], [len(s.class_ids) for _, s in sets]).astype(np.int64),
            client_class_ids=np.concatenate([empty[1], *(s.class_ids.numpy() for _, s in sets)]),
            client_vectors=np.concatenate([empty[0], *(s.vectors.numpy() for _, s in sets)]),
        )
        self._write_bytes(name, buffer.getvalue())

    def write_snapshot(self, number: int, global_: PrototypeSet | None, by_client: PrototypesByClient) -> None:
        """Keep the prototypes of round ``number`` beside those of other rounds."""
        self.write_prototypes(global_, by_client, f"{SNAPSHOTS}/round-{number:05d}.npz")

    def write_clients(self, roster: Roster) -> None:
        """Write one row a client: facts, last and best accuracy."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        names = "partition name model parameters device train_size test_size classes class_counts"
        writer.writerow([*names.split(), "last_accuracy", "best_accuracy", "best_round"])
        for partition, report in roster.reports.items():
            counts = " ".join(map(str, report.class_counts)) if report.class_counts is not None else ""
            sizes = ["" if size is None else size for size in (report.train_size, report.test_size)]
            name = report.name or f"client-{partition}"
            facts = [partition, name, report.model, report.parameters, report.device, *sizes]
            classes = " ".join(map(str, report.class_ids))
            writer.writerow([*facts, classes, counts, *self._client_accuracy(partition)])
        self._write_text(CLIENTS, buffer.getvalue())

    def finish(self, status: str, reason: str | None, roster: Roster | None, extra: Mapping[str, Any]) -> None:
        """Write the summary: status, reason of a failure, last and best accuracy with their rule, totals."""
        config = self.config
        scored = [row for row in self.rows if row["accuracy"] is not None]
        best = max(scored, key=lambda row: (row["accuracy"], -row["round"])) if scored else None
        summary = {
            "status": status,
            "reason": reason,
            "algorithm": config.algorithm.name,
            "seed": config.seed,
            "rounds": config.federation.rounds,
            "rounds_done": len(self.rows),
            "num_clients": len(roster) if roster else None,
            "last_accuracy": scored[-1]["accuracy"] if scored else None,
            "last_evaluated_round": scored[-1]["round"] if scored else None,
            "best_accuracy": best["accuracy"] if best else None,
            "best_round": best["round"] if best else None,
            **extra,
            "failures": sum(len(row["failures"]) for row in self.rows),
            "bytes_up": sum(row["bytes"]["train_up"] + row["bytes"]["evaluate_up"] for row in self.rows),
            "bytes_down": sum(row["bytes"]["train_down"] + row["bytes"]["evaluate_down"] for row in self.rows),
            "parameters_up": self._parameters("train_up"),
            "parameters_down": self._parameters("train_down"),
            "seconds": round(sum(row["seconds"]["round"] for row in self.rows), 3),
            "seconds_with_start": round(time.monotonic() - self.started, 3),
            "versions": versions(),
            "class_names": list(roster.class_names) if roster else [],
            "data": config.data.name,
            "partition": dict(config.partition),
            "model": config.model.name,
        }
        self._write_text(SUMMARY, json.dumps(summary, indent=2) + "\n")
        self.audience.end(summary)

    def _parameters(self, key: str) -> int | None:
        """Return the sum over all rounds; None when one of them, of an earlier version, did not count."""
        counts = [row["parameters"][key] for row in self.rows if "parameters" in row]
        return sum(counts) if len(counts) == len(self.rows) else None

    def _client_accuracy(self, partition: int) -> list[Any]:
        """Return last accuracy, best accuracy and best round of a client, empty where it has none."""
        found = [(row["client_accuracy"].get(str(partition)), row["round"]) for row in self.rows]
        scores = [(accuracy, number) for accuracy, number in found if accuracy is not None]
        if not scores:
            return ["", "", ""]
        best, number = max(scores, key=lambda score: (score[0], -score[1]))
        return [scores[-1][0], best, number]

    def _write_text(self, name: str, text: str) -> None:
        self._write_bytes(name, text.encode())

    def _write_bytes(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(data)
        os.replace(temporary, path)


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"python": platform.python_version()}
    for package in ("protofed", "flwr", "torch", "torchvision", "numpy", "ray", "hydra-core"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _read_client_prototypes(path: Path) -> PrototypesByClient:
    if not path.is_file():
        return {}
    with np.load(path, allow_pickle=False) as arrays:
        owners, ids, vectors = (arrays[f"client_{part}"] for part in ("partitions", "class_ids", "vectors"))
    return {
        int(owner): PrototypeSet(torch.from_numpy(ids[owners == owner]), torch.from_numpy(vectors[owners == owner]))
        for owner in np.unique(owners)
    }
