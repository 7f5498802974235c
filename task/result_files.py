"""Reads and checks the single files of a result folder; ``task/results.py`` puts them together."""

import csv
import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml  # type: ignore[import-untyped, unused-ignore]

COMPLETED = "completed"
COMPLETED_WITH_LOSSES = "completed with losses"
FAILED = "failed"
# Not written by any run: what the reader says where ``summary.json`` is missing.
INCOMPLETE = "incomplete"

_CLIENT_COLUMNS = (
    "partition",
    "name",
    "model",
    "parameters",
    "device",
    "train_size",
    "test_size",
    "classes",
    "class_counts",
    "last_accuracy",
    "best_accuracy",
    "best_round",
)
_PROTOTYPE_ARRAYS = (
    "global_class_ids",
    "global_vectors",
    "client_partitions",
    "client_class_ids",
    "client_vectors",
)


@dataclass(frozen=True)
class ClientRow:
    """One line of ``clients.csv``; ``None`` where the client did not share the value or never had one."""

    partition: int
    name: str
    model: str
    parameters: int | None
    device: str
    train_size: int | None
    test_size: int | None
    classes: tuple[int, ...]
    class_counts: tuple[int, ...] | None
    last_accuracy: float | None
    best_accuracy: float | None
    best_round: int | None


@dataclass(frozen=True)
class Experiment:
    """The paper's experiment that a run repeats, with the paper's numbers by name of the algorithm.

    ``accuracy`` is the mean in percent and its standard deviation, None where the paper has none; ``communication``
    is in millions of parameters a round, all clients together, up and down. ``note`` says what the accuracies are.
    """

    name: str
    source: str
    accuracy: Mapping[str, tuple[float, float | None]]
    communication: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True, eq=False)
class Prototypes:
    """The last prototypes of a run.

    The ``n`` global ones are ids ``(n,)`` and vectors ``(n, K)``; those of the clients have ``N`` for ``n``.
    """

    global_class_ids: npt.NDArray[np.int64]
    global_vectors: npt.NDArray[np.float64]
    client_partitions: npt.NDArray[np.int64]
    client_class_ids: npt.NDArray[np.int64]
    client_vectors: npt.NDArray[np.float64]


def _bad(path: Path, error: BaseException | str) -> ValueError:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ValueError(f"{path}: {' '.join(text.split())}")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise _bad(path, "missing from the results of a completed run") from error
    except OSError as error:
        raise _bad(path, error) from error


def _accuracy(value: Any, path: Path, where: str) -> float | None:
    """Check an accuracy: a number within 0 and 1, or None for one that does not exist."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise _bad(path, f"{where} is {value!r}, must be null or a number from 0 to 1")
    return float(value)


def _check_traffic(entry: Mapping[str, Any], path: Path, where: str) -> None:
    """Check what a round counted; earlier versions counted less."""
    clients = entry.get("client_traffic", {})
    counted = {key: entry.get(key, {}) for key in ("bytes", "parameters", "prototype_parameters")}
    counted |= clients if isinstance(clients, Mapping) else {"client_traffic": clients}
    for key, counts in counted.items():
        if not isinstance(counts, Mapping) or any(type(count) is not int or count < 0 for count in counts.values()):
            name = key if key in entry else f"client_traffic.{key}"
            raise _bad(path, f"{where}: {name} is {counts!r}, must hold whole numbers of at least 0")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    text = _bytes(path)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _bad(path, f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise _bad(path, f"must hold a JSON object, not {type(content).__name__}")
    return content


def read_summary(path: Path) -> dict[str, Any]:
    """Read ``summary.json``; where it is missing, say that the run is incomplete."""
    if not path.exists():
        return {"status": INCOMPLETE, "reason": "summary.json is missing: the run goes on or was killed"}
    summary = read_json(path)
    known = (COMPLETED, COMPLETED_WITH_LOSSES, FAILED)
    if summary.get("status") not in known:
        raise _bad(path, f"status is {summary.get('status')!r}, must be one of {', '.join(known)}")
    for key in ("last_accuracy", "best_accuracy"):
        summary[key] = _accuracy(summary.get(key), path, key)
    return summary


def read_config(path: Path, *, required: bool) -> dict[str, Any]:
    """Read ``config.yaml``; empty where it is missing and not ``required``."""
    if not (required or path.exists()):
        return {}
    content = _bytes(path)
    try:
        config = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError) as error:
        raise _bad(path, f"not YAML: {error}") from error
    if not isinstance(config, dict):
        raise _bad(path, f"must hold a mapping, not {type(config).__name__}")
    return config


def read_experiment(config: Mapping[str, Any], path: Path) -> Experiment | None:
    """Return the ``experiment`` of the ``config`` that came from ``path``; None where there is none."""
    node = config.get("experiment")
    if node is None:
        return None
    try:
        experiment = Experiment(
            name=str(node["name"]),
            source=str(node.get("source") or "?"),
            accuracy={
                str(name): (float(mean), None if std is None else float(std))
                for name, (mean, std) in (node.get("accuracy") or {}).items()
            },
            communication={str(name): float(value) for name, value in (node.get("communication") or {}).items()},
            note=str(node.get("note") or ""),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _bad(path, f"experiment is malformed: {error!r}") from error
    return experiment


def read_rounds(path: Path, *, required: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Read ``rounds.jsonl``: the rounds in order, and a note for each thing that was tolerated."""
    if not (required or path.exists()):
        return [], []
    # Bytes, not text: a line cut within a character must not spoil the lines before it.
    lines = [(number, line) for number, line in enumerate(_bytes(path).split(b"\n"), 1) if line.strip()]
    rounds: dict[int, dict[str, Any]] = {}
    notes = []
    for number, line in lines:
        try:
            entry = json.loads(line.decode())
        except ValueError as error:
            if number != lines[-1][0]:
                raise _bad(path, f"line {number} is not JSON: {error}") from error
            notes.append(f"{path}: line {number}, the last, is truncated and was left out")
            continue
        if not isinstance(entry, dict) or type(entry.get("round")) is not int:
            raise _bad(path, f'line {number} must be a JSON object with a whole number "round"')
        entry["accuracy"] = _accuracy(entry.get("accuracy"), path, f"line {number}: accuracy")
        _check_traffic(entry, path, f"line {number}")
        if entry["round"] in rounds:
            notes.append(f"{path}: round {entry['round']} stands twice, the later line {number} counts")
        rounds[entry["round"]] = entry
    return [rounds[number] for number in sorted(rounds)], notes


def read_clients(path: Path, *, required: bool) -> list[ClientRow]:
    """Read ``clients.csv``, sorted by partition."""
    if not (required or path.exists()):
        return []
    try:
        reader = csv.DictReader(io.StringIO(_bytes(path).decode(), newline=""), strict=True)
        missing = [column for column in _CLIENT_COLUMNS if column not in (reader.fieldnames or [])]
        if missing:
            raise _bad(path, f"lacks the column {', '.join(missing)}")
        rows = [_client_row(line, path, reader.line_num) for line in reader]
    except (csv.Error, UnicodeDecodeError) as error:
        raise _bad(path, f"not a CSV file: {error}") from error
    if len({len(row.class_counts) for row in rows if row.class_counts is not None}) > 1:
        raise _bad(path, "class_counts must have one number a class, the same number of them in every line")
    return sorted(rows, key=lambda row: row.partition)


def _client_row(line: Mapping[str | None, Any], path: Path, number: int) -> ClientRow:
    # The CSV reader fills a short line up with None, and collects what a long one has too much under the key None.
    if None in line or None in line.values():
        raise _bad(path, f"line {number} must have one value for each of the columns")

    def integers(column: str) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in line[column].split())
        except ValueError as error:
            raise _bad(path, f"line {number}: {column} is {line[column]!r}, must be whole numbers") from error

    def integer(column: str) -> int | None:
        values = integers(column)
        if len(values) > 1 or (column == "partition" and not values):
            raise _bad(path, f"line {number}: {column} is {line[column]!r}, must be one whole number")
        return values[0] if values else None

    def accuracy(column: str) -> float | None:
        try:
            value = float(line[column]) if line[column] else None
        except ValueError:
            value = math.nan
        return _accuracy(value, path, f"line {number}: {column}")

    return ClientRow(
        partition=integer("partition") or 0,
        name=line["name"],
        model=line["model"],
        parameters=integer("parameters"),
        device=line["device"],
        train_size=integer("train_size"),
        test_size=integer("test_size"),
        classes=integers("classes"),
        class_counts=integers("class_counts") or None,
        last_accuracy=accuracy("last_accuracy"),
        best_accuracy=accuracy("best_accuracy"),
        best_round=integer("best_round"),
    )


def read_prototypes(path: Path) -> Prototypes | None:
    """Read ``prototypes.npz``; None where it is missing, since some methods have no prototypes."""
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in _PROTOTYPE_ARRAYS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise _bad(path, f"not a prototype file: {error}") from error
    for ids, vectors in (("global_class_ids", "global_vectors"), ("client_class_ids", "client_vectors")):
        if arrays[vectors].ndim != 2 or arrays[ids].shape != arrays[vectors].shape[:1]:
            raise _bad(
                path,
                f"{ids} must be (n,) and {vectors} (n, K), not {arrays[ids].shape}, {arrays[vectors].shape}",
            )
    if arrays["client_partitions"].shape != arrays["client_class_ids"].shape:
        raise _bad(path, "client_partitions and client_class_ids must have the same length")
    wanted = {name: np.float64 if name.endswith("vectors") else np.int64 for name in _PROTOTYPE_ARRAYS}
    return Prototypes(**{name: array.astype(wanted[name]) for name, array in arrays.items()})
