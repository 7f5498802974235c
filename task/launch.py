"""The console script ``protofed``: a run or a sweep through ``flwr run``, with progress and an honest end.

Exit status: 0 completed, 1 failed, 2 refused before the start, 3 completed with losses, 130 interrupted.
"""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from task.command_line import STATUS, Command, read_command
from task.folder_lock import FolderInUseError
from task.jobs import INTERRUPTED, NOT_STARTED, RUNNING, Job, cpu_cores, plan
from task.launch_settings import LaunchConfig
from task.processes import signals_interrupt
from task.result_files import COMPLETED, COMPLETED_WITH_LOSSES, FAILED
from task.running import EXIT_CODES, Engine, Outcome, Share, exit_status, not_begun
from task.superlink import SuperLinkError
from task.sweep import (
    DONE,
    FROZEN,
    STOP,
    Entry,
    Sweep,
    code_digest,
    counted,
    differing,
    entry_table,
    newest_sweep,
    status_table,
    sweep_folder,
)
from task.terminal import show_any_text
from task.versions import flower_remark

REFUSED = 2
BROKEN_PIPE = 141  # what a shell shows for a program that was ended so
MANY = 20  # jobs whose check is worth a word, since it takes seconds
NEWS = 1.0  # seconds between two looks at jobs side by side
ATTEMPTS = 3  # of a launcher whose workers were killed


def main() -> None:
    """Do what the command line asks for, and exit with the status that it deserves."""
    show_any_text()
    try:
        status = _do(sys.argv[1:], _working_folder())
        sys.stdout.flush()
    except ValueError as error:
        print(f"protofed: {error}", file=sys.stderr)
        status = REFUSED
    except KeyboardInterrupt:  # while the command line was read
        status = EXIT_CODES[INTERRUPTED]
    except BrokenPipeError:  # `protofed --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE
    except OSError as error:  # no folder to work in, or a full disk
        print(f"protofed: {error or type(error).__name__}", file=sys.stderr)
        status = EXIT_CODES[FAILED]
    sys.exit(status)


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise ValueError("the folder in which this was typed is gone: type it in another one") from error


def _do(arguments: Sequence[str], here: Path) -> int:
    asked = [word for word in arguments if word.split("=")[0] == STATUS]
    if asked:
        return show_status(asked[0].partition("=")[2] or next((w for w in arguments if w not in asked), ""), here)
    command = read_command(arguments, here)
    if not command.jobs:
        return 0
    if remark := flower_remark():
        print(f"note: {remark}", file=sys.stderr)
    settings = command.settings()
    before = code_digest()
    if len(command.jobs) > MANY:
        print(f"checking {len(command.jobs)} jobs before the first one", flush=True)
    cores = None if settings.ray_address else _cores(settings)
    jobs = [plan(words, here, cores, command.launch_words) for words in command.jobs]
    if command.sweep is None:
        return run_all(jobs[0], here, settings)
    return run_sweep(Sweep(sweep_folder(command, here), jobs), command, settings, before)


def show_status(folder: str, here: Path) -> int:
    """Print how the jobs of a sweep stand, and return the exit status that the sweep would have now."""
    place = here / Path(folder).expanduser() if folder else newest_sweep(here)
    lines, states = status_table(place)
    print("\n".join([f"{place}", *lines]))
    return exit_status(states)


def run_all(job: Job, here: Path, settings: LaunchConfig) -> int:
    """Run one ``job``, report it, and return the exit status."""
    with signals_interrupt():
        try:
            with Engine(_share(settings), keeps_ray=False, home_parent=_shared_home(settings, here)) as engine:
                outcome = engine.run(job, here)
                report(outcome, full=True)
        except KeyboardInterrupt:  # before or after the run
            outcome = Outcome(job, None, INTERRUPTED, INTERRUPTED)
        except SuperLinkError as error:
            print(f"protofed: {error}", file=sys.stderr)
            outcome = Outcome(job, None, NOT_STARTED)
    return exit_status([outcome.status])


def run_sweep(sweep: Sweep, command: Command, settings: LaunchConfig, code: str) -> int:
    """Do what is missing or failed of a ``sweep``, report it, and return the exit status."""
    slots = _slots(command, sweep, settings)
    try:
        with sweep.begun(command, code), signals_interrupt():
            todo = _todo(sweep, code)
            try:
                if command.launcher_words:
                    _side_by_side(sweep, todo, command, settings, slots)
                else:
                    _one_after_another(sweep, todo, settings)
                interrupted = False
            except KeyboardInterrupt:
                interrupted = True
            except SuperLinkError as error:
                print(f"protofed: {error}", file=sys.stderr)
                interrupted = False
            lines, states = entry_table(sweep.entries)
            print("\n" + "\n".join(lines), flush=True)
            told = 0 if interrupted else _report_sweep(sweep, states, settings)
    except FolderInUseError as error:
        raise ValueError(f"{error}; `protofed {STATUS}={sweep.folder}` shows how far it is") from error
    if interrupted:
        return EXIT_CODES[INTERRUPTED]
    # A worker that somebody else killed is a failure of the job, nobody's wish.
    return exit_status([FAILED if status == INTERRUPTED else status for status in states]) or told


def report(outcome: Outcome, full: bool) -> None:
    """Print how a job ended: with its clients when ``full``, in one line otherwise."""
    # Imported here because it takes longer than to complete a word on the command line should.
    from task.results import read_run
    from task.tables import client_table, summary_lines

    if outcome.status in (COMPLETED, COMPLETED_WITH_LOSSES) and outcome.folder is not None:
        run = read_run(outcome.folder)
        lines = [client_table(run), "", *summary_lines(run)] if full else summary_lines(run)[:3]
        print("\n".join(lines), flush=True)
        return
    reason = f": {outcome.reason}" if outcome.reason and outcome.reason != outcome.status else ""
    print(f"{outcome.status}{reason}", file=sys.stderr, flush=True)
    if outcome.folder is not None and outcome.status == FAILED and (outcome.folder / "flower.log").exists():
        print(f"Flower's log: {outcome.folder / 'flower.log'}", file=sys.stderr, flush=True)


def _todo(sweep: Sweep, code: str) -> list[Entry]:
    """Return the jobs that are not done, and say how many are."""
    states = {entry.key: entry.state()[0] for entry in sweep.entries}
    todo = [entry for entry in sweep.entries if states[entry.key] not in (*DONE, RUNNING)]
    print(f"sweep: {sweep.folder}")
    print(f"{len(states)} jobs ({counted(list(states.values()))}), {len(todo)} to do", flush=True)
    if sweep.repeated:
        print(f"{sweep.repeated} more have the same configuration as one of these and are not run twice")
    if others := sweep.other_code(code):
        print(f"note: {others} finished jobs were run by other code than today's; launch.folder=NEW repeats all")
    return todo


def _one_after_another(sweep: Sweep, todo: Sequence[Entry], settings: LaunchConfig) -> None:
    home, broken = _shared_home(settings, sweep.folder), 0
    with Engine(_share(settings), keeps_ray=True, project=sweep.project, home_parent=home) as engine:
        words = differing([entry.job.typed for entry in todo])
        for number, (entry, typed) in enumerate(zip(todo, words, strict=True), 1):
            print(f"job {number}/{len(todo)}: {typed}", flush=True)
            try:
                outcome = engine.run(entry.next_job(), sweep.folder, entry.folder)
                broken = 0
            except SuperLinkError as error:
                outcome, broken = not_begun(entry.job, entry.folder, error), broken + 1
                if broken == ATTEMPTS:  # so is the next one
                    raise
            report(outcome, full=False)
            if outcome.status == INTERRUPTED:
                raise KeyboardInterrupt
            if outcome.status == FAILED and settings.stop_at_first_failure:
                return


def _slots(command: Command, sweep: Sweep, settings: LaunchConfig) -> int | None:
    """Return how many jobs Hydra's launcher does at once here, having checked that they can share this machine."""
    if not command.launcher_words:
        return None
    from task.launchers import gpu_share, side_by_side

    if settings.ray_address is not None:
        allowed = "not with hydra/launcher: Flower takes all of a Ray cluster for one run"
        raise ValueError(f"launch.ray_address={settings.ray_address!r} is not allowed: {allowed}")
    cores = _cores(settings)
    slots = side_by_side(command.launcher_words, len(sweep.entries), cores)
    for entry in sweep.entries if slots else ():
        federation = entry.job.config.federation
        most = gpu_share(0, slots or 1, _gpus())[1]
        if federation.cpus_per_client > max(1, cores // (slots or 1)):
            asked = f"federation.cpus_per_client={federation.cpus_per_client}"
            share = max(1, cores // (slots or 1))
            raise ValueError(f"{asked} is not allowed: at most {share}, as {slots} jobs share {cores} CPU cores")
        if federation.gpus_per_client * most > 1:
            asked = f"federation.gpus_per_client={federation.gpus_per_client}"
            raise ValueError(f"{asked} is not allowed: at most {1 / most:.3g}, as {most} jobs share a GPU")
    return slots


def _side_by_side(
    sweep: Sweep, todo: Sequence[Entry], command: Command, settings: LaunchConfig, slots: int | None
) -> None:
    """Hand the jobs to a Hydra launcher.

    Some launchers end with all their jobs when one worker was killed, for instance for want of memory. Then the jobs
    that are not concluded are handed over again, the last time one by one, so that no job can stop the others.
    """
    from task.launchers import WorkOrder, launch

    order = WorkOrder(str(sweep.folder), stop_at_first_failure=settings.stop_at_first_failure)
    order.cores = settings.cores
    if slots is not None:
        order.slots, order.gpus, order.cores = slots, _gpus(), max(1, _cores(settings) // slots)
    ended = threading.Event()
    watcher = threading.Thread(target=_tell_news, args=(todo, ended), daemon=True)
    watcher.start()
    left = [entry.key for entry in todo]
    try:
        for attempt in range(ATTEMPTS):
            for keys in [left] if attempt < ATTEMPTS - 1 else [[key] for key in left]:
                try:
                    launch(command.launcher_words, keys, order)
                except Exception as error:  # each launcher has errors of its own
                    print(f"the launcher ended: {' '.join(str(error).split())[:300]}", file=sys.stderr, flush=True)
            left = [entry.key for entry in todo if entry.state()[0] in (INTERRUPTED, NOT_STARTED)]
            if not left or (sweep.folder / FROZEN / STOP).exists():
                return
    finally:
        ended.set()
        watcher.join()


def _tell_news(entries: Sequence[Entry], ended: threading.Event) -> None:
    """Print a line whenever one of the jobs side by side begins or ends, until told to end."""
    known = {entry.key: entry.state()[0] for entry in entries}
    words = differing([entry.job.typed for entry in entries])
    while True:
        last = ended.wait(NEWS)
        for number, (entry, typed) in enumerate(zip(entries, words, strict=True), 1):
            status, reason = entry.state()
            if status != known[entry.key]:
                known[entry.key] = status
                why = f": {reason}" if reason and status not in DONE else ""
                print(f"job {number}/{len(entries)} {status}{why}: {typed}", flush=True)
        if last:
            return


def _report_sweep(sweep: Sweep, states: Sequence[str], settings: LaunchConfig) -> int:
    """Make the report of all that is complete in the sweep's folder, and return its exit status."""
    if not settings.report or not any(status in DONE for status in states):
        return 0
    from task import report as reports

    print(flush=True)
    return reports.main([str(sweep.folder)])


def _share(settings: LaunchConfig) -> Share:
    return Share(_cores(settings), ray_address=settings.ray_address)


def _cores(settings: LaunchConfig) -> int:
    return min(settings.cores or cpu_cores(), cpu_cores())


def _shared_home(settings: LaunchConfig, folder: Path) -> Path | None:
    """Return where the code of a run is unpacked: all machines of a cluster must see it, as they see the results."""
    if settings.ray_address is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _gpus() -> list[str]:
    """Return the GPUs that this process may use, by the names that ``CUDA_VISIBLE_DEVICES`` has for them."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]
