"""A Ray of one machine that several runs use one after the other. Only a program: the launcher starts it.

Flower starts and stops a Ray in every run unless ``RAY_ADDRESS`` names one. This one ends when it is told to, and when
its standard input ends, which happens when the launcher is gone for whatever reason.
"""

import sys
from pathlib import Path


def main(cores: int, address_file: Path) -> None:
    """Start Ray with this many CPU ``cores``, write its address, and keep it until the standard input ends."""
    import ray

    ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False)
    unfinished = address_file.with_suffix(".new")
    unfinished.write_text(ray.get_runtime_context().gcs_address, encoding="ascii")
    unfinished.replace(address_file)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
