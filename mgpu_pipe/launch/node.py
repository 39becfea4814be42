"""Node task: one srun task per node starts and supervises the node's workers, together with the other tasks.

The tasks share a store that the first node's task serves. That task plans, like rank 0 when every worker is a task.
Every task starts its workers, whose ranks continue from node to node; the workers share a store that rank 0 serves. A
task whose workers fail records it, and the others kill theirs. At the end the first task collects every outcome,
concludes the run and broadcasts the exit code.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.freeze import load
from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import device_type, devices_per_node
from mgpu_pipe.config.schema import LaunchConfig, RunConfig, TrainerConfig
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, RunFolderError, print_line
from mgpu_pipe.launch import outcome as finish
from mgpu_pipe.launch.failure import Failure
from mgpu_pipe.launch.join import SharedPlan, agree, prepare_on_every_node, report_errors
from mgpu_pipe.launch.outcome import LaunchResult
from mgpu_pipe.launch.run_start import worker_plan
from mgpu_pipe.launch.signals import SignalInbox, StoppedBeforeTraining
from mgpu_pipe.launch.supervisor import Outcome, supervise
from mgpu_pipe.launch.worker import prepared_here
from mgpu_pipe.launch.workers import RESUME, WorkerGroup
from mgpu_pipe.launch.world import World, check_world, joined_store, run_environment, wait_for
from mgpu_pipe.runs.lock import RunLock
from mgpu_pipe.runs.resume_command import CommandLine, joined_start
from mgpu_pipe.system.hardware import available_memory, usable_gpus
from mgpu_pipe.system.standard_streams import live_descriptor

if TYPE_CHECKING:
    from torch.distributed import Store


BAD_NODES = "bad_nodes.txt"
"""File in the run's folder with a line per failed node, its name first; the batch script reads it."""
MIN_FREE_BYTES = 64 << 20
"""Free bytes that a node's temporary folder and the run's folder need."""
MAX_CLOCK_SKEW_S = 60.0
"""Largest difference in seconds between a node's clock and the file system's."""
MEMORY_SHARE = 0.5
"""Share of the job's memory that must be free at its start."""


def node_faults(trainer: TrainerConfig, strategy: StrategyConfig, folder: Path, node: str) -> list[str]:
    """Faults of this node in words: GPUs, memory, disks, clock; RunFolderError if the run's folder is full."""
    faults = []
    needs_gpus = device_type(trainer) == "cuda" and not _has_own_gpu()
    wanted = devices_per_node(trainer, strategy) if needs_gpus else 0
    if usable_gpus() < wanted:
        faults.append(f"{usable_gpus()} of {wanted} GPUs can be used")
    job_memory = os.environ.get("SLURM_MEM_PER_NODE", "")
    if job_memory.isdigit() and int(job_memory) and available_memory() < MEMORY_SHARE * (int(job_memory) << 20):
        faults.append(f"{available_memory() >> 20} MiB of memory are free, {job_memory} were asked for")
    for place in (Path(os.environ.get("TMPDIR", tempfile.gettempdir())), folder):
        try:
            written = _write(place, node)
            if abs(written - time.time()) > MAX_CLOCK_SKEW_S and place == folder:
                faults.append(f"its clock is off by {time.time() - written:.0f} s")
            space = os.statvfs(place)
            full = space.f_bavail * space.f_frsize < MIN_FREE_BYTES
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not full:
                faults.append(f"{place} cannot be written ({error.strerror})")
        if full and place == folder:  # on every node
            raise RunFolderError(
                f"{folder}: has less than {MIN_FREE_BYTES >> 20} MiB free; make room, and queue it again"
            )
        if full:
            faults.append(f"{place} has less than {MIN_FREE_BYTES >> 20} MiB free")
    return faults


def exclude_node(folder: Path, node: str, faults: list[str]) -> None:
    """Record a faulty node, without which the batch script queues the job again."""
    with (folder / BAD_NODES).open("a", encoding="utf-8") as file:
        file.write(f"{node} {'; '.join(faults)}\n")


def _has_own_gpu() -> bool:
    """Whether srun shows this task only its GPU."""
    return "SLURM_STEP_GPUS" not in os.environ and "SLURM_GPUS_PER_TASK" in os.environ


def _write(folder: Path, node: str) -> float:
    """Write and remove a file; returns its modification time by the file system's clock."""
    path = folder / f".{node}-{os.getpid()}.check"
    try:
        path.write_text(node, encoding="utf-8")
        return path.stat().st_mtime
    finally:
        path.unlink(missing_ok=True)


PORT, ENDED, FAILED, VERDICT, READ = "port", "ended", "failed", "verdict", "read"
ANSWER_S = 20.0
"""Seconds that tasks wait for each other at the end, beyond the workers' time to save."""


def launch_node(joined: Mapping[str, str], config: RunConfig, command_line: CommandLine) -> LaunchResult:
    """Run this node's part of the run.

    Args:
        joined: variables of the world of tasks, whose ranks are nodes.

    Raises:
        BadInputError: the configuration does not fit the nodes or differs between them, or the run cannot start.
    """
    started, devices = time.monotonic(), devices_per_node(config.trainer, config.strategy)
    os.environ.update(joined)
    node = World.from_environment(joined)
    world = node.with_workers(devices)
    check_world(world, config.trainer, config.strategy)
    try:
        with SignalInbox() as inbox, ExitStack() as resources:
            store = joined_store(config.launch.collective_timeout)
            shared, lock = agree(config, world, command_line, store, resources, devices)
            paths = RunPaths(Path(shared.folder))
            if not shared.train:
                return LaunchResult("finished", EXIT_OK, paths.root)
            with report_errors(store, node.rank):
                config = load(paths.config)  # rank 0's, whose names are pinned to commits
            prepare_on_every_node(node, store, partial(prepared_here, config, paths))
            if lock is not None:
                lock.training()
            variables = run_environment(config.trainer, config.data.cache_dir)
            environment = {**world.thread_environment(config.launch.threads_per_worker), **variables}
            outcome = _watch(config.launch.stop_timeout, environment, world, store, shared, lock, inbox)
            if node.rank == 0:
                outcome = _combined_outcome(config.launch, outcome, node.world_size, store)
                finish.print_failure(outcome)
                again = command_line.line(paths.root, joined_start())
                finish.conclude(config, paths, outcome, time.monotonic() - started, again)
                outcome = replace(outcome, exit_code=finish.exit_code(outcome, command_line))
                store.set(VERDICT, str(outcome.exit_code))
                wait_for(store, [f"{READ}/{other}" for other in range(1, node.world_size)], ANSWER_S)
            else:
                outcome = replace(outcome, exit_code=_verdict(config.launch, node, outcome, store))
            return LaunchResult(outcome.status, outcome.exit_code, paths.root, inbox.stop_requested)
    except StoppedBeforeTraining:
        print_line("stopped before training began; there was nothing to save", file=sys.stderr, flush=True)
        return LaunchResult("stopped", EXIT_STOPPED, Path(config.run.dir or config.run.root))


def _watch(
    stop_timeout: float,
    environment: Mapping[str, str],
    world: World,
    store: Store,
    shared: SharedPlan,
    lock: RunLock | None,
    inbox: SignalInbox,
) -> Outcome:
    """Start this node's workers, supervise them and publish their outcome to the other tasks."""
    node, paths = world.node, RunPaths(Path(shared.folder))
    if node:
        wait_for(store, [PORT])
        world = replace(world, master_port=int(store.get(PORT)))
    with live_descriptor() as live:
        plan = worker_plan(paths, world, {**environment, RESUME: shared.resume}, live, lock)
        group = WorkerGroup(plan, shared.attempt)
        try:
            if not node:
                store.set(PORT, str(group.port))
            outcome = supervise(
                plan,
                inbox,
                stop_timeout=stop_timeout,
                first_attempt=shared.attempt,
                started=group,
                lost=_reason_to_end(store, node, lock),
                on_stop=partial(finish.announce_stop, lock),
            )
        finally:
            group.kill()
    _publish(store, node, outcome)
    return outcome


def _publish(store: Store, node: int, outcome: Outcome) -> None:
    """Tell the other tasks how this node's workers ended."""
    failure = outcome.failure
    result = {
        "node": node,
        "status": outcome.status,
        "message": outcome.message,
        "exit_code": outcome.exit_code,
        "failure": None if failure is None else {**asdict(failure), "log": str(failure.log)},
    }
    try:
        if outcome.status == "failed" and not store.check([FAILED]):
            store.set(FAILED, str(node))
        store.set(f"{ENDED}/{node}", json.dumps(result))
    except RuntimeError:  # the first node is gone
        return


def _reason_to_end(store: Store, node: int, lock: RunLock | None) -> Callable[[], str]:
    """Returns a function that gives the reason why this node's workers must end at once, or an empty text."""

    def reason() -> str:
        try:
            failed = int(store.get(FAILED)) if store.check([FAILED]) else node
        except RuntimeError as error:
            return f"the first node's task is gone: {str(error).splitlines()[0][:200]}"
        if failed != node:
            return f"the workers of node {failed} failed"
        return "" if lock is None else lock.loss_reason()

    return reason


def _combined_outcome(launch: LaunchConfig, outcome: Outcome, nodes: int, store: Store) -> Outcome:
    """Outcome of the run over all nodes: the first failure, a stop, or the end."""
    keys = [f"{ENDED}/{node}" for node in range(nodes)]
    if not wait_for(store, keys, launch.stop_timeout + ANSWER_S):
        silent = [node for node, key in enumerate(keys) if not store.check([key])]
        return replace(outcome, status="failed", exit_code=EXIT_FAILURE, message=f"node {silent[0]} does not answer")
    results = [json.loads(store.get(key)) for key in keys]
    failed = [result for result in results if result["status"] == "failed"]
    failures = [
        Failure(**{**result["failure"], "log": Path(result["failure"]["log"])})
        for result in failed
        if result["failure"]
    ]
    if failures:
        first = min(failures, key=lambda failure: (failure.follows, failure.time))
        return replace(outcome, status="failed", exit_code=first.exit_code, failure=first, message="")
    if failed:
        first_node = int(store.get(FAILED))
        result = next((result for result in failed if result["node"] == first_node), failed[0])
        return replace(outcome, status="failed", exit_code=result["exit_code"], message=result["message"])
    stopped = next((result for result in results if result["status"] == "stopped"), None)
    return outcome if stopped is None else replace(outcome, status="stopped", exit_code=EXIT_STOPPED)


def _verdict(launch: LaunchConfig, node: World, outcome: Outcome, store: Store) -> int:
    """Exit code from the first node's task; without its answer, this node's."""
    try:
        if not wait_for(store, [VERDICT], launch.stop_timeout + 2 * ANSWER_S):
            return outcome.exit_code
        code = int(store.get(VERDICT))
        store.set(f"{READ}/{node.rank}", "")
    except RuntimeError:
        return outcome.exit_code or EXIT_FAILURE
    return code
