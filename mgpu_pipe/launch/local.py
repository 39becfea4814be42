"""Launches a checked configuration: the path that every world takes.

:func:`launch` finds the world that torchrun or srun started, or makes one of workers of this machine (:mod:`.world`).
:mod:`.run_start` begins the run in its folder and prepares the attempt. Workers train under :mod:`.supervisor`, here
and in :mod:`.node`; a rank of :mod:`.join` trains itself. :mod:`.outcome` writes the end and gives the exit code.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import devices_per_node
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_OK, EXIT_STOPPED, BadInputError, ConfigError, print_line
from mgpu_pipe.launch import fork_server
from mgpu_pipe.launch import outcome as finish
from mgpu_pipe.launch.deepspeed_build import prepare_extensions
from mgpu_pipe.launch.join import join
from mgpu_pipe.launch.node import launch_node
from mgpu_pipe.launch.outcome import LaunchResult
from mgpu_pipe.launch.resume import resume_step
from mgpu_pipe.launch.run_start import AttemptStart, begin_run, prepare_attempt, worker_plan
from mgpu_pipe.launch.signals import SignalInbox, StoppedBeforeTraining
from mgpu_pipe.launch.supervisor import Outcome, supervise
from mgpu_pipe.launch.workers import RESUME, WorkerGroup
from mgpu_pipe.launch.world import World, is_node_task, run_environment
from mgpu_pipe.runs import record, run_folder
from mgpu_pipe.runs.lock import RunLock
from mgpu_pipe.runs.resume_command import CommandLine
from mgpu_pipe.runs.run_folder import RunFolder
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.standard_streams import live_descriptor


def launch(config: RunConfig, command_line: CommandLine) -> LaunchResult:
    """Run ``config``, which has passed :func:`mgpu_pipe.checks.preflight.preflight`; in the main thread.

    In a world that torchrun or srun started, this process becomes one of its ranks, or the task of its node.

    Raises:
        BadInputError: the run cannot start; the files of this launch are removed.
    """
    joined, trainer = existing_world(os.environ), config.trainer
    prepare_extensions(config.strategy, trainer, config.data.cache_dir)
    if joined:
        starts_workers = is_node_task(joined, devices_per_node(config.trainer, config.strategy))
        return (launch_node if starts_workers else join)(joined, config, command_line)
    if trainer.num_nodes > 1:
        fix, reason = "start it on every node, by srun or torchrun", "this command starts workers on one machine only"
        raise ConfigError("trainer.num_nodes", trainer.num_nodes, fix, reason)
    started = time.monotonic()
    folder = run_folder.choose_folder(config, swept=command_line.swept)
    command_line.chosen(folder.paths.root)
    with SignalInbox() as inbox:
        result = _launch_here(config, folder, inbox, command_line, started)
    return replace(result, asked_to_stop=inbox.stop_requested)


def _launch_here(
    config: RunConfig, folder: RunFolder, inbox: SignalInbox, command_line: CommandLine, started: float
) -> LaunchResult:
    """Lock the folder, begin the run in it, train on this machine, and write the end."""
    paths = folder.paths
    try:
        with RunLock(paths.lock) as lock:
            run = begin_run(config, folder, command_line)
            if run is None:
                return LaunchResult("finished", EXIT_OK, paths.root)
            folder = run
            try:
                with live_descriptor() as live:
                    outcome = _train_here(config, paths, lock, inbox, command_line, live)
            except BadInputError:
                folder.discard()
                raise
            finish.print_failure(outcome)
            finish.conclude(config, paths, outcome, time.monotonic() - started, command_line.line(paths.root))
            return LaunchResult(outcome.status, finish.exit_code(outcome, command_line), paths.root)
    except StoppedBeforeTraining:  # the same command with the folder starts or resumes the run
        if not paths.config.exists():
            record.begin(folder, config, command_line.overrides, command_line.command)
        print_line("stopped before training began; there was nothing to save", file=sys.stderr)
        print_line(f"resume: {command_line.line(paths.root)}")
        print_line(f"run: {paths.root}", flush=True)
        return LaunchResult("stopped", EXIT_STOPPED, paths.root)


def _train_here(
    config: RunConfig, paths: RunPaths, lock: RunLock, inbox: SignalInbox, command_line: CommandLine, live: int
) -> Outcome:
    """Start the workers (of a sweep: fork them), which import while the data is prepared, and supervise them."""
    launched, options = time.time(), config.launch
    step, first = resume_step(config.checkpoint, paths), record.next_attempt(paths)
    world = World.on_this_machine(devices_per_node(config.trainer, config.strategy))
    variables = run_environment(config.trainer, config.data.cache_dir)
    environment = {**world.thread_environment(options.threads_per_worker), **variables}
    server = fork_server.serving({**os.environ, **environment})
    plan = worker_plan(paths, world, environment, live, lock, server)

    def restart_variables(attempt: int) -> Mapping[str, str]:
        """Keep the configuration of a restarted attempt; returns its workers' variables."""
        record.keep_attempt_config(paths, attempt)
        return _resume_variables(resume_step(config.checkpoint, paths))

    def start_workers() -> WorkerGroup:
        with run_folder.writing_to(paths.root):
            return WorkerGroup(plan.with_environment(_resume_variables(step)), first)

    group = None if server else start_workers()
    try:
        prepare_attempt(config, paths, command_line, AttemptStart(first, world, step, environment, launched))
        if server:
            server.wait()
        group = group or start_workers()
        lock.training()
        return supervise(
            plan,
            inbox,
            stop_timeout=options.stop_timeout,
            max_restarts=options.max_restarts,
            first_attempt=first,
            started=group,
            attempt_environment=restart_variables,
            lost=lock.loss_reason,
            on_stop=partial(finish.announce_stop, lock),
        )
    finally:
        if group is not None:
            group.kill()


def _resume_variables(step: Path | None) -> dict[str, str]:
    return {RESUME: "" if step is None else str(step)}
