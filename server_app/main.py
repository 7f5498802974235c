"""Flower's ``ServerApp``: load the configuration, find out who is there, run the rounds, record."""

import os
import time
from logging import ERROR, INFO, getLogger
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from server_app.checkpoint import load_checkpoint
from server_app.recorder import CHECKPOINT, Recorder
from server_app.roster import discover
from server_app.strategies.base import RoundStrategy, Run
from task.config import build, load
from task.resume import check_unchanged
from task.schema import Config, require_absolute_paths

LOG = getLogger("flwr")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one experiment; an error ends the run as failed, with its reason in the summary."""
    overrides = str(context.run_config.get("overrides", ""))
    config = load(overrides)
    require_absolute_paths(config)
    folder = results_folder(config, str(context.run_config.get("output-dir", "")), context.run_id)
    if config.resume is not None:
        check_unchanged(config, Path(config.resume))
    recorder = Recorder(folder, config, overrides, session=str(context.run_id))
    LOG.log(INFO, "results: %s", folder)
    run: Run | None = None
    try:
        device = _prepare_machine(config)
        run = Run(config, discover(grid, config), recorder, str(context.run_id), device)
        strategy = _start_strategy(run)
        left = config.federation.rounds - run.done
        strategy.start(grid, ArrayRecord(), num_rounds=left, timeout=config.federation.round_timeout)
        strategy.checkpoint()
    except BaseException as error:
        reason = str(error) or type(error).__name__
        LOG.log(ERROR, "the run failed: %s", reason)
        _finish(recorder, "failed", reason, run)
        raise
    lost = any(row["failures"] for row in recorder.rows)
    _finish(recorder, "completed with losses" if lost else "completed", None, run)
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
    name = f"{stamp}-{config.name or config.algorithm.name}-seed{config.seed}-{run_id}"
    return Path.home() / "protofed-results" / name


def _prepare_machine(config: Config) -> torch.device:
    """Set the threads of the server, and return the device of its training."""
    threads = config.federation.server_threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    wanted = config.federation.server_device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("federation.server_device=cuda is not possible: the server has no CUDA device")
    use_cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if use_cuda else "cpu")


def _start_strategy(run: Run) -> RoundStrategy:
    """Return the strategy of the run, at its first round or where the resumed run stood."""
    if run.config.resume is not None:
        run.state, checkpoint = load_checkpoint(run.recorder.folder / CHECKPOINT)
        run.session, run.done = checkpoint.session, checkpoint.round
        run.state_rounds = dict(checkpoint.state_rounds)
        run.client_prototypes = run.recorder.restore(checkpoint.round)
        LOG.log(INFO, "going on after round %d of %d", run.done, run.config.federation.rounds)
    strategy = build(run.config.algorithm.server, "algorithm.server")
    assert isinstance(strategy, RoundStrategy)
    strategy.bind(run)
    return strategy


def _finish(recorder: Recorder, status: str, reason: str | None, run: Run | None) -> None:
    federation = recorder.config.federation
    extra: dict[str, Any] = {
        "accuracy_rule": recorder.config.algorithm.inference,
        "accuracy_model": "each client's own",
        "accuracy_averaging": "test samples" if federation.report_sizes else "clients",
        "session": run.session if run else None,
    }
    roster = run.roster if run else None
    if roster is not None:
        recorder.write_clients(roster)
    recorder.finish(status, reason, roster, extra)
