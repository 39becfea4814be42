"""``mgpu-pipe eval --harness``: measures lm-eval's tasks by this process, by processes it starts, or as a rank.

``python -m mgpu_pipe.launch.harness_job <folder>`` is one of the started processes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_OK
from mgpu_pipe.inference.harness.harness_settings import HarnessSettings, stay_offline
from mgpu_pipe.launch.process_job import (
    SETTINGS,
    ModelShare,
    open_whole,
    opened_share,
    refuse_other_machines,
    run_processes,
    temporary_folder,
)
from mgpu_pipe.launch.worker import join_workers
from mgpu_pipe.launch.world import enter, joined_store
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.process_end import exit_now

RESULTS = "results.json"


def measure(settings: HarnessSettings, config: RunConfig, device: str) -> tuple[int, dict[str, Any] | None]:
    """Measure the tasks on the configured processes.

    Args:
        config: gives strategy, processes and threads.
        device: see ``--device``, for a single process.

    Returns:
        The exit code, and lm-eval's results where this process has them: not where it failed or is another rank.
    """
    launch, joined = config.launch, existing_world(os.environ)
    if joined:
        world = enter(joined, config.trainer, config.strategy, launch.threads_per_worker)
        store = joined_store(launch.collective_timeout)
        with opened_share(world, store, config, settings, launch.collective_timeout) as part:
            results = _measure(settings, part)
        return EXIT_OK, results if world.rank == 0 else None
    refuse_other_machines(config.trainer, launch)
    processes = world_size(config.trainer, config.strategy)
    if processes == 1:
        return EXIT_OK, _measure(settings, open_whole(settings, device))
    with temporary_folder("harness") as folder:
        freeze(config, RunPaths(folder).config)
        stopped = "stopped before the tasks were measured"
        module = "mgpu_pipe.launch.harness_job"
        code = run_processes(module, folder, settings.to_json(), processes, launch.threads_per_worker, stopped)
        return code, json.loads((folder / RESULTS).read_text(encoding="utf-8")) if code == EXIT_OK else None


def main(folder: Path) -> None:
    """Measure as one process; rank 0 writes the results into ``folder``."""
    stay_offline()
    with join_workers(folder, is_live=True) as (config, world, store):
        settings = HarnessSettings.from_json((folder / SETTINGS).read_text(encoding="utf-8"))
        with opened_share(world, store, config, settings, config.launch.collective_timeout) as part:
            results = _measure(settings, part)
        if world.rank == 0:
            replace_file(folder / RESULTS, json.dumps(results, default=str))  # what JSON lacks becomes text


def _measure(settings: HarnessSettings, part: ModelShare) -> dict[str, Any]:
    """Measure this process's share of the requests. A collective call."""
    from mgpu_pipe.inference.harness.model import HarnessModel, measure_tasks

    run, share = part.run, part.share
    model = HarnessModel(run.model, run.tokenizer(), settings.batch_size, share.index, share.shares, part.forward)
    return measure_tasks(settings, model)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_now(0)
