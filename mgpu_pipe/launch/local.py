"""Runs a checked configuration on this machine, up to its report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_OK, EXIT_STOPPED, BadInputError, ConfigError, print_line, print_text
from mgpu_pipe.import_path import python_module
from mgpu_pipe.launch import fork_server
from mgpu_pipe.launch import outcome as finish
from mgpu_pipe.launch.deepspeed_build import prepare_extensions, write_engine_settings
from mgpu_pipe.launch.gpus import run_environment
from mgpu_pipe.launch.outcome import LaunchResult
from mgpu_pipe.launch.preparing import prepare_data
from mgpu_pipe.launch.resume import announce_resume, restarts_without_progress, resume_step
from mgpu_pipe.launch.signals import STOPPING, SignalInbox, StoppedBeforeTraining
from mgpu_pipe.launch.supervisor import Outcome, supervise
from mgpu_pipe.launch.workers import RESUME, WORKER, WorkerGroup, WorkerPlan, worker_environment
from mgpu_pipe.runs import history, record, run_folder
from mgpu_pipe.runs.environment import describe_environment
from mgpu_pipe.runs.lock import RunLock
from mgpu_pipe.runs.resume_command import CommandLine
from mgpu_pipe.runs.run_folder import RunFolder
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.standard_streams import live_descriptor
from mgpu_pipe.system.threads import choose_threads


def launch(config: RunConfig, command_line: CommandLine) -> LaunchResult:
    """Run ``config``, which has passed :func:`mgpu_pipe.checks.preflight.preflight`; in the main thread.

    In a world that torchrun or srun started, this process becomes one of its ranks and starts none.

    Raises:
        BadInputError: the run cannot start; the files of this launch are removed.
    """
    joined = existing_world(os.environ)
    prepare_extensions(config)
    if joined:
        from mgpu_pipe.launch.join import is_node, join
        from mgpu_pipe.launch.node import launch_node

        return (launch_node if is_node(joined, config) else join)(joined, config, command_line)
    if config.trainer.num_nodes > 1:
        fix, reason = "start it on every node, by srun or torchrun", "this command starts workers on one machine only"
        raise ConfigError("trainer.num_nodes", config.trainer.num_nodes, fix, reason)
    started = time.monotonic()
    folder = run_folder.choose_folder(config, swept=command_line.swept)
    command_line.chosen(folder.paths.root)
    with SignalInbox() as inbox:
        result = _launch(config, folder, inbox, command_line, started)
    return replace(result, asked_to_stop=inbox.stop_requested)


def _launch(
    config: RunConfig, folder: RunFolder, inbox: SignalInbox, command_line: CommandLine, started: float
) -> LaunchResult:
    try:
        with RunLock(folder.paths.lock) as lock:
            folder = run_folder.settle(folder, config.checkpoint, command_line.alone)
            if run_folder.completed(folder, config.trainer):
                finish.print_complete(folder.paths)
                return LaunchResult("finished", EXIT_OK, folder.paths.root)
            folder = record.begin(folder, config, command_line.overrides, command_line.command)
            finish.print_note(folder.note)
            try:
                with live_descriptor() as live:
                    outcome = _run(config, folder, lock, inbox, command_line, live)
            except BadInputError:
                folder.discard()
                raise
            return _finish(config, folder.paths, outcome, time.monotonic() - started, command_line)
    except StoppedBeforeTraining:
        return _stopped_before_training(config, folder, command_line)


def _run(
    config: RunConfig, folder: RunFolder, lock: RunLock, inbox: SignalInbox, command_line: CommandLine, live: int
) -> Outcome:
    """Start the workers, which import while the data is prepared, then let them train and supervise them.

    Workers of a sweep are forked later, from a server with the imports.
    """
    launched = time.time()
    paths, world = folder.paths, world_size(config.trainer, config.strategy)
    threads = choose_threads(config.launch.threads_per_worker, world)
    step = resume_step(config.checkpoint, paths)
    first = record.next_attempt(paths)
    plan = _plan(config, paths, threads.per_worker, live, lock)

    def environment_of(attempt: int) -> Mapping[str, str]:
        """Variables of a restarted attempt."""
        record.keep_attempt_config(paths, attempt)
        return resume_environment(resume_step(config.checkpoint, paths))

    def group_of() -> WorkerGroup:
        with run_folder.writing_to(paths.root):
            return WorkerGroup(plan.with_environment(resume_environment(step)), first)

    group = None if plan.server else group_of()
    try:
        environment = describe_environment(
            command_line.command, threads, world, command_line.local_options, plan.environment
        )
        _prepare_attempt(config, paths, command_line, environment, first, step, launched)
        if plan.server:
            plan.server.wait()
        group = group or group_of()
        lock.training()
        return supervise(
            plan,
            inbox,
            stop_timeout=config.launch.stop_timeout,
            max_restarts=config.launch.max_restarts,
            first_attempt=first,
            started=group,
            attempt_environment=environment_of,
            lost=lock.lost,
            on_stop=partial(_stopping, lock),
        )
    finally:
        if group is not None:
            group.kill()


def _prepare_attempt(
    config: RunConfig,
    paths: RunPaths,
    command_line: CommandLine,
    environment: Mapping[str, object],
    attempt: int,
    step: Path | None,
    launched: float,
) -> None:
    """Prepare the data, check the resume from ``step``, and write the run folder's files before the first step."""
    prepared = prepare_data(config)
    announce_resume(config, prepared, paths, step)
    with run_folder.writing_to(paths.root):
        record.record_launch(paths, config, command_line.overrides, environment, prepared)
        record.keep_attempt_config(paths, attempt)
        write_engine_settings(paths, config)
        history.begin(paths, attempt, step, restarts_without_progress(config.launch), launched=launched)
    finish.print_before(config, prepared, environment)


def _plan(config: RunConfig, paths: RunPaths, threads: int, live: int, lock: RunLock) -> WorkerPlan:
    """Command, environment and descriptors of the workers."""
    environment = {**worker_environment(threads), **run_environment(config)}
    return WorkerPlan(
        argv=python_module(WORKER, str(paths.root)),
        world_size=world_size(config.trainer, config.strategy),
        paths=paths,
        environment=environment,
        live_fd=live,
        inherited_fds=(lock.fd,),
        server=fork_server.serving({**os.environ, **environment}),
    )


def _stopping(lock: RunLock) -> None:
    print_line(STOPPING, file=sys.stderr, flush=True)
    lock.stopping()


def _finish(
    config: RunConfig, paths: RunPaths, outcome: Outcome, wall_s: float, command_line: CommandLine
) -> LaunchResult:
    if outcome.failure is not None:
        print_text(outcome.failure.show(), file=sys.stderr, flush=True)
    if outcome.message:
        print_line(f"error: {outcome.message}", file=sys.stderr, flush=True)
    finish.conclude(config, paths, outcome, wall_s, command_line.line(paths.root))
    return LaunchResult(outcome.status, finish.exit_code(outcome, command_line), paths.root)


def _stopped_before_training(config: RunConfig, folder: RunFolder, command_line: CommandLine) -> LaunchResult:
    """Leave a run without a step of this launch; the same command with its folder starts or resumes it."""
    root = folder.paths.root
    if not folder.paths.config.exists():
        record.begin(folder, config, command_line.overrides, command_line.command)
    print_line("stopped before training began; there was nothing to save", file=sys.stderr)
    print_line(f"go on: {command_line.line(root)}")
    print_line(f"run: {root}", flush=True)
    return LaunchResult("stopped", EXIT_STOPPED, root)


def resume_environment(step: Path | None) -> dict[str, str]:
    return {RESUME: "" if step is None else str(step)}
