"""``mgpu-pipe doctor links``: starts processes that measure their links, or measures as a rank of a joined world."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, BadInputError, ConfigError, print_line, print_text
from mgpu_pipe.import_path import python_module
from mgpu_pipe.launch.links_worker import FOUND, measure_joined
from mgpu_pipe.launch.signals import SignalInbox
from mgpu_pipe.launch.supervisor import supervise
from mgpu_pipe.launch.workers import WorkerPlan, worker_environment
from mgpu_pipe.report.measurements import show_links as show
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.threads import choose_threads
from mgpu_pipe.training.profiling.link_table import Link

WORKER = "mgpu_pipe.launch.links_worker"
STOP_TIMEOUT_S = 5.0


def measure(config: RunConfig) -> int:
    """Measure the links of the configured processes and print them.

    Returns:
        The exit code.

    Raises:
        BadInputError: there is no link, or this command cannot start the processes.
    """
    joined = existing_world(os.environ)
    world = int(joined["WORLD_SIZE"]) if joined else world_size(config)
    if joined:
        from mgpu_pipe.launch.join import is_node

        if is_node(joined, config):
            raise BadInputError("doctor links: start one task a process: srun --ntasks-per-node=<devices>")
    elif config.trainer.num_nodes > 1:
        fix, reason = "start it on every node, by srun or torchrun", "this command starts processes on one machine only"
        raise ConfigError("trainer.num_nodes", config.trainer.num_nodes, fix, reason)
    if world == 1:
        raise ConfigError("trainer.devices", world, "use at least 2", "one process has no link")
    count = world * (world - 1) // 2
    if joined.get("RANK", "0") == "0":
        print_line(
            f"measuring {count} link{'s' if count > 1 else ''} of {world} processes", file=sys.stderr, flush=True
        )
    if joined:
        return measure_joined(config, joined)
    folder = Path(tempfile.mkdtemp(prefix="mgpu-pipe-links-"))
    try:
        return _measure_here(config, world, RunPaths(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure_here(config: RunConfig, world: int, paths: RunPaths) -> int:
    freeze(config, paths.config)
    plan = WorkerPlan(
        argv=python_module(WORKER, str(paths.root)),
        world_size=world,
        paths=paths,
        environment=worker_environment(choose_threads(config.launch.threads_per_worker, world).per_worker),
    )
    with SignalInbox() as inbox:
        outcome = supervise(plan, inbox, stop_timeout=STOP_TIMEOUT_S)
    if outcome.status == "finished":
        records = json.loads((paths.root / FOUND).read_text(encoding="utf-8"))
        show([Link(**link) for link in records], config)
        return EXIT_OK
    message = outcome.failure.show() if outcome.failure is not None else f"error: {outcome.message or 'stopped'}"
    print_text(message, file=sys.stderr)
    return outcome.exit_code or EXIT_FAILURE
