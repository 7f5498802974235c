"""What each algorithm of ``conf/`` needs beyond the defaults to run, read from its own settings."""

from functools import cache

from task.composition import CONF_DIR, _compose
from task.config import _find_target

ALGORITHMS = sorted(path.stem for path in (CONF_DIR / "algorithm").glob("*.yaml"))


@cache
def fitting(algorithm: str) -> str:
    """Return the overrides with which ``algorithm`` runs on small images, its own name first."""
    settings = _compose([f"algorithm={algorithm}"]).algorithm
    strategy = _find_target(settings.server._target_, "algorithm.server")
    words = [f"algorithm={algorithm}"]
    if getattr(strategy, "has_global_model"):  # noqa: B009 - a callable, for mypy
        words.append("model=cnn_small")
    if settings.get("evaluation") == "server":
        words.append("partition=iid_train")
    if settings.get("unlabelled", "refused") != "refused":
        words.append("labels=few")
    return " ".join(words)
