"""The releases of Flower that the project is tested with, and a word where another one is installed."""

from importlib.metadata import version

TESTED_FLOWER = ("1.39", "1.42")
"""The one that is installed with the project, and that of ``make test-flower-next``."""


def flower_remark(installed: str | None = None) -> str | None:
    """Return one line where the Flower here is none of the tested releases; ``installed`` is for tests."""
    installed = installed or version("flwr")
    if ".".join(installed.split(".")[:2]) in TESTED_FLOWER:
        return None
    return (
        f"Flower {installed} is installed; ProtoFed is tested with {' and '.join(TESTED_FLOWER)}: "
        'pip install "flwr[simulation]>=1.39,<1.40", the same on the SuperLink and on every SuperNode'
    )
