"""One run on this machine, from a checked configuration to its report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.joined_world import existing_world
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.threads import choose_threads
from mgpu_pipe.errors import EXIT_OK, EXIT_STOPPED, BadInputError, ConfigError, one_line
from mgpu_pipe.launch import outcome as finish
from mgpu_pipe.launch.extensions import prepare_extensions
from mgpu_pipe.launch.preparing import showing_preparation
from mgpu_pipe.launch.resume import check_init_from, check_resume, resume_step
from mgpu_pipe.launch.signals import SignalInbox, StoppedBeforeTraining
from mgpu_pipe.launch.stop import STOPPING
from mgpu_pipe.launch.supervisor import Outcome, supervise
from mgpu_pipe.launch.workers import RESUME, WorkerGroup, WorkerPlan
from mgpu_pipe.runs import folder as run_folder
from mgpu_pipe.runs.continue_line import Asked, line_for
from mgpu_pipe.runs.environment import describe_environment
from mgpu_pipe.runs.folder import RunFolder
from mgpu_pipe.runs.lock import RunLock
from mgpu_pipe.training.length import run_length

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared

WORKER = ("-m", "mgpu_pipe.launch.worker")
LOOPBACK = Path("/sys/class/net/lo")


@dataclass(frozen=True)
class LaunchResult:
    """How a run ended: ``finished``, ``stopped`` or ``failed``, the command's exit code, the run's folder.

    Attributes:
        asked_to_stop: the launcher got a stop signal, perhaps too late to stop the run.
    """

    status: str
    exit_code: int
    folder: Path
    asked_to_stop: bool = False


def launch(config: RunConfig, asked: Asked) -> LaunchResult:
    """Run ``config``, which :func:`mgpu_pipe.checks.preflight.preflight` has passed; in the main thread.

    In a world that torchrun or srun started, this process becomes one of its ranks instead of starting any.

    Raises:
        BadInputError: the run cannot start as asked; what this launch had written is taken back.
    """
    joined = existing_world(os.environ)
    prepare_extensions(config)
    if joined:
        from mgpu_pipe.launch.join import join

        return join(joined, config, asked)
    if config.trainer.num_nodes > 1:
        raise ConfigError(
            "trainer.num_nodes",
            config.trainer.num_nodes,
            "start it on every node, by srun or torchrun",
            "this command starts workers on one machine only",
        )
    started = time.monotonic()
    folder = run_folder.choose_folder(config, swept=asked.swept)
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
            folder = run_folder.begin(folder, config, asked.overrides, asked.command)
            finish.say_note(folder.note)
            try:
                outcome = _run(config, folder, lock, inbox, asked)
            except BadInputError:
                folder.discard()
                raise
            return _finish(config, folder.paths, outcome, time.monotonic() - started, asked.alone)
    except StoppedBeforeTraining:
        return _stopped_before_training(config, folder, asked)


def _run(config: RunConfig, folder: RunFolder, lock: RunLock, inbox: SignalInbox, asked: Asked) -> Outcome:
    """Start the workers, which import while the data is prepared, let them train, and watch them to their end."""
    paths, world = folder.paths, world_size(config)
    threads = choose_threads(config, world)
    step = resume_step(config, paths)
    first = run_folder.next_attempt(paths)
    live = os.dup(2)
    plan = WorkerPlan(
        argv=[sys.executable, *WORKER, str(paths.root)],
        world_size=world,
        paths=paths,
        environment=worker_environment(threads.per_worker),
        live_fd=live,
        inherited_fds=(lock.fd,),
    )

    def environment_of(attempt: int) -> Mapping[str, str]:
        """Of a restart."""
        run_folder.keep_attempt_config(paths, attempt)
        return resume_environment(resume_step(config, paths))

    with run_folder.writing_to(paths.root):
        group = WorkerGroup(plan.with_environment(resume_environment(step)), first)
    try:
        environment = describe_environment(asked.command, threads, world)
        prepared = prepare_data(config)
        announce_resume(config, prepared, paths, step)
        with run_folder.writing_to(paths.root):
            run_folder.record_launch(paths, config, asked.overrides, environment, prepared)
            run_folder.keep_attempt_config(paths, first)
        finish.print_before(config, prepared, environment)
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
        group.kill()
        os.close(live)


def _stopping(lock: RunLock) -> None:
    print(STOPPING, file=sys.stderr, flush=True)
    lock.stopping()


def _finish(config: RunConfig, paths: RunPaths, outcome: Outcome, wall_s: float, alone: Sequence[str]) -> LaunchResult:
    if outcome.failure is not None:
        print(outcome.failure.show(), file=sys.stderr, flush=True)
    if outcome.message:
        print(f"error: {outcome.message}", file=sys.stderr, flush=True)
    finish.conclude(config, paths, outcome, wall_s, line_for(alone, paths.root))
    return LaunchResult(outcome.status, outcome.exit_code, paths.root)


def _stopped_before_training(config: RunConfig, folder: RunFolder, asked: Asked) -> LaunchResult:
    """Leave a run without a step of this launch, which the same line with its folder begins, or goes on in."""
    root = folder.paths.root
    if not folder.paths.config.exists():
        run_folder.begin(folder, config, asked.overrides, asked.command)
    print("stopped before training began; there was nothing to save", file=sys.stderr)
    print(f"go on: {line_for(asked.alone, root)}")
    print(f"run: {root}", flush=True)
    return LaunchResult("stopped", EXIT_STOPPED, root)


def prepare_data(config: RunConfig) -> Prepared:
    from mgpu_pipe.data.prepare import prepare

    with showing_preparation(config.trainer.progress) as progress:
        return prepare(config, progress)


def announce_resume(config: RunConfig, prepared: Prepared, paths: RunPaths, step: Path | None) -> None:
    """Say from where the run goes on, and what differs; refuse what may not, and a run without a step."""
    run_length(config, prepared)
    if step is not None:
        for notice in check_resume(config, prepared, step, own=step.parent == paths.checkpoints):
            print(f"note: {one_line(notice)}", file=sys.stderr)
        print(f"resuming from {step}", file=sys.stderr, flush=True)
    elif config.checkpoint.init_from is not None:
        for notice in check_init_from(config, prepared):
            print(f"note: {one_line(notice)}", file=sys.stderr)


def worker_environment(threads: int, *, one_host: bool = True) -> dict[str, str]:
    """What all workers of this machine get beside their ranks."""
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if one_host and "GLOO_SOCKET_IFNAME" not in os.environ and LOOPBACK.exists():
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo asks for the host's name, which may lead nowhere
    return environment


def resume_environment(step: Path | None) -> dict[str, str]:
    return {RESUME: "" if step is None else str(step)}
