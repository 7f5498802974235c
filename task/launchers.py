"""Jobs of a sweep side by side, through Hydra's launchers: joblib on one machine, submitit on Slurm.

A launcher gets one value a job, the key under which the job was frozen, and a tiny configuration of its own instead of
``conf/``: it composes that again in every worker, and an edited YAML must not reach jobs that are under way. Each job
has a SuperLink and a Ray of its own, with its share of the machine, since Flower takes all of a Ray for one run.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout
from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from task.composition import nearest, one_line
from task.jobs import NOT_STARTED, RUNNING, cpu_cores
from task.result_files import FAILED
from task.running import Engine, Share, not_begun
from task.superlink import SuperLinkError
from task.sweep import DONE, FROZEN, STOP, frozen_entry

LOG = "protofed.log"
WAIT = 2.0  # seconds between two looks at a job that another worker does
_QUIET = ("hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.job.name=protofed")


@dataclass
class WorkOrder:
    """What every worker of a launcher is told; ``key`` names its job.

    ``cores`` are those of one job, ``slots`` the number of jobs side by side on this machine, which has these ``gpus``.
    """

    sweep: str = ""
    key: str | None = None
    cores: int | None = None
    slots: int = 1
    gpus: list[str] = field(default_factory=list)
    stop_at_first_failure: bool = False


def side_by_side(words: Sequence[str], jobs: int, cores: int) -> int | None:
    """Return how many ``jobs`` Hydra's launcher of ``words`` does at once on this machine with this many ``cores``.

    None where something else (Slurm) shares out the machines.

    Raises
    ------
    ValueError
        One line for a launcher or a setting of it that does not exist.
    """
    with tempfile.TemporaryDirectory() as folder, _composed(words, Path(folder), WorkOrder()) as (config, _):
        launcher = config.hydra.launcher
        if "n_jobs" not in launcher:
            return None
        wanted = launcher.n_jobs if launcher.n_jobs > 0 else max(1, cores + 1 + launcher.n_jobs)
        return min(int(wanted), jobs)


def launch(words: Sequence[str], keys: Sequence[str], order: WorkOrder) -> None:
    """Do the frozen jobs ``keys`` of a sweep with the Hydra launcher that ``words`` name.

    How each went is in its folder. Raises whatever error the launcher ends with, such as that a worker was killed.
    """
    with _composed(words, Path(order.sweep) / FROZEN / "launcher", order) as (config, context):
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=run_frozen, config=config
        )
        launcher.launch([[f"key='{key}'"] for key in keys], initial_job_idx=0)


def run_frozen(config: DictConfig) -> str:
    """Do one frozen job in a worker of a launcher, and return how it ended."""
    order = WorkOrder(**OmegaConf.to_container(config))  # type: ignore[arg-type]
    folder, frozen = Path(order.sweep), Path(order.sweep) / FROZEN
    if (frozen / STOP).exists() or order.key is None:
        return NOT_STARTED
    entry = frozen_entry(folder, order.key)
    while entry.state()[0] == RUNNING:  # handed over twice, as can happen when a launcher lost sight of it
        time.sleep(WAIT)
    if entry.state()[0] in DONE:
        return entry.state()[0]
    job = entry.next_job()
    entry.folder.mkdir(exist_ok=True)
    with _slot(frozen, order.slots) as slot, (entry.folder / LOG).open("a", encoding="utf-8") as log:
        visible, jobs_per_gpu = gpu_share(slot, order.slots, order.gpus)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        share = Share(min(order.cores or cpu_cores(), cpu_cores()), jobs_per_gpu)
        with contextlib.redirect_stdout(log), Engine(share, False, frozen / "project") as engine:
            try:
                status = engine.run(job, folder, entry.folder).status
            except SuperLinkError as error:
                status = not_begun(job, entry.folder, error).status
    if status == FAILED and order.stop_at_first_failure:
        (frozen / STOP).touch()
    return status


def gpu_share(slot: int, slots: int, gpus: Sequence[str]) -> tuple[str | None, int]:
    """Return which of the ``gpus`` the job in one of the ``slots`` sees (None: all), and how many jobs share each."""
    if not gpus or slots == 1:
        return None, 1
    if len(gpus) >= slots:
        return ",".join(gpus[slot::slots]), 1
    mine = slot % len(gpus)
    return gpus[mine], len(range(mine, slots, len(gpus)))


@contextlib.contextmanager
def _slot(folder: Path, slots: int) -> Iterator[int]:
    """Take the first free of the ``slots``, which ends with this process at the latest."""
    for number in range(slots):
        lock = FileLock(folder / f"slot-{number}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        try:
            yield number
        finally:
            lock.release()
        return
    yield 0  # more workers than were asked for share the first one's


@contextlib.contextmanager
def _composed(words: Sequence[str], tree: Path, order: WorkOrder) -> Iterator[tuple[DictConfig, HydraContext]]:
    """Write ``order`` as a configuration into the folder ``tree``, and compose it with Hydra's launcher."""
    tree.mkdir(parents=True, exist_ok=True)
    (tree / "launcher.yaml").write_text(OmegaConf.to_yaml(asdict(order)), encoding="utf-8")
    quiet = [*_QUIET, f"hydra.sweep.dir='{tree}'", f"hydra.run.dir='{tree}'"]
    with initialize_config_dir(config_dir=str(tree), version_base="1.3"):
        try:
            config = compose("launcher", [*quiet, *words], return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(_message(error, words)) from error
        yield config, HydraContext(GlobalHydra.instance().config_loader(), Callbacks())


def _message(error: Exception, words: Sequence[str]) -> str:
    """Return Hydra's ``error`` in one line, with the settings of the launcher nearest to an unknown one."""
    text = str(error)
    if "Could not override 'hydra.launcher." in text:
        key = text.split("'")[1]
        launcher = compose("launcher", [w for w in words if w.startswith("hydra/")], return_hydra_config=True)
        return f"unknown setting {key!r}{nearest(key, [f'hydra.launcher.{name}' for name in launcher.hydra.launcher])}"
    hint = "; install the launcher: pip install 'protofed[joblib]' or 'protofed[slurm]'"
    return one_line(error, words) + (hint if "hydra/launcher=" in one_line(error, words) else "")
