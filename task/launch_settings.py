"""Settings of the command ``protofed`` itself: ``launch`` in ``conf/``. None of them reaches a run or its results."""

from dataclasses import dataclass, field

from task.schema import require


@dataclass
class LaunchConfig:
    """How one command does its jobs.

    ``clients`` are simulated where ``federation.num_clients`` is null. ``jobs`` are command lines of a sweep, each
    of which is multiplied by all other values. ``folder`` is the sweep's own (null: named by the command). With
    ``stop_at_first_failure`` the jobs after a failed one are not started. ``report`` makes the report of a sweep at its
    end. ``cores`` is the share of this machine (null: all that the process may use). ``ray_address`` joins
    a Ray cluster instead of starting Ray here.
    """

    clients: int = 8
    jobs: list[str] = field(default_factory=list)
    folder: str | None = None
    stop_at_first_failure: bool = False
    report: bool = True
    cores: int | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        require(self.clients >= 1, "launch.clients", self.clients, "at least 1")
        require(self.cores is None or self.cores >= 1, "launch.cores", self.cores, "null, or at least 1")
        require(self.folder != "", "launch.folder", self.folder, "a folder, or null")
        require(self.ray_address != "", "launch.ray_address", self.ray_address, "HOST:PORT, or null")
