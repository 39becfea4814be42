"""``mgpu-pipe generate --input``: answers a file of prompts by this process, by processes it starts, or as a rank."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, ConfigError, print_line, print_text
from mgpu_pipe.import_path import python_module
from mgpu_pipe.inference.batch.job_folder import JobFolder
from mgpu_pipe.inference.batch.settings import BatchSettings
from mgpu_pipe.inference.find_model import ModelSource
from mgpu_pipe.launch.answer_worker import SETTINGS, answer_in, answer_share
from mgpu_pipe.launch.signals import SignalInbox
from mgpu_pipe.launch.supervisor import supervise
from mgpu_pipe.launch.workers import WorkerPlan, worker_environment
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.standard_streams import live_descriptor
from mgpu_pipe.system.threads import choose_threads

WORKER = "mgpu_pipe.launch.answer_worker"
STOP_TIMEOUT_S = 5.0
"""Short, because every batch is on disk when it ends."""


def answer(settings: BatchSettings, source: ModelSource, config: RunConfig) -> int:
    """Answer the file of prompts on the configured processes.

    Args:
        config: gives processes and threads.

    Returns:
        The exit code.

    Raises:
        BadInputError: a setting is wrong, or an unfinished job with other settings is there.
    """
    folder, joined = JobFolder(settings.output), existing_world(os.environ)
    if joined:
        return _answer_joined(settings, source, config, folder, joined)
    if config.trainer.num_nodes > 1:
        fix, reason = "start it on every node, by srun or torchrun", "this command starts processes on one machine only"
        raise ConfigError("trainer.num_nodes", config.trainer.num_nodes, fix, reason)
    with folder.locked():
        folder.begin(settings.identity(source))
        if world_size(config) == 1:
            answer_share(settings, settings.device)
            return EXIT_OK
        return _answer_by_workers(settings, config, folder)


def _answer_joined(
    settings: BatchSettings, source: ModelSource, config: RunConfig, folder: JobFolder, joined: dict[str, str]
) -> int:
    """Answer as a rank of the joined world; the ranks share the folder of the output and nothing else."""
    from mgpu_pipe.launch.distributed import World
    from mgpu_pipe.launch.join import check_world, rendezvous

    os.environ.update(joined)
    world = World.from_environment(os.environ)
    check_world(config, world)
    threads = choose_threads(config.launch.threads_per_worker, world.local_world_size).per_worker
    os.environ.update(worker_environment(threads, one_host=world.local_world_size == world.world_size))
    store = rendezvous(config)
    with folder.locked() if world.rank == 0 else nullcontext():
        if world.rank == 0:
            folder.begin(settings.identity(source))
        answer_in(world, store, settings, config)
    return EXIT_OK


def _answer_by_workers(settings: BatchSettings, config: RunConfig, folder: JobFolder) -> int:
    paths, processes = RunPaths(folder.root), world_size(config)
    freeze(config, paths.config)
    replace_file(folder.root / SETTINGS, settings.to_json())
    with live_descriptor() as live, SignalInbox() as inbox:
        plan = WorkerPlan(
            argv=python_module(WORKER, str(folder.root)),
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
        print_line(f"stopped; the same command goes on from what is in {folder.root}", file=sys.stderr)
    return outcome.exit_code or EXIT_FAILURE
