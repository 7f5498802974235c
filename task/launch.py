"""The console script ``protofed``: a run or a sweep through ``flwr run``, with progress and an honest end.

Exit status: 0 completed, 1 failed, 2 refused before the start, 3 completed with losses, 130 interrupted.
"""

import itertools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from task.comparison import group_runs
from task.config import CONF_DIR, SWEEP, load, without_plus
from task.jobs import Job, absolute, cpu_cores, create_folder, is_source_path, plan, quoted, write_failure
from task.processes import signals_ignored, signals_interrupt
from task.progress import Progress, last_error
from task.result_files import COMPLETED, COMPLETED_WITH_LOSSES, FAILED, read_summary
from task.results import read_run
from task.superlink import LocalSuperLink, SuperLinkError
from task.tables import client_table, markdown_table, summary_lines

INTERRUPTED = "interrupted"
NOT_STARTED = "not started"
EXIT_CODES = {COMPLETED: 0, COMPLETED_WITH_LOSSES: 3, FAILED: 1, INTERRUPTED: 130, NOT_STARTED: 1}
REFUSED = 2
POLL = 0.2  # seconds between two looks at a run
MANY = 20  # jobs whose check is worth a word, since it takes seconds
# Hydra only takes the command line apart here: it makes no folder, no log and no file.
_QUIET_HYDRA = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra.job.chdir=false",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
_MULTIRUN = ("-m", "--multirun")
_SHOWS_ONLY = frozenset(
    ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
)


@dataclass(frozen=True)
class Outcome:
    """How a job ended, and why if it did not complete."""

    job: Job
    folder: Path | None
    status: str
    reason: str | None = None


def main() -> None:
    """Do what the command line asks for, and exit with the status that it deserves."""
    here = Path.cwd()
    try:
        commands = [[absolute_word(word, here) for word in words] for words in expand(sys.argv[1:])]
        if len(commands) > MANY:
            print(f"checking {len(commands)} jobs before the first one", flush=True)
        jobs = [plan(words, here, cpu_cores()) for words in commands]
    except ValueError as error:
        print(f"protofed: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    sys.exit(run_all(jobs, here) if jobs else 0)


def expand(arguments: Sequence[str]) -> list[list[str]]:
    """Let Hydra read the command line; return the overrides of each job, none if it only showed things.

    Raises
    ------
    ValueError
        One line for what Hydra does not accept.
    """
    jobs: list[list[str]] = []
    arguments = [_home_in_quotes(word) for word in without_plus(arguments)]
    words = [word for word in arguments if word not in _MULTIRUN]
    shows_only = any(word.split("=")[0] in _SHOWS_ONLY for word in words)
    asks_for_many = words != arguments or any(word.startswith(SWEEP) for word in words)

    def collect(_: DictConfig) -> None:
        jobs.append(list(HydraConfig.get().overrides.task))

    try:
        if asks_for_many and not shows_only:
            return _combinations(words)
        with _as_command_line([*arguments, *([] if shows_only else _QUIET_HYDRA)]):
            hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")(collect)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_better_message(error, words)) from error
    return jobs


def _combinations(words: Sequence[str]) -> list[list[str]]:
    """Return every combination of the values in ``words``, which win over those of a file of ``conf/sweep/``.

    As Hydra's own sweeper does it, but that composes every job twice, which takes a minute for a hundred.
    """
    files = [word for word in words if word.startswith(SWEEP)]
    with initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
        params = compose("config", files, return_hydra_config=True).hydra.sweeper.params or {}
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        rest = [word for word in words if word not in files]
        choices: dict[str, list[str]] = {}
        for each in parser.parse_overrides([*(f"{key}={value}" for key, value in params.items()), *rest]):
            key = each.get_key_element()
            many = each.is_sweep_override()
            values = each.sweep_string_iterator() if many else [each.get_value_element_as_str()]
            choices[key] = [f"{key}={value}" for value in values]
    return [list(job) for job in itertools.product(*choices.values())]


def run_all(jobs: Sequence[Job], here: Path) -> int:
    """Run ``jobs`` one after the other below one SuperLink, report them, and return the exit status."""
    outcomes: list[Outcome] = []
    with signals_interrupt():
        try:
            with LocalSuperLink() as link:
                for number, job in enumerate(jobs, 1):
                    if len(jobs) > 1:
                        print(f"job {number}/{len(jobs)}: {' '.join(job.typed)}", flush=True)
                    outcomes.append(run_one(job, link, here))
                    _report(outcomes[-1], full=len(jobs) == 1)
                    if outcomes[-1].status == INTERRUPTED:
                        break
        except KeyboardInterrupt:  # before or after a job
            outcomes += [Outcome(job, None, INTERRUPTED, INTERRUPTED) for job in jobs[len(outcomes) :][:1]]
        except SuperLinkError as error:
            print(f"protofed: {error}", file=sys.stderr)
    outcomes += [Outcome(job, None, NOT_STARTED) for job in jobs[len(outcomes) :]]
    if len(jobs) > 1:
        _report_sweep(outcomes)
    return exit_status([outcome.status for outcome in outcomes])


def run_one(job: Job, link: LocalSuperLink, here: Path) -> Outcome:
    """Run one ``job`` to its end, showing its progress."""
    try:
        folder = create_folder(job, here)
    except OSError as error:
        return Outcome(job, None, FAILED, f"no results folder: {error}")
    print(f"results: {folder}", flush=True)
    log, before = folder / "flower.log", _stamp(folder / "summary.json")
    waiting_for = f"starting Ray and {job.num_clients} simulated clients"
    progress = Progress(folder, job.config.federation.rounds, waiting_for)
    run_config = {"overrides": shlex.join(job.overrides), "output-dir": str(folder)}
    interrupted = False
    try:
        _watch(link.submit(run_config, job.federation_config(cpu_cores()), log), progress)
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


def exit_status(statuses: Sequence[str]) -> int:
    """Return the exit status of a command whose jobs ended so: that of the worst one."""
    by_badness = (INTERRUPTED, FAILED, NOT_STARTED, COMPLETED_WITH_LOSSES, COMPLETED)
    worst = min(statuses, key=by_badness.index)
    return EXIT_CODES[worst]


def absolute_word(word: str, here: Path) -> str:
    """Return the override ``word``, a path of a data source made absolute as seen from ``here``."""
    parsed = OverridesParser.create().parse_override(word)
    value = parsed.value()
    if not is_source_path(parsed.key_or_group) or not isinstance(value, str) or not value:
        return word
    return f"{word.partition('=')[0]}={quoted(str(absolute(value, here)))}"


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


def _report(outcome: Outcome, full: bool) -> None:
    """Print how a job ended: with its clients when ``full``, in one line otherwise."""
    if outcome.status in (COMPLETED, COMPLETED_WITH_LOSSES) and outcome.folder is not None:
        run = read_run(outcome.folder)
        lines = [client_table(run), "", *summary_lines(run)] if full else summary_lines(run)[:3]
        print("\n".join(lines), flush=True)
        return
    reason = f": {outcome.reason}" if outcome.reason and outcome.reason != outcome.status else ""
    print(f"{outcome.status}{reason}", file=sys.stderr, flush=True)
    if outcome.folder is not None and outcome.status == FAILED:
        print(f"Flower's log: {outcome.folder / 'flower.log'}", file=sys.stderr, flush=True)


def _report_sweep(outcomes: Sequence[Outcome]) -> None:
    """Print one line a job, and the table of means over seeds of those that completed."""
    print()
    width = max(len(outcome.status) for outcome in outcomes)
    for number, outcome in enumerate(outcomes, 1):
        place = outcome.folder or outcome.reason or ""
        print(f"{number:3}  {outcome.status:<{width}}  {' '.join(outcome.job.typed)}  {place}")
    runs = [read_run(outcome.folder) for outcome in outcomes if outcome.folder is not None]
    complete = [run for run in runs if run.is_complete]
    if complete:
        print("\n" + markdown_table(group_runs(complete)[0]))


def _home_in_quotes(word: str) -> str:
    """Return ``word``; a value such as ``~/data``, which Hydra's grammar does not know, in quotes."""
    key, _, value = word.partition("=")
    return f"{key}={quoted(value)}" if value.startswith("~") and "," not in value else word


def _better_message(error: Exception, arguments: Sequence[str]) -> str:
    """Return the message of Hydra's ``error`` in one line, with the nearest known settings where we can."""
    text = " ".join(str(error).split()).split(" Config search path")[0]
    if "Ambiguous value" in text:
        return text
    try:
        load([word for word in arguments if not word.startswith(("-", SWEEP))])
    except ValueError as ours:
        return str(ours)
    return text


def _stamp(file: Path) -> tuple[int, int] | None:
    """Return what changes when ``file`` is written; None where there is no file."""
    if not file.exists():
        return None
    facts = file.stat()
    return facts.st_mtime_ns, facts.st_ino


@contextmanager
def _as_command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Let Hydra see ``arguments`` as those of the program, and raise its errors instead of printing them."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [sys.argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
