"""Flower's ``ServerApp``: check the configuration first, then run the experiment."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from logging import ERROR, WARNING, getLogger
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from task.config import build, load
from task.folder_lock import RUN, alone_in
from task.paths import require_absolute_paths
from task.privacy import require_accountant
from task.versions import flower_remark

LOG = getLogger("flwr")
PATIENCE = 30.0  # seconds for a killed run's last process to end
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one experiment.

    In a simulation Flower tells an error only after Ray has started and stopped, so it is logged here, at once. The
    experiment is imported after the check: it needs torch, and a typo should not wait for that.
    """
    overrides = str(context.run_config.get("overrides", ""))
    if remark := flower_remark():
        LOG.log(WARNING, remark)
    try:
        config = load(overrides)
        require_absolute_paths(config)
        require_accountant(config.privacy)
        for name, node in config.listeners.items():  # the server needs what they need, and says so before it begins
            build(node, f"listeners.{name}")
        from server_app.experiment import results_folder, run_experiment

        folder = results_folder(config, str(context.run_config.get("output-dir", "")), context.run_id)
        with _alone_in(folder, is_new=config.resume is None):
            run_experiment(config, overrides, grid, context)
    except (KeyboardInterrupt, SystemExit):
        LOG.log(WARNING, "the run was interrupted")
        raise
    except BaseException as error:
        LOG.log(ERROR, "the run failed: %s", str(error) or type(error).__name__)
        raise


@contextmanager
def _alone_in(folder: Path, is_new: bool) -> Iterator[None]:
    """Let no two runs write into one results folder, also where one of them was killed a moment ago."""
    if not is_new and not folder.is_dir():  # the run itself says what is wrong with it
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(alone_in(folder, RUN, PATIENCE))
        except OSError as error:
            raise ValueError(f"output-dir={str(folder)!r} cannot be written: {error}") from error
        yield
