"""``mgpu-pipe calibrate``: starts processes that measure this machine, and reads what they measured."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError, MgpuError
from mgpu_pipe.import_path import python_module
from mgpu_pipe.launch.calibrate_worker import MEASURED
from mgpu_pipe.launch.signals import SignalInbox
from mgpu_pipe.launch.supervisor import supervise
from mgpu_pipe.launch.workers import WorkerPlan, worker_environment
from mgpu_pipe.planning.calibration import Measurements
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.threads import choose_threads

WORKER = "mgpu_pipe.launch.calibrate_worker"
STOP_TIMEOUT_S = 5.0


class CalibrationError(MgpuError):
    """A measuring process failed. Exit code 1."""


def measure(config: RunConfig) -> Measurements:
    """Measure this machine by ``trainer.devices`` processes, all at once.

    Raises:
        ConfigError: several nodes.
        CalibrationError: a process failed, or a signal stopped them.
    """
    if config.trainer.num_nodes > 1 or existing_world(os.environ):
        fix = "calibrate on one of them; write network_gb_s, what a node sends, into the profile"
        raise ConfigError("trainer.num_nodes", config.trainer.num_nodes, fix, "one node's processes are measured")
    world = world_size(config)
    folder = Path(tempfile.mkdtemp(prefix="mgpu-pipe-calibrate-"))
    try:
        return _measure_here(config, world, RunPaths(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure_here(config: RunConfig, world: int, paths: RunPaths) -> Measurements:
    freeze(config, paths.config, flush=False)
    plan = WorkerPlan(
        argv=python_module(WORKER, str(paths.root)),
        world_size=world,
        paths=paths,
        environment=worker_environment(choose_threads(config.launch.threads_per_worker, world).per_worker),
    )
    with SignalInbox() as inbox:
        outcome = supervise(plan, inbox, stop_timeout=STOP_TIMEOUT_S)
    if outcome.status != "finished":
        reason = outcome.failure.show() if outcome.failure is not None else outcome.message or "stopped"
        raise CalibrationError(f"calibrate: {reason.removeprefix('error: ')}")
    return Measurements(**json.loads((paths.root / MEASURED).read_text(encoding="utf-8")))
