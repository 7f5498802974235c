"""One experiment from the first question to the nodes to the summary: roster, strategy, records, resume."""

import time
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid

from server_app.checkpoint import Checkpoint, load_checkpoint
from server_app.demands import require_labelled
from server_app.privacy import PrivacyLedger
from server_app.recorder import CHECKPOINT, PRIVACY, Recorder
from server_app.roster import discover
from server_app.strategies.base import RoundStrategy, Run, State
from task.config import build
from task.resume import check_unchanged
from task.schema import Config, require
from task.stopping import StoppedEarly, reason_to_stop

LOG = getLogger("flwr")
INTERRUPTED = "interrupted"


def run_experiment(config: Config, overrides: str, grid: Grid, context: Context) -> None:
    """Run one experiment to its end and record it; an error ends it as failed, its reason in the summary.

    Parameters
    ----------
    config : Config
        The checked configuration.
    overrides : str
        The Hydra overrides that gave it.
    grid, context : Grid, Context
        Flower's connection to the nodes, and the facts of the run.
    """
    folder = results_folder(config, str(context.run_config.get("output-dir", "")), context.run_id)
    session, state = f"{context.run_id:020d}", State()  # of one length: it counts in the bytes sent
    before: Checkpoint | None = None
    if config.resume is not None:
        state, before = _resumed(config, folder)
        session = before.session
    recorder = Recorder(folder, config, overrides, session, before.round if before else 0)
    LOG.log(INFO, "results: %s", folder)
    run: Run | None = None
    strategy: RoundStrategy | None = None
    try:
        device = _prepare_machine(config)
        roster = discover(grid, config, before.names if before else None)
        run = Run(config, roster, recorder, session, device, state=state)
        require_labelled(config, run.roster)
        run.privacy = _ledger(run, resumed=before is not None)
        _warn_of_empty_clients(run)
        if before is not None:
            clients = f"{before.num_clients}, as before: the data would be divided anew"
            require(run.roster.size == before.num_clients, "federation.num_clients", run.roster.size, clients)
            run.done, run.state_rounds = before.round, dict(before.state_rounds)
            run.client_prototypes = recorder.read_client_prototypes()
        built = build(config.algorithm.server, "algorithm.server")
        assert isinstance(built, RoundStrategy)
        built.bind(run)
        strategy = built
        stopped = _run_rounds(strategy, run, grid)
        strategy.checkpoint()
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, or ``flwr stop``
        _finish(recorder, "failed", INTERRUPTED, None, run, strategy)
        raise
    except BaseException as error:
        _finish(recorder, "failed", str(error) or type(error).__name__, None, run, strategy)
        raise
    lost = any(row["failures"] or row.get("absent") for row in recorder.rows)
    _finish(recorder, "completed with losses" if lost else "completed", None, stopped, run, strategy)
    LOG.log(INFO, "results: %s", folder)


def results_folder(config: Config, output_dir: str, run_id: int) -> Path:
    """Return the folder of a run's results.

    Raises
    ------
    ValueError
        ``output-dir`` is relative: the ServerApp does not run where the command was typed.
    """
    if config.resume is not None:
        return Path(config.resume).expanduser()
    if output_dir:
        folder = Path(output_dir).expanduser()
        if not folder.is_absolute():
            raise ValueError(f"output-dir={output_dir!r} is not allowed: an absolute path")
        return folder
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    name = f"{stamp}-{config.label}-seed{config.seed}-{run_id}"
    return Path.home() / "protofed-results" / name


def _prepare_machine(config: Config) -> torch.device:
    """Set the threads of the server, and return the device of its training."""
    torch.set_num_threads(config.federation.server_threads)
    wanted = config.federation.server_device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("federation.server_device=cuda is not possible: the server has no CUDA device")
    use_cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if use_cuda else "cpu")


def _resumed(config: Config, folder: Path) -> tuple[State, Checkpoint]:
    """Return what the run in ``folder`` goes on from; nothing is written before all of it has been checked."""
    check_unchanged(config, folder)
    state, checkpoint = load_checkpoint(folder / CHECKPOINT)
    done = f"at least {checkpoint.round}, the rounds already done"
    require(config.federation.rounds >= checkpoint.round, "federation.rounds", config.federation.rounds, done)
    LOG.log(INFO, "going on after round %d of %d", checkpoint.round, config.federation.rounds)
    return state, checkpoint


def _ledger(run: Run, *, resumed: bool) -> PrivacyLedger | None:
    """Return the ledger of what clients spend, where the run has any privacy, and say what that does not cover."""
    privacy, report_sizes = run.config.privacy, run.config.federation.report_sizes
    if privacy is None:
        return None
    path = run.recorder.folder / PRIVACY
    ledger = PrivacyLedger(path, privacy, run.roster, report_sizes=report_sizes, resumed=resumed)
    for words in ledger.not_covered:
        LOG.log(WARNING, "epsilon does not cover %s", words)
    return ledger


def _warn_of_empty_clients(run: Run) -> None:
    empty = sum(report.train_size == 0 for report in run.roster.reports.values())
    if empty:
        LOG.log(WARNING, "%d of %d clients have no training images and only take part in name", empty, len(run.roster))


def _run_rounds(strategy: RoundStrategy, run: Run, grid: Grid) -> str | None:
    """Run the rounds that are left; return why the run ended before the last one, None if it did not."""
    federation = run.config.federation
    left = federation.rounds - run.done
    # A run that goes on after an early end would else need another round to see it.
    stopped = reason_to_stop(run.recorder.rows, federation.stop_after) if left else None
    if stopped is None:
        try:
            strategy.start(grid, ArrayRecord(), num_rounds=left, timeout=federation.round_timeout)
        except StoppedEarly as early:
            stopped = str(early)
    if stopped:
        LOG.log(INFO, "%s", stopped)
    return stopped


def _finish(
    recorder: Recorder,
    status: str,
    reason: str | None,
    stopped: str | None,
    run: Run | None,
    strategy: RoundStrategy | None,
) -> None:
    federation = recorder.config.federation
    extra: dict[str, Any] = {
        "stopped_early": stopped,
        "experiment": recorder.config.experiment.name if recorder.config.experiment else None,
        "accuracy_rule": recorder.config.algorithm.inference,
        "accuracy_model": "each client's own",
        "accuracy_averaging": "test samples" if federation.report_sizes else "clients",
        "session": run.session if run else None,
        "clients_without_training": sum(r.train_size == 0 for r in run.roster.reports.values()) if run else None,
    }
    extra |= strategy.facts() if strategy else {}
    extra |= {"privacy": run.privacy.summary()} if run and run.privacy else {}
    roster = run.roster if run else None
    if roster is not None:
        recorder.write_clients(roster)
    recorder.finish(status, reason, roster, extra)
