"""``mgpu-pipe eval --harness``: measures lm-eval's tasks by this process, by processes it starts, or as a rank.

``python -m mgpu_pipe.launch.harness_job <folder>`` is one of the started processes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import device_type, world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_OK, BadInputError
from mgpu_pipe.inference.harness.harness_settings import HarnessSettings, stay_offline
from mgpu_pipe.launch.process_job import SETTINGS, refuse_other_machines, run_processes, temporary_folder
from mgpu_pipe.launch.worker import join_workers, limit_torch_threads
from mgpu_pipe.launch.world import enter, joined_store
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.process_end import exit_now

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from mgpu_pipe.launch.world import World

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
        results = _measure_in(world, joined_store(launch.collective_timeout), settings, config)
        return EXIT_OK, results if world.rank == 0 else None
    refuse_other_machines(config.trainer, launch)
    processes = world_size(config.trainer, config.strategy)
    if processes == 1:
        return EXIT_OK, _measure_whole(settings, device)
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
        results = _measure_in(world, store, settings, config)
        if world.rank == 0:
            replace_file(folder / RESULTS, results_text(results))


def results_text(results: dict[str, Any]) -> str:
    """The results as JSON; what JSON does not know is written as text."""
    return json.dumps(results, default=str)


def _measure_in(world: World, store: Store, settings: HarnessSettings, config: RunConfig) -> dict[str, Any]:
    """Measure as a rank of ``world``. A collective call."""
    from mgpu_pipe.inference.find_model import find_model
    from mgpu_pipe.inference.generation import load_tokenizer
    from mgpu_pipe.inference.harness.model import HarnessModel, measure_tasks
    from mgpu_pipe.inference.model_arguments import silence_transformers
    from mgpu_pipe.inference.parallel_run import evaluation_config, open_parallel
    from mgpu_pipe.launch.process_group import process_group
    from mgpu_pipe.topology import ParallelDims

    limit_torch_threads()
    with process_group(world, store, device_type(config.trainer), config.launch.collective_timeout) as device:
        silence_transformers()
        if not ParallelDims.resolve(config.strategy, world.world_size).cuts_the_model:
            return _measure_whole(settings, device, world.rank, world.world_size)
        source = find_model(settings.model)
        parallel = open_parallel(source, evaluation_config(source, config), device)
        if source.tokenizer is None:
            raise BadInputError(f"{source.folder}: no tokenizer next to it; give the run's folder, which keeps one")
        tokenizer, size = load_tokenizer(source.tokenizer), settings.batch_size
        model = HarnessModel(parallel.model, tokenizer, size, parallel.share, parallel.shares, parallel.forward)
        return measure_tasks(settings, model)


def _measure_whole(
    settings: HarnessSettings, device: torch.device | str, rank: int = 0, processes: int = 1
) -> dict[str, Any]:
    """Measure with the whole model in this process, which takes its share of the requests."""
    from mgpu_pipe.inference.harness.model import HarnessModel, measure_tasks
    from mgpu_pipe.inference.model_arguments import silence_transformers
    from mgpu_pipe.inference.open import load_run

    silence_transformers()
    run = load_run(settings.model, device, settings.frozen_folder, settings.average)
    return measure_tasks(settings, HarnessModel(run.model, run.tokenizer(), settings.batch_size, rank, processes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_now(0)
