"""Runs one job through ``flwr run`` to its end: progress while it goes on, and an honest word on how it ended."""

import shlex
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from task.folder_lock import LAUNCHER, FolderInUseError, alone_in
from task.jobs import INTERRUPTED, NOT_STARTED, RUNNING, Job, cpu_cores, create_folder, write_failure
from task.processes import signals_ignored
from task.progress import Progress, last_error
from task.result_files import COMPLETED, COMPLETED_WITH_LOSSES, FAILED, read_summary
from task.superlink import LocalSuperLink, SuperLinkError

EXIT_CODES = {COMPLETED: 0, COMPLETED_WITH_LOSSES: 3, FAILED: 1, INTERRUPTED: 130, NOT_STARTED: 1, RUNNING: 1}
POLL = 0.2  # seconds between two looks at a run


@dataclass(frozen=True)
class Outcome:
    """How a job ended, and why if it did not complete."""

    job: Job
    folder: Path | None
    status: str
    reason: str | None = None


@dataclass(frozen=True)
class Share:
    """What of this machine a job gets: CPU ``cores``, and how many jobs share its GPUs; or a Ray cluster instead."""

    cores: int
    jobs_per_gpu: int = 1
    ray_address: str | None = None


class Engine:
    """The SuperLink and the Ray below which jobs run one after the other: made once, and anew when they must be.

    Parameters
    ----------
    share : Share
        What the jobs get.
    keeps_ray : bool
        Whether one Ray serves all jobs; else Flower starts one in each.
    project : Path, optional
        The frozen copy of the project to run.
    home_parent : Path, optional
        A folder that all machines of a Ray cluster see.
    """

    def __init__(
        self, share: Share, keeps_ray: bool, project: Path | None = None, home_parent: Path | None = None
    ) -> None:
        self.share, self.keeps_ray, self.project, self.home_parent = share, keeps_ray, project, home_parent
        self._link: LocalSuperLink | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, job: Job, here: Path, folder: Path | None = None) -> Outcome:
        """Run one ``job`` to its end.

        Raises
        ------
        SuperLinkError
            Neither SuperLink nor Ray could be started.
        """
        wanted = job.ray_cores(self.share.cores) if self.keeps_ray and self.share.ray_address is None else None
        link = self._link
        if link is None or not link.is_alive or link.ray_cores != wanted:
            self.close()
            try:
                link = LocalSuperLink(self.project, wanted, self.share.ray_address, self.home_parent)
                self._link = link.__enter__()
            except OSError as error:  # no temporary folder, or a full disk
                raise SuperLinkError(f"no place for a local SuperLink: {error}") from error
        outcome = run_one(job, link, here, folder, self.share)
        if outcome.status not in (COMPLETED, COMPLETED_WITH_LOSSES):
            self.close()  # whatever went wrong there must not reach the next job
        return outcome

    def close(self) -> None:
        """End what was started."""
        if self._link is not None:
            self._link.close()
        self._link = None


def run_one(
    job: Job, link: LocalSuperLink, here: Path, folder: Path | None = None, share: Share | None = None
) -> Outcome:
    """Run one ``job`` below ``link`` to its end, showing its progress, in ``folder`` or a new one below ``here``."""
    try:
        folder = folder or create_folder(job, here)
        with alone_in(folder, LAUNCHER):
            return _run_in(folder, job, link, share or Share(cpu_cores()))
    except FolderInUseError as error:
        return Outcome(job, folder, RUNNING, str(error))
    except OSError as error:
        return Outcome(job, None, FAILED, f"no results folder: {error}")


def not_begun(job: Job, folder: Path, error: Exception) -> Outcome:
    """Note in ``folder`` that ``job`` failed before Flower could begin with it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_failure(folder, job, str(error), 0)
    return Outcome(job, folder, FAILED, str(error))


def exit_status(statuses: Sequence[str]) -> int:
    """Return the exit status of a command whose jobs ended so: that of the worst one."""
    by_badness = (INTERRUPTED, FAILED, RUNNING, NOT_STARTED, COMPLETED_WITH_LOSSES, COMPLETED)
    worst = min(statuses, key=by_badness.index)
    return EXIT_CODES[worst]


def _run_in(folder: Path, job: Job, link: LocalSuperLink, share: Share) -> Outcome:
    print(f"results: {folder}", flush=True)
    log, before = folder / "flower.log", _stamp(folder / "summary.json")
    words = "" if link.has_ray else "Ray and "
    progress = Progress(folder, job.config.federation.rounds, f"starting {words}{job.num_clients} simulated clients")
    run_config = {"overrides": shlex.join(job.overrides), "output-dir": str(folder)}
    federation = job.federation_config(None if link.has_ray else share.cores, share.jobs_per_gpu)
    interrupted = False
    try:
        _watch(link.submit(run_config, federation, log), progress)
    except KeyboardInterrupt:
        interrupted = True
        with signals_ignored():
            print("interrupted: stopping the run", flush=True)
            link.stop_run(log)
            link.close()  # now, so that no more rounds are written than the summary will count
            for line in progress.lines():
                print(line, flush=True)
    fresh = _stamp(folder / "summary.json") != before
    return _conclude(job, folder, fresh, interrupted, progress.done)


def _watch(process: subprocess.Popen[bytes], progress: Progress) -> None:
    """Show progress until ``process`` ends."""
    while True:
        ended = process.poll() is not None
        for line in progress.lines():
            print(line, flush=True)
        if ended:
            return
        time.sleep(POLL)


def _conclude(job: Job, folder: Path, fresh: bool, interrupted: bool, rounds_done: int) -> Outcome:
    """Read how the run that has just ended went; ``fresh`` says whether it wrote a summary."""
    log = folder / "flower.log"
    reason = INTERRUPTED if interrupted else last_error(log)
    if "ActorPool is empty" in reason:
        federation = job.config.federation
        asked = f"cpus_per_client={federation.cpus_per_client} and gpus_per_client={federation.gpus_per_client}"
        reason = f"no client fits on this machine with federation.{asked}: lower them"
    try:
        summary = read_summary(folder / "summary.json")
    except ValueError as error:
        summary, reason = {"status": FAILED}, str(error)
    completed = summary["status"] in (COMPLETED, COMPLETED_WITH_LOSSES)
    if interrupted or not (fresh and completed):
        if fresh and not interrupted:
            reason = summary.get("reason") or reason
        # The summary of a completed run stays as it is, also when going on with it failed.
        if not completed:
            with suppress(OSError):  # a full disk may be the very reason
                write_failure(folder, job, reason, rounds_done)
        return Outcome(job, folder, INTERRUPTED if interrupted else FAILED, reason)
    return Outcome(job, folder, summary["status"], summary.get("reason"))


def _stamp(file: Path) -> tuple[int, int] | None:
    """Return what changes when ``file`` is written; None where there is no file."""
    if not file.exists():
        return None
    facts = file.stat()
    return facts.st_mtime_ns, facts.st_ino
