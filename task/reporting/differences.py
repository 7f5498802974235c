"""How far a method is above a baseline: differences paired by seed and setting, with confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from task.comparison import Group
from task.reporting.study import Study

CONFIDENCE = 0.95
NONE = "none"
_USUAL = "local"  # every client alone: what sharing has to beat


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences in points, and its confidence interval, which one pair alone does not have."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Difference | None":
        """Take the mean of ``differences`` and Student's t interval around it; None without any."""
        from scipy.stats import ttest_1samp  # type: ignore[import-untyped, unused-ignore]

        if not differences:
            return None
        mean = fmean(differences)
        if len(differences) == 1:
            return cls(mean, None, None, 1)
        if max(differences) - min(differences) < 1e-12:  # no spread: the interval is one point
            return cls(mean, mean, mean, len(differences))
        interval = ttest_1samp(differences, 0.0).confidence_interval(CONFIDENCE)
        return cls(mean, float(interval.low), float(interval.high), len(differences))

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+.2f} (one pair)"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Baseline:
    """The method that all others are compared with."""

    method: str
    study: Study

    @classmethod
    def chosen(cls, name: str | None, study: Study) -> "Baseline | None":
        """Return the baseline called ``name``; for None it is ``local`` if that is there, and ``none`` means no one.

        Raises
        ------
        ValueError
            One line with the methods that there are.
        """
        if name == NONE or not study.methods:
            return None
        if name is None:
            return cls(_USUAL, study) if _USUAL in study.methods and len(study.methods) > 1 else None
        if name not in study.methods:
            raise ValueError(f"--baseline={name!r} is not allowed: one of {', '.join([*study.methods, NONE])}")
        return cls(name, study)

    def over(self, group: Group, key: str = "last_accuracy") -> "Difference | None":
        """Return how far ``group`` is above the baseline under the same setting, seed by seed."""
        return Difference.of(self._differences(group, key))

    def over_all(self, method: str, key: str = "last_accuracy") -> "Difference | None":
        """Return how far ``method`` is above the baseline over all pairs of one setting and seed."""
        groups = [self.study.group(method, setting) for setting in self.study.settings]
        return Difference.of([value for group in groups if group for value in self._differences(group, key)])

    def _differences(self, group: Group, key: str) -> list[float]:
        method, setting = self.study.place(group)
        other = self.study.group(self.method, setting)
        if method == self.method or other is None:
            return []
        theirs = {run.seed: run.summary.get(key) for run in other.runs}
        pairs = [(run.summary.get(key), theirs.get(run.seed)) for run in group.runs]
        return [100 * (ours - base) for ours, base in pairs if ours is not None and base is not None]
