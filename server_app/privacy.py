"""How much privacy each client has spent: a ledger of its uploads, on disk before the server asks for the next."""

import json
import math
import os
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from task.privacy import PrivacyConfig, epsilon

UNIT = "all data of one client"


class PrivacyLedger:
    """Counts the uploads that each client was asked for, and so may have sent, and returns their epsilon.

    A reply that is lost, late or refused has left its client all the same, and so has one of a round that is done again
    after a crash; the file therefore never goes back with a checkpoint.

    Parameters
    ----------
    path : Path
        The ledger's file, read when the run is ``resumed``.
    privacy : PrivacyConfig
        Noise and delta.
    clients : iterable of int
        All partitions of the run.
    report_sizes : bool
        Whether clients report how many samples they hold.

    Raises
    ------
    ValueError
        The ledger of a resumed run is missing or damaged: what was spent is not known.
    """

    def __init__(
        self, path: Path, privacy: PrivacyConfig, clients: Iterable[int], *, report_sizes: bool, resumed: bool
    ) -> None:
        self.path, self.privacy = path, privacy
        self.not_covered = privacy.not_covered(report_sizes)
        self.uploads = dict.fromkeys(clients, 0)
        if resumed:
            self.uploads |= self._read()

    def charge(self, partitions: Iterable[int]) -> None:
        """Count one more upload of each of the ``partitions``, before they are asked for it."""
        for partition in partitions:
            self.uploads[partition] += 1
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self._by_client(self.uploads)) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)

    def fields(self) -> dict[str, Any]:
        """Return what a round's line says: the epsilon of each client so far."""
        return {"epsilon": self._by_client(self._epsilons()), "delta": self.privacy.delta}

    def summary(self) -> dict[str, Any]:
        """Return what the summary says of the run."""
        spent = self._epsilons()
        return {
            "epsilon": max(spent.values(), default=0.0),
            "delta": self.privacy.delta,
            "unit": UNIT,
            "not_covered": self.not_covered,
            "clip": self.privacy.clip,
            "noise_multiplier": self.privacy.noise_multiplier,
            "accountant": f"dp-accounting {version('dp-accounting')}",
            "uploads_by_client": self._by_client(self.uploads),
            "epsilon_by_client": self._by_client(spent),
        }

    def _epsilons(self) -> dict[int, float]:
        noise, delta = self.privacy.noise_multiplier, self.privacy.delta
        spent = {partition: epsilon(noise, uploads, delta) for partition, uploads in self.uploads.items()}
        return {partition: math.ceil(each * 1e6) / 1e6 for partition, each in spent.items()}  # never rounded down

    def _by_client(self, values: dict[int, Any]) -> dict[str, Any]:
        return {str(partition): value for partition, value in sorted(values.items())}

    def _read(self) -> dict[int, int]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            uploads = {int(partition): int(count) for partition, count in found.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} cannot be read, so the epsilon spent is not known: {error}") from error
        if set(uploads) != set(self.uploads) or min(uploads.values(), default=0) < 0:
            raise ValueError(f"{self.path} is damaged: one number of uploads for each of {len(self.uploads)} clients")
        return uploads
