"""Starts processes that measure this machine: its hardware for ``calibrate``, its links for ``doctor links``."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_FAILURE, BadInputError, ConfigError, MgpuError, print_line, print_text
from mgpu_pipe.import_path import python_module
from mgpu_pipe.launch.measure_worker import HARDWARE, LINKS, RESULT, measure_joined
from mgpu_pipe.launch.signals import SignalInbox
from mgpu_pipe.launch.supervisor import Outcome, supervise
from mgpu_pipe.launch.workers import WorkerPlan, worker_environment
from mgpu_pipe.planning.calibration import Measurements
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.threads import choose_threads
from mgpu_pipe.training.profiling.link_table import Link

WORKER = "mgpu_pipe.launch.measure_worker"
STOP_TIMEOUT_S = 5.0


class MeasurementError(MgpuError):
    """A measuring process failed, or a signal stopped it. Its exit code is the command's."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def measure_hardware(config: RunConfig) -> Measurements:
    """Measure this machine by ``trainer.devices`` processes, all at once.

    Raises:
        ConfigError: several nodes.
        MeasurementError: see there.
    """
    if config.trainer.num_nodes > 1 or existing_world(os.environ):
        fix = "calibrate on one of them; write network_gb_s, what a node sends, into the profile"
        raise ConfigError("trainer.num_nodes", config.trainer.num_nodes, fix, "one node's processes are measured")
    return Measurements(**_measure_here(config, world_size(config.trainer, config.strategy), HARDWARE))


def measure_links(config: RunConfig) -> list[Link]:
    """Measure the links of the configured processes, or of the world that this process joined.

    Returns:
        The links; empty on a joined rank other than 0.

    Raises:
        BadInputError: there is no link, or this command cannot start the processes.
        MeasurementError: see there.
    """
    joined = existing_world(os.environ)
    world = int(joined["WORLD_SIZE"]) if joined else world_size(config.trainer, config.strategy)
    if joined:
        from mgpu_pipe.launch.join import is_node

        if is_node(joined, config):
            raise BadInputError("doctor links: start one task a process: srun --ntasks-per-node=<devices>")
    elif config.trainer.num_nodes > 1:
        fix, reason = "start it on every node, by srun or torchrun", "this command starts processes on one machine only"
        raise ConfigError("trainer.num_nodes", config.trainer.num_nodes, fix, reason)
    if world == 1:
        raise ConfigError("trainer.devices", world, "use at least 2", "one process has no link")
    if joined.get("RANK", "0") == "0":
        count = world * (world - 1) // 2
        print_line(
            f"measuring {count} link{'s' if count > 1 else ''} of {world} processes", file=sys.stderr, flush=True
        )
    records = measure_joined(config, joined, LINKS) if joined else _measure_here(config, world, LINKS)
    return [Link(**record) for record in records or []]


def _measure_here(config: RunConfig, world: int, subject: str) -> Any:
    """JSON that the first of ``world`` new processes measured."""
    folder = Path(tempfile.mkdtemp(prefix=f"mgpu-pipe-{subject}-"))
    try:
        paths = RunPaths(folder)
        freeze(config, paths.config, flush=False)
        plan = WorkerPlan(
            argv=python_module(WORKER, str(folder), subject),
            world_size=world,
            paths=paths,
            environment=worker_environment(choose_threads(config.launch.threads_per_worker, world).per_worker),
        )
        with SignalInbox() as inbox:
            outcome = supervise(plan, inbox, stop_timeout=STOP_TIMEOUT_S)
        if outcome.status != "finished":
            _raise(outcome)
        return json.loads((folder / RESULT).read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _raise(outcome: Outcome) -> NoReturn:
    """Raise why the processes failed; a defect's traceback is printed before."""
    text = outcome.failure.show() if outcome.failure is not None else outcome.message or "stopped"
    *traceback, reason = text.splitlines()
    if traceback:
        print_text("\n".join(traceback), file=sys.stderr)
    raise MeasurementError(reason.removeprefix("error: "), outcome.exit_code or EXIT_FAILURE)
