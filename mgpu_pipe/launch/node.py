"""One task of srun's a node: it starts the node's workers, watches them, and agrees with the other nodes' tasks.

The tasks meet in a store of their own, which the first node's task serves. It plans, as rank 0 does where every worker
is a task; every task starts its workers, whose ranks follow one another from node to node and who meet in a store that
rank 0 serves. A task whose workers failed says so, and the others end theirs; at the end the first node's task hears
from all how they ended, concludes the run, and tells the exit code that all of them leave with.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.freeze import load
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import devices_per_node
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.threads import choose_threads
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED
from mgpu_pipe.launch import outcome as finish
from mgpu_pipe.launch.console import live_descriptor
from mgpu_pipe.launch.distributed import World
from mgpu_pipe.launch.failure import Failure
from mgpu_pipe.launch.join import SharedPlan, agree, check_world, prepare_on_every_node, rendezvous, wait_for
from mgpu_pipe.launch.outcome import LaunchResult
from mgpu_pipe.launch.signals import SignalInbox, StoppedBeforeTraining
from mgpu_pipe.launch.stop import STOPPING
from mgpu_pipe.launch.supervisor import Outcome, supervise
from mgpu_pipe.launch.variables import gpu_environment
from mgpu_pipe.launch.workers import RESUME, WORKER, WorkerGroup, WorkerPlan, worker_environment
from mgpu_pipe.runs.continue_line import Asked, joined_start
from mgpu_pipe.runs.lock import RunLock

if TYPE_CHECKING:
    from torch.distributed import Store

PORT, ENDED, FAILED, VERDICT, HEARD = "port", "ended", "failed", "verdict", "heard"
ANSWER_S = 20.0
"""How long the tasks wait for one another at the end, beyond the time that workers get to save."""


def launch_node(joined: Mapping[str, str], config: RunConfig, asked: Asked) -> LaunchResult:
    """Run this node's part of the run.

    Args:
        joined: the variables of the world of the tasks, whose ranks are nodes.

    Raises:
        BadInputError: the configuration does not fit the nodes or is not the other ones', or the run cannot start.
    """
    started, devices = time.monotonic(), devices_per_node(config)
    os.environ.update(joined)
    node = World.from_environment(joined)
    world = replace(
        node, rank=node.rank * devices, local_rank=0, world_size=node.world_size * devices, local_world_size=devices
    )
    check_world(config, world)
    try:
        with SignalInbox() as inbox, ExitStack() as resources:
            store = rendezvous(config)
            shared, lock = agree(config, world, asked, store, resources, devices)
            paths = RunPaths(Path(shared.folder))
            if not shared.train:
                return LaunchResult("finished", EXIT_OK, paths.root)
            config = load(paths.config)  # rank 0's, whose names have their commits
            prepare_on_every_node(node, config, paths, store)
            if lock is not None:
                lock.training()
            outcome = _watch(config, world, store, shared, paths, lock, inbox)
            if node.rank == 0:
                outcome = _all_ended(config, outcome, node.world_size, store)
                _conclude(config, paths, outcome, started, asked)
                outcome = replace(outcome, exit_code=finish.exit_code(outcome, asked))
                store.set(VERDICT, str(outcome.exit_code))
                wait_for(store, [f"{HEARD}/{other}" for other in range(1, node.world_size)], ANSWER_S)
            else:
                outcome = replace(outcome, exit_code=_verdict(config, node, outcome, store))
            return LaunchResult(outcome.status, outcome.exit_code, paths.root, inbox.stop_requested)
    except StoppedBeforeTraining:
        print("stopped before training began; there was nothing to save", file=sys.stderr, flush=True)
        return LaunchResult("stopped", EXIT_STOPPED, Path(config.run.dir or config.run.root))


def _watch(
    config: RunConfig,
    world: World,
    store: Store,
    shared: SharedPlan,
    paths: RunPaths,
    lock: RunLock | None,
    inbox: SignalInbox,
) -> Outcome:
    """Start this node's workers and watch them to their end; the other tasks hear of it."""
    node = world.rank // world.local_world_size
    threads = choose_threads(config, world.local_world_size)
    several = world.world_size > world.local_world_size
    environment = worker_environment(threads.per_worker, one_host=not several)
    with live_descriptor() as live:
        plan = WorkerPlan(
            argv=[sys.executable, *WORKER, str(paths.root)],
            world_size=world.world_size,
            paths=paths,
            environment={**environment, **gpu_environment(config), RESUME: shared.resume},
            live_fd=live,
            inherited_fds=() if lock is None else (lock.fd,),
            first_rank=world.rank,
            here=world.local_world_size,
            address=world.master_addr,
        )
        if node:
            wait_for(store, [PORT])
            plan = replace(plan, port=int(store.get(PORT)))
        group = WorkerGroup(plan, shared.attempt)
        try:
            if not node:
                store.set(PORT, str(group.port))
            outcome = supervise(
                plan,
                inbox,
                stop_timeout=config.launch.stop_timeout,
                first_attempt=shared.attempt,
                started=group,
                lost=_watched(store, node, lock),
                on_stop=lambda: _stopping(lock),
            )
        finally:
            group.kill()
    failure = outcome.failure
    told = {
        "node": node,
        "status": outcome.status,
        "message": outcome.message,
        "exit_code": outcome.exit_code,
        "failure": None if failure is None else {**asdict(failure), "log": str(failure.log)},
    }
    try:
        if outcome.status == "failed" and not store.check([FAILED]):
            store.set(FAILED, str(node))
        store.set(f"{ENDED}/{node}", json.dumps(told))
    except RuntimeError:  # the first node is gone
        return outcome
    return outcome


def _watched(store: Store, node: int, lock: RunLock | None) -> Callable[[], str]:
    """The reason why this node's workers must end at once, or an empty text."""

    def reason() -> str:
        try:
            failed = int(store.get(FAILED)) if store.check([FAILED]) else node
        except RuntimeError as error:
            return f"the first node's task is gone: {str(error).splitlines()[0][:200]}"
        if failed != node:
            return f"the workers of node {failed} failed"
        return "" if lock is None else lock.lost()

    return reason


def _stopping(lock: RunLock | None) -> None:
    if lock is not None:
        print(STOPPING, file=sys.stderr, flush=True)
        lock.stopping()


def _all_ended(config: RunConfig, own: Outcome, nodes: int, store: Store) -> Outcome:
    """How the run ended, from all nodes: the first failure of any, a stop, or its end."""
    keys = [f"{ENDED}/{node}" for node in range(nodes)]
    if not wait_for(store, keys, config.launch.stop_timeout + ANSWER_S):
        silent = [node for node, key in enumerate(keys) if not store.check([key])]
        return replace(own, status="failed", exit_code=EXIT_FAILURE, message=f"node {silent[0]} does not answer")
    told = [json.loads(store.get(key)) for key in keys]
    failed = [each for each in told if each["status"] == "failed"]
    failures = [
        Failure(**{**each["failure"], "log": Path(each["failure"]["log"])}) for each in failed if each["failure"]
    ]
    if failures:
        first = min(failures, key=lambda failure: (failure.follows, failure.at))
        return replace(own, status="failed", exit_code=first.exit_code, failure=first, message="")
    if failed:
        first_node = int(store.get(FAILED))
        said = next((each for each in failed if each["node"] == first_node), failed[0])
        return replace(own, status="failed", exit_code=said["exit_code"], message=said["message"])
    stopped = next((each for each in told if each["status"] == "stopped"), None)
    return own if stopped is None else replace(own, status="stopped", exit_code=EXIT_STOPPED)


def _conclude(config: RunConfig, paths: RunPaths, outcome: Outcome, started: float, asked: Asked) -> None:
    if outcome.failure is not None:
        print(outcome.failure.show(), file=sys.stderr, flush=True)
    if outcome.message:
        print(f"error: {outcome.message}", file=sys.stderr, flush=True)
    finish.conclude(config, paths, outcome, time.monotonic() - started, asked.line(paths.root, joined_start()))


def _verdict(config: RunConfig, node: World, own: Outcome, store: Store) -> int:
    """The exit code of all tasks, as the first node's tells it; without its word, this node's own."""
    try:
        if not wait_for(store, [VERDICT], config.launch.stop_timeout + 2 * ANSWER_S):
            return own.exit_code
        code = int(store.get(VERDICT))
        store.set(f"{HEARD}/{node.rank}", "")
    except RuntimeError:
        return own.exit_code or EXIT_FAILURE
    return code
