"""``mgpu-pipe eval --harness``: measures lm-eval's tasks by this process, by processes it starts, or as a rank."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_OK
from mgpu_pipe.inference.harness.harness_settings import HarnessSettings
from mgpu_pipe.launch.harness_worker import RESULTS, measure_in, measure_whole
from mgpu_pipe.launch.inference_world import refuse_other_machines, run_processes
from mgpu_pipe.launch.workers import worker_environment
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.threads import choose_threads

WORKER = "mgpu_pipe.launch.harness_worker"


def measure(settings: HarnessSettings, config: RunConfig, device: str) -> tuple[int, dict[str, Any] | None]:
    """Measure the tasks on the configured processes.

    Args:
        config: gives strategy, processes and threads.
        device: as of ``--device``, for a single process.

    Returns:
        The exit code, and lm-eval's results where this process has them: not where it failed or is another rank.
    """
    joined = existing_world(os.environ)
    if joined:
        return EXIT_OK, _measure_joined(settings, config, joined)
    refuse_other_machines(config)
    if world_size(config.trainer, config.strategy) == 1:
        return EXIT_OK, measure_whole(settings, device)
    folder = Path(tempfile.mkdtemp(prefix="mgpu-pipe-harness-"))  # no TemporaryDirectory: a fork would remove it, too
    try:
        code = run_processes(WORKER, folder, settings.to_json(), config, "stopped before the tasks were measured")
        if code != EXIT_OK:
            return code, None
        results: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        return EXIT_OK, results
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure_joined(settings: HarnessSettings, config: RunConfig, joined: dict[str, str]) -> dict[str, Any] | None:
    from mgpu_pipe.launch.distributed import World
    from mgpu_pipe.launch.join import check_world, rendezvous

    os.environ.update(joined)
    world = World.from_environment(os.environ)
    check_world(config, world)
    threads = choose_threads(config.launch.threads_per_worker, world.local_world_size).per_worker
    os.environ.update(worker_environment(threads, one_host=world.local_world_size == world.world_size))
    results = measure_in(world, rendezvous(config.launch), settings, config)
    return results if world.rank == 0 else None
