"""Flower's ``ServerApp``: check the configuration first, then run the experiment."""

from logging import ERROR, WARNING, getLogger

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from task.config import load
from task.paths import require_absolute_paths
from task.privacy import require_accountant

LOG = getLogger("flwr")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one experiment.

    In a simulation Flower tells an error only after Ray has started and stopped, so it is logged here, at once. The
    experiment is imported after the check: it needs torch, and a typo should not wait for that.
    """
    overrides = str(context.run_config.get("overrides", ""))
    try:
        config = load(overrides)
        require_absolute_paths(config)
        require_accountant(config.privacy)
        from server_app.experiment import run_experiment

        run_experiment(config, overrides, grid, context)
    except (KeyboardInterrupt, SystemExit):
        LOG.log(WARNING, "the run was interrupted")
        raise
    except BaseException as error:
        LOG.log(ERROR, "the run failed: %s", str(error) or type(error).__name__)
        raise
