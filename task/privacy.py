"""What noise on uploaded prototypes promises: the settings, and the epsilon that ``dp-accounting`` computes from them.

Every upload of a client is one Gaussian mechanism. Its input is the ``(C, K)`` matrix of the client's prototypes, each
row clipped to norm S (``clip``), a zero row where the client has no sample of a class. Two data sets of a client,
however different, and whatever model was trained on them in whatever way, change each row by at most 2 S and the matrix
by at most ``2 S sqrt(C)`` (Frobenius norm): the sensitivity. Noise of ``noise_multiplier`` times that hides which of
the two it was. This is differential privacy of all data of one client towards whoever reads its uploads, the server
included, often called local; it covers each single image, too. A smaller sensitivity, such as ``S / n_c`` for one of
the n_c images behind a class mean, would need features that do not depend on that image, but it has trained the model.

The k uploads of a client, each of which may depend on all that was sent before, are together one Gaussian mechanism
with ``1 / sqrt(k)`` of the noise.

References
----------
Balle, Wang: "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, theorem 8 (epsilon, exactly).
Dong, Roth, Su: "Gaussian Differential Privacy", JRSS B 2022, corollary 3.3 (composition, exactly).
"""

import importlib.util
import math
from dataclasses import dataclass
from functools import lru_cache

from task.requirements import require

MOST_DEVIATIONS = 10.0
"""A Gaussian vector is longer than expected by this many standard deviations with a probability below 1e-21."""


@dataclass
class PrivacyConfig:
    """Clipping of and Gaussian noise on the prototypes that clients upload; the mathematics is in ``task/privacy.py``.

    ``clip`` is the largest norm of a prototype before the noise. ``noise_multiplier`` is the standard deviation of the
    noise in units of the sensitivity, ``delta`` the chance with which epsilon may not hold: far below 1 / (number of
    people whose data a client holds). With ``hide_classes`` a client sends a vector for every class, noise alone where
    it has no sample; without, only those of its classes, with less noise, and which classes it has is not protected.
    ``report_accuracy`` lets clients report accuracies and losses on their own test images, which are not protected.
    ``noise_seed`` makes the noise repeatable, in simulations and tests: whoever knows it can take the noise away.
    """

    name: str
    clip: float
    noise_multiplier: float
    delta: float
    hide_classes: bool = True
    report_accuracy: bool = False
    noise_seed: int | None = None

    def __post_init__(self) -> None:
        for key in ("clip", "noise_multiplier"):
            value = getattr(self, key)
            require(0 < value < float("inf"), f"privacy.{key}", value, "a finite number above 0")
        require(0 < self.delta < 1, "privacy.delta", self.delta, "above 0, below 1")
        seed = self.noise_seed
        require(seed is None or seed >= 0, "privacy.noise_seed", seed, "null, or at least 0")

    def noise_std(self, num_sent: int) -> float:
        """Return the standard deviation of the noise on each number of an upload of ``num_sent`` prototypes."""
        return self.noise_multiplier * 2 * self.clip * math.sqrt(num_sent)

    def largest_norm(self, num_classes: int, width: int) -> float:
        """Return a norm that a noised prototype of this width exceeds only with a negligible probability."""
        return self.clip + self.noise_std(num_classes) * (math.sqrt(width) + MOST_DEVIATIONS)

    def not_covered(self, report_sizes: bool) -> list[str]:
        """Return in words what clients send, or others know, that epsilon does not speak of."""
        exceptions = {
            "which classes a client holds (privacy.hide_classes=false)": not self.hide_classes,
            "accuracies and losses on test images (privacy.report_accuracy=true)": self.report_accuracy,
            "how many samples a client holds (federation.report_sizes=true)": report_sizes,
            "anything, towards those who know the noise (privacy.noise_seed)": self.noise_seed is not None,
        }
        return [words for words, holds in exceptions.items() if holds]


def require_accountant(privacy: PrivacyConfig | None) -> None:
    """Refuse private runs where epsilon cannot be computed, with a ``ValueError`` of one line."""
    found = privacy is None or importlib.util.find_spec("dp_accounting") is not None
    missing = "none, as the package dp-accounting is not installed here (pip install 'protofed[privacy]')"
    require(found, "privacy", privacy.name if privacy else None, missing)


@lru_cache(maxsize=4096)
def epsilon(noise_multiplier: float, uploads: int, delta: float) -> float:
    """Return the epsilon that a client has spent after this many ``uploads``; 0 before the first."""
    from dp_accounting import get_epsilon_gaussian  # only here: its import takes a second, and clients do without it

    return float(get_epsilon_gaussian(noise_multiplier / math.sqrt(uploads), delta)) if uploads else 0.0
