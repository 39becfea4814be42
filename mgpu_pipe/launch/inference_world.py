"""Processes of this machine that answer or measure with a run's model: starts them and shows how they ended."""

from __future__ import annotations

import sys
from pathlib import Path

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, ConfigError, print_line, print_text
from mgpu_pipe.import_path import python_module
from mgpu_pipe.launch.signals import SignalInbox
from mgpu_pipe.launch.supervisor import supervise
from mgpu_pipe.launch.workers import WorkerPlan, worker_environment
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.standard_streams import live_descriptor
from mgpu_pipe.system.threads import choose_threads

SETTINGS = "settings.json"
STOP_TIMEOUT_S = 5.0
"""Short, because there is nothing to save at the end."""


def refuse_other_machines(config: RunConfig) -> None:
    """Refuse several nodes, and a scheduler, where no world was joined.

    Raises:
        ConfigError: ``config`` asks for either.
    """
    wanted = {"trainer.num_nodes": (config.trainer.num_nodes, 1), "launch.type": (config.launch.type, "local")}
    for key, (value, here) in wanted.items():
        if value != here:
            fix, reason = "start it there, by srun or torchrun", "this command starts processes on this machine only"
            raise ConfigError(key, value, fix, reason)


def run_processes(module: str, folder: Path, settings: str, config: RunConfig, if_stopped: str) -> int:
    """Run ``python -m module folder`` as all processes of ``config``, to their end; returns the exit code.

    Args:
        settings: text that the processes read from :data:`SETTINGS` in ``folder``.
        if_stopped: what to print where a signal stopped them.
    """
    paths, processes = RunPaths(folder), world_size(config.trainer, config.strategy)
    freeze(config, paths.config)
    replace_file(folder / SETTINGS, settings)
    with live_descriptor() as live, SignalInbox() as inbox:
        plan = WorkerPlan(
            argv=python_module(module, str(folder)),
            world_size=processes,
            paths=paths,
            environment=worker_environment(choose_threads(config.launch.threads_per_worker, processes).per_worker),
            live_fd=live,
        )
        outcome = supervise(plan, inbox, stop_timeout=STOP_TIMEOUT_S)
    if outcome.status == "finished":
        return EXIT_OK
    if outcome.failure is not None:
        print_text(outcome.failure.show(), file=sys.stderr)
    else:
        print_line(if_stopped, file=sys.stderr)
    return outcome.exit_code or EXIT_FAILURE
