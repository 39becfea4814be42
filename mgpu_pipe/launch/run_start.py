"""How a run starts, in every world: its folder takes a new or a resumed run, whose attempt is prepared and recorded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import RunConfig, TrainerConfig
from mgpu_pipe.import_path import python_module
from mgpu_pipe.launch import outcome as finish
from mgpu_pipe.launch.deepspeed_build import write_engine_settings
from mgpu_pipe.launch.fork_server import ForkServer
from mgpu_pipe.launch.preparing import prepare_data
from mgpu_pipe.launch.resume import announce_resume, restarts_without_progress
from mgpu_pipe.launch.workers import WORKER, WorkerPlan
from mgpu_pipe.launch.world import World
from mgpu_pipe.report.columns import print_rows
from mgpu_pipe.report.overview import summary
from mgpu_pipe.runs import history, record, run_folder
from mgpu_pipe.runs.environment import describe_environment
from mgpu_pipe.runs.lock import RunLock
from mgpu_pipe.runs.resume_command import CommandLine
from mgpu_pipe.runs.run_folder import RunFolder
from mgpu_pipe.system.hardware import choose_threads, cpu_cores


def begin_run(
    config: RunConfig, folder: RunFolder, command_line: CommandLine, launch_id: str = "", *, restart: bool = False
) -> RunFolder | None:
    """Resume or begin the run in its locked folder; None if the run is complete, which is printed.

    Args:
        launch_id: ID of the torchrun or srun that started this world; empty without one.
        restart: whether torchrun restarted this world.
    """
    folder = run_folder.decide_resume(folder, config.checkpoint, command_line.alone, restart=restart)
    if run_folder.is_completed(folder, config.trainer):
        finish.print_complete(folder.paths)
        return None
    folder = record.begin(folder, config, command_line.overrides, command_line.command, launch_id)
    finish.print_note(folder.note)
    return folder


@dataclass(frozen=True)
class AttemptStart:
    """Facts of an attempt that are known before its data is prepared.

    Attributes:
        world: world of the workers.
        step: step folder to resume from.
        variables: variables of the workers on top of the launcher's.
        launched: start of the launch, in seconds since the epoch.
        launch_id: see :func:`begin_run`.
    """

    number: int
    world: World
    step: Path | None
    variables: Mapping[str, str]
    launched: float
    launch_id: str = ""


def prepare_attempt(config: RunConfig, paths: RunPaths, command_line: CommandLine, start: AttemptStart) -> None:
    """Prepare data, check the resume, write files, and print the table of the run; BadInputError if it cannot run."""
    processes = start.world.world_size
    threads = choose_threads(config.launch.threads_per_worker, start.world.local_world_size)
    environment = describe_environment(
        command_line.command, threads, processes, command_line.local_options, start.variables
    )
    if start.launch_id:
        environment["launch"] = start.launch_id
    prepared = prepare_data(config)
    announce_resume(config, prepared, paths, start.step)
    with run_folder.writing_to(paths.root):
        record.record_launch(paths, config, command_line.overrides, environment, prepared)
        record.keep_attempt_config(paths, start.number)
        write_engine_settings(paths, config, processes)
        without_progress = restarts_without_progress(config.launch)
        history.begin(paths, start.number, start.step, without_progress, launched=start.launched)
    device = _describe_device(config.trainer, environment)
    print_rows(summary(config, processes, prepared, device, command_line.local_options), config.run.name)
    sys.stdout.flush()


def _describe_device(trainer: TrainerConfig, environment: Mapping[str, object]) -> str:
    gpus = environment.get("gpus")
    if device_type(trainer) == "cuda" and isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {str(gpus[0]).partition(',')[0]}"
    threads = environment["threads_per_worker"]
    return f"{cpu_cores()} CPU cores, {threads} thread{'' if threads == 1 else 's'} each"


def worker_plan(
    paths: RunPaths,
    world: World,
    environment: Mapping[str, str],
    live: int,
    lock: RunLock | None,
    server: ForkServer | None = None,
) -> WorkerPlan:
    """Command, environment and descriptors of this node's workers; they keep the run's lock, where this node has it."""
    return WorkerPlan(
        argv=python_module(WORKER, str(paths.root)),
        world=world,
        paths=paths,
        environment=environment,
        live_fd=live,
        inherited_fds=() if lock is None else (lock.fd,),
        server=server,
    )
