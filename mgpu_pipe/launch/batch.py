"""``generate --input`` and ``encode``: a batch job of this process, of processes that it starts, or as a rank."""

from __future__ import annotations

import os
from contextlib import nullcontext

from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_OK
from mgpu_pipe.inference.batch.job_folder import JobFolder
from mgpu_pipe.inference.batch.settings import JobSettings
from mgpu_pipe.inference.find_model import ModelSource
from mgpu_pipe.launch.batch_worker import compute_in, compute_share
from mgpu_pipe.launch.inference_world import refuse_other_machines, run_processes
from mgpu_pipe.launch.workers import worker_environment
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.threads import choose_threads

WORKER = "mgpu_pipe.launch.batch_worker"


def run_job(settings: JobSettings, source: ModelSource, config: RunConfig) -> int:
    """Run the job on the configured processes.

    Args:
        config: gives processes and threads.

    Returns:
        The exit code.

    Raises:
        BadInputError: a setting is wrong, or an unfinished job with other settings is there.
    """
    folder, joined = settings.folder(), existing_world(os.environ)
    if joined:
        return _run_joined(settings, source, config, folder, joined)
    refuse_other_machines(config)
    with folder.locked():
        folder.begin(settings.identity(source))
        if world_size(config.trainer, config.strategy) == 1:
            compute_share(settings, settings.device)
            return EXIT_OK
        stopped = f"stopped; the same command resumes from {folder.root}"
        return run_processes(WORKER, folder.root, settings.to_json(), config, stopped)


def _run_joined(
    settings: JobSettings, source: ModelSource, config: RunConfig, folder: JobFolder, joined: dict[str, str]
) -> int:
    """Run as a rank of the joined world; the ranks share the folder of the output and nothing else."""
    from mgpu_pipe.launch.distributed import World
    from mgpu_pipe.launch.join import check_world, rendezvous

    os.environ.update(joined)
    world = World.from_environment(os.environ)
    check_world(config, world)
    threads = choose_threads(config.launch.threads_per_worker, world.local_world_size).per_worker
    os.environ.update(worker_environment(threads, one_host=world.local_world_size == world.world_size))
    store = rendezvous(config.launch)
    with folder.locked() if world.rank == 0 else nullcontext():
        if world.rank == 0:
            folder.begin(settings.identity(source))
        compute_in(world, store, settings, config)
    return EXIT_OK
