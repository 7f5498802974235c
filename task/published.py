"""Settings that only say what a run repeats: a published experiment and its numbers."""

from dataclasses import dataclass, field
from typing import Any

from task.requirements import require


@dataclass
class ExperimentConfig:
    """The published experiment that a run repeats, and what its authors report; it changes nothing in the run.

    ``accuracy`` maps algorithms to mean and standard deviation in percent (null where none is printed),
    ``communication`` to millions of parameters a round, all clients together; ``note`` says what the accuracies are.
    """

    name: str
    source: str
    accuracy: dict[str, list[Any]] = field(default_factory=dict)
    communication: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        plain = bool(self.name) and all(c.isalnum() or c in "-_." for c in self.name)
        require(plain, "experiment.name", self.name, "letters, digits, '-', '_' and '.' only")
        for algorithm, value in self.accuracy.items():
            numbers = [number for number in value if type(number) in (int, float) and 0 <= number <= 100]
            good = len(value) == 2 and (len(numbers) == 2 or (len(numbers) == 1 and value[1] is None))
            require(good, f"experiment.accuracy.{algorithm}", value, "[mean, std or null] in percent")
        for algorithm, millions in self.communication.items():
            good = 0 <= millions < float("inf")
            require(good, f"experiment.communication.{algorithm}", millions, "millions of parameters, at least 0")
