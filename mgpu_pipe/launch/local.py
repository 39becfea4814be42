"""One run on this machine, from a checked configuration to its report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from mgpu_pipe.config.joined_world import existing_world
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.threads import choose_threads
from mgpu_pipe.errors import EXIT_OK, EXIT_STOPPED, BadInputError, ConfigError
from mgpu_pipe.launch import fork_server
from mgpu_pipe.launch import outcome as finish
from mgpu_pipe.launch.console import live_descriptor
from mgpu_pipe.launch.extensions import prepare_extensions
from mgpu_pipe.launch.outcome import LaunchResult
from mgpu_pipe.launch.preparing import prepare_data
from mgpu_pipe.launch.resume import announce_resume, restarts_without_progress, resume_step
from mgpu_pipe.launch.signals import SignalInbox, StoppedBeforeTraining
from mgpu_pipe.launch.stop import STOPPING
from mgpu_pipe.launch.supervisor import Outcome, supervise
from mgpu_pipe.launch.variables import gpu_environment
from mgpu_pipe.launch.workers import RESUME, WORKER, WorkerGroup, WorkerPlan, worker_environment
from mgpu_pipe.runs import folder as run_folder
from mgpu_pipe.runs import history, record
from mgpu_pipe.runs.continue_line import Asked
from mgpu_pipe.runs.environment import describe_environment
from mgpu_pipe.runs.folder import RunFolder
from mgpu_pipe.runs.lock import RunLock


def launch(config: RunConfig, asked: Asked) -> LaunchResult:
    """Run ``config``, which :func:`mgpu_pipe.checks.preflight.preflight` has passed; in the main thread.

    In a world that torchrun or srun started, this process becomes one of its ranks instead of starting any.

    Raises:
        BadInputError: the run cannot start as asked; what this launch wrote is removed.
    """
    joined = existing_world(os.environ)
    prepare_extensions(config)
    if joined:
        from mgpu_pipe.launch.join import is_node, join
        from mgpu_pipe.launch.node import launch_node

        return (launch_node if is_node(joined, config) else join)(joined, config, asked)
    if config.trainer.num_nodes > 1:
        fix, reason = "start it on every node, by srun or torchrun", "this command starts workers on one machine only"
        raise ConfigError("trainer.num_nodes", config.trainer.num_nodes, fix, reason)
    started = time.monotonic()
    folder = run_folder.choose_folder(config, swept=asked.swept)
    asked.chosen(folder.paths.root)
    with SignalInbox() as inbox:
        result = _launch(config, folder, inbox, asked, started)
    return replace(result, asked_to_stop=inbox.stop_requested)


def _launch(config: RunConfig, folder: RunFolder, inbox: SignalInbox, asked: Asked, started: float) -> LaunchResult:
    try:
        with RunLock(folder.paths.lock) as lock:
            folder = run_folder.settle(folder, config, asked.alone)
            if run_folder.completed(folder, config):
                finish.say_complete(folder.paths)
                return LaunchResult("finished", EXIT_OK, folder.paths.root)
            folder = record.begin(folder, config, asked.overrides, asked.command)
            finish.say_note(folder.note)
            try:
                with live_descriptor() as live:
                    outcome = _run(config, folder, lock, inbox, asked, live)
            except BadInputError:
                folder.discard()
                raise
            return _finish(config, folder.paths, outcome, time.monotonic() - started, asked)
    except StoppedBeforeTraining:
        return _stopped_before_training(config, folder, asked)


def _run(config: RunConfig, folder: RunFolder, lock: RunLock, inbox: SignalInbox, asked: Asked, live: int) -> Outcome:
    """Start the workers, which import while the data is prepared, let them train, and watch them to their end.

    Those of a sweep are forked later, from a server that imports meanwhile, or has long done so.
    """
    paths, world = folder.paths, world_size(config)
    threads = choose_threads(config, world)
    step = resume_step(config, paths)
    first = record.next_attempt(paths)
    plan = WorkerPlan(
        argv=[sys.executable, *WORKER, str(paths.root)],
        world_size=world,
        paths=paths,
        environment={**worker_environment(threads.per_worker), **gpu_environment(config)},
        live_fd=live,
        inherited_fds=(lock.fd,),
    )
    plan = replace(plan, server=fork_server.serving({**os.environ, **plan.environment}))

    def environment_of(attempt: int) -> Mapping[str, str]:
        """Of a restart."""
        record.keep_attempt_config(paths, attempt)
        return resume_environment(resume_step(config, paths))

    def group_of() -> WorkerGroup:
        with run_folder.writing_to(paths.root):
            return WorkerGroup(plan.with_environment(resume_environment(step)), first)

    group = None if plan.server else group_of()
    try:
        environment = describe_environment(asked.command, threads, world, asked.own, plan.environment)
        prepared = prepare_data(config)
        announce_resume(config, prepared, paths, step)
        with run_folder.writing_to(paths.root):
            record.record_launch(paths, config, asked.overrides, environment, prepared)
            record.keep_attempt_config(paths, first)
            history.begin(paths, first, step, restarts_without_progress(config))
        finish.print_before(config, prepared, environment)
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


def _stopping(lock: RunLock) -> None:
    print(STOPPING, file=sys.stderr, flush=True)
    lock.stopping()


def _finish(config: RunConfig, paths: RunPaths, outcome: Outcome, wall_s: float, asked: Asked) -> LaunchResult:
    if outcome.failure is not None:
        print(outcome.failure.show(), file=sys.stderr, flush=True)
    if outcome.message:
        print(f"error: {outcome.message}", file=sys.stderr, flush=True)
    finish.conclude(config, paths, outcome, wall_s, asked.line(paths.root))
    return LaunchResult(outcome.status, finish.exit_code(outcome, asked), paths.root)


def _stopped_before_training(config: RunConfig, folder: RunFolder, asked: Asked) -> LaunchResult:
    """Leave a run in which this launch took no step; the same command with its folder begins or continues it."""
    root = folder.paths.root
    if not folder.paths.config.exists():
        record.begin(folder, config, asked.overrides, asked.command)
    print("stopped before training began; there was nothing to save", file=sys.stderr)
    print(f"go on: {asked.line(root)}")
    print(f"run: {root}", flush=True)
    return LaunchResult("stopped", EXIT_STOPPED, root)


def resume_environment(step: Path | None) -> dict[str, str]:
    return {RESUME: "" if step is None else str(step)}
