"""``mgpu-pipe doctor links``: processes that measure their links, or this one as a rank of a world that was joined.

Torch-free; the processes compute.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.joined_world import existing_world
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.threads import choose_threads
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, BadInputError, ConfigError
from mgpu_pipe.launch.links_worker import FOUND, measure_joined
from mgpu_pipe.launch.signals import SignalInbox
from mgpu_pipe.launch.supervisor import supervise
from mgpu_pipe.launch.workers import WorkerPlan, worker_environment
from mgpu_pipe.profiling.link_table import Link
from mgpu_pipe.report.links import show

WORKER = ("-m", "mgpu_pipe.launch.links_worker")
STOP_TIMEOUT_S = 5.0


def measure(config: RunConfig) -> int:
    """Measure the links of the configured processes and print them.

    Returns:
        The exit code.

    Raises:
        BadInputError: there is no link, or the processes cannot be started from here.
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
        print(f"measuring {count} link{'s' if count > 1 else ''} of {world} processes", file=sys.stderr, flush=True)
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
        argv=[sys.executable, *WORKER, str(paths.root)],
        world_size=world,
        paths=paths,
        environment=worker_environment(choose_threads(config, world).per_worker),
    )
    with SignalInbox() as inbox:
        outcome = supervise(plan, inbox, stop_timeout=STOP_TIMEOUT_S)
    if outcome.status == "finished":
        told = json.loads((paths.root / FOUND).read_text(encoding="utf-8"))
        show([Link(**link) for link in told], config)
        return EXIT_OK
    said = outcome.failure.show() if outcome.failure is not None else f"error: {outcome.message or 'stopped'}"
    print(said, file=sys.stderr)
    return outcome.exit_code or EXIT_FAILURE
