"""Processes of this machine that compute a job with others and save no step: how they are started and how they end."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import LaunchConfig, TrainerConfig
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, ConfigError, print_line, print_text
from mgpu_pipe.import_path import python_module
from mgpu_pipe.launch.signals import SignalInbox
from mgpu_pipe.launch.supervisor import Outcome, supervise
from mgpu_pipe.launch.workers import WorkerPlan
from mgpu_pipe.launch.world import World
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.standard_streams import live_descriptor

SETTINGS = "settings.json"
STOP_TIMEOUT_S = 5.0
"""Short, because there is nothing to save at the end."""


def refuse_other_machines(trainer: TrainerConfig, launch: LaunchConfig) -> None:
    """Refuse several nodes, and a scheduler, where no world was joined.

    Raises:
        ConfigError: the configuration asks for either.
    """
    wanted = {"trainer.num_nodes": (trainer.num_nodes, 1), "launch.type": (launch.type, "local")}
    for key, (value, here) in wanted.items():
        if value != here:
            fix, reason = "start it there, by srun or torchrun", "this command starts processes on this machine only"
            raise ConfigError(key, value, fix, reason)


def supervise_module(
    module: str,
    folder: Path,
    *arguments: str,
    processes: int,
    threads: int | Literal["auto"],
    inbox: SignalInbox,
    live: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Run ``python -m module folder arguments`` as ``processes`` workers of this machine, to their end.

    Args:
        threads: ``launch.threads_per_worker``.
        live: descriptor to which rank 0 also writes its standard error.
        variables: more variables of the workers.
    """
    world = World.on_this_machine(processes)
    plan = WorkerPlan(
        argv=python_module(module, str(folder), *arguments),
        world=world,
        paths=RunPaths(folder),
        environment={**world.thread_environment(threads), **(variables or {})},
        live_fd=live,
    )
    return supervise(plan, inbox, stop_timeout=STOP_TIMEOUT_S)


def run_processes(
    module: str, folder: Path, settings: str, processes: int, threads: int | Literal["auto"], if_stopped: str
) -> int:
    """Run ``python -m module folder`` as ``processes`` workers, to their end; returns the exit code.

    Args:
        folder: holds the frozen configuration.
        settings: text that the processes read from :data:`SETTINGS` in ``folder``.
        threads: ``launch.threads_per_worker``.
        if_stopped: what to print where a signal stopped them.
    """
    replace_file(folder / SETTINGS, settings)
    with live_descriptor() as live, SignalInbox() as inbox:
        outcome = supervise_module(module, folder, processes=processes, threads=threads, inbox=inbox, live=live)
    if outcome.status == "finished":
        return EXIT_OK
    if outcome.failure is not None:
        print_text(outcome.failure.show(), file=sys.stderr)
    else:
        print_line(if_stopped, file=sys.stderr)
    return outcome.exit_code or EXIT_FAILURE


@contextmanager
def temporary_folder(subject: str) -> Iterator[Path]:
    """Folder of a job; a ``TemporaryDirectory`` would be removed by a forked worker, too."""
    folder = Path(tempfile.mkdtemp(prefix=f"mgpu-pipe-{subject}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
