"""Becoming a rank of a world that torchrun or srun started.

Every rank composes the same command. Rank 0 chooses the folder, freezes the configuration there and tells the
others, through the store, the folder and the configuration's hash; they refuse another hash than their own.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from mgpu_pipe.child import die_with_parent
from mgpu_pipe.config.freeze import config_hash, load
from mgpu_pipe.config.hub import without_revisions
from mgpu_pipe.config.joined_world import existing_world
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import devices_per_node
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.threads import choose_threads
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, BadInputError, ConfigError, MgpuError, WorkerError
from mgpu_pipe.launch import outcome as finish
from mgpu_pipe.launch import stop
from mgpu_pipe.launch.distributed import World
from mgpu_pipe.launch.failure import can_be_retried, follows_a_peers_end
from mgpu_pipe.launch.live_output import LiveStream
from mgpu_pipe.launch.outcome import LaunchResult
from mgpu_pipe.launch.preparing import prepare_data
from mgpu_pipe.launch.resume import announce_resume, restarts_without_progress, resume_step
from mgpu_pipe.launch.supervisor import Outcome
from mgpu_pipe.launch.variables import gpu_environment
from mgpu_pipe.launch.workers import is_stopped, open_log, worker_environment
from mgpu_pipe.runs import folder as run_folder
from mgpu_pipe.runs import history, record
from mgpu_pipe.runs.continue_line import Asked, joined_start
from mgpu_pipe.runs.environment import describe_environment
from mgpu_pipe.runs.folder import RunFolder
from mgpu_pipe.runs.lock import RunLock, boot_id, process_identity

if TYPE_CHECKING:
    from torch.distributed import Store

    from mgpu_pipe.data.samples import Prepared

OFFER, PREPARED, CONCLUDED, HEARD = "offer", "prepared", "concluded", "heard"
LEAVING_S = 10.0
"""Seconds in which the others have to hear of the end."""
LOOK_S = 0.02
"""Between two looks at the store."""


def join(joined: Mapping[str, str], config: RunConfig, asked: Asked) -> LaunchResult:
    """Train as one rank of the ``joined`` world; returns, or ends the process on an error while training.

    A stopped run ends with exit code 0 where torchrun started it, which takes any other for a crash (the summary says
    ``stopped``); else on rank 0 with 75, which is then the step's.

    Raises:
        BadInputError: the configuration does not fit the world or is not the other ranks', or the run cannot start.
    """
    started = time.monotonic()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
    os.environ.update(joined)
    world = World.from_environment(os.environ)
    stop.install(second_leaves=True, told=stop.STOPPING if world.rank == 0 else "")
    check_world(config, world)
    threads = choose_threads(config, world.local_world_size)
    os.environ.update(worker_environment(threads.per_worker, one_host=world.local_world_size == world.world_size))
    os.environ.update(gpu_environment(config))
    with ExitStack() as resources:
        store = rendezvous(config)
        shared, _ = agree(config, world, asked, store, resources)
        paths = RunPaths(Path(shared.folder))
        if not shared.train:
            return LaunchResult("finished", EXIT_OK, paths.root)
        status = _train(replace(world, attempt=shared.attempt), paths, store, shared, resources, started, asked)
        if world.rank == 0:
            outcome = Outcome(status, EXIT_OK, shared.attempt)
            finish.conclude(config, paths, outcome, time.monotonic() - started, _again(asked, paths))
            store.set(CONCLUDED, "")
            others = [f"{HEARD}/{rank}" for rank in range(1, world.world_size)]
            wait_for(store, others, timeout=LEAVING_S)  # the store is this process's own, and leaves with it
        else:
            _await_conclusion(store, world.rank)
    told = status == "stopped" and world.rank == 0 and "TORCHELASTIC_RUN_ID" not in os.environ
    return LaunchResult(status, EXIT_STOPPED if told else EXIT_OK, paths.root)


def _await_conclusion(store: Store, rank: int) -> None:
    """Return when rank 0 has written the run's end, so that a script on any rank reads a finished run."""
    try:
        wait_for(store, [CONCLUDED])
        store.set(f"{HEARD}/{rank}", "")
    except RuntimeError:  # the store is rank 0's own, and left with it: it has concluded, or has said why not
        return


def check_world(config: RunConfig, world: World) -> None:
    """Refuse a configuration that asks for another world than the one there is."""
    nodes = world.world_size // world.local_world_size
    there = f"the world that was joined has {world.world_size} processes, {world.local_world_size} on this node"
    devices = config.trainer.devices
    if devices != world.local_world_size and not (devices == "auto" and config.strategy.name != "single"):
        raise ConfigError("trainer.devices", devices, f"use {world.local_world_size}, or start as many", there)
    if config.trainer.num_nodes != nodes:
        raise ConfigError("trainer.num_nodes", config.trainer.num_nodes, f"use {nodes}", there)


@dataclass(frozen=True)
class SharedPlan:
    """What rank 0 decided for all."""

    folder: str
    config_hash: str
    resume: str
    attempt: int
    train: bool
    """False where the run is complete already."""


def rendezvous(config: RunConfig) -> Store:
    """The store of the joined world."""
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous as meet

    store, _, _ = next(meet("env://", timeout=timedelta(seconds=config.launch.collective_timeout)))
    # torchrun's own store outlives its workers: what was told before a restart must not be heard after it
    return PrefixStore(f"mgpu_pipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def agree(
    config: RunConfig, world: World, asked: Asked, store: Store, resources: ExitStack, each: int = 1
) -> tuple[SharedPlan, RunLock | None]:
    """What rank 0 decides, and, on rank 0, the lock of the run's folder, which ``resources`` give back.

    Args:
        each: ranks that a process which calls this stands for.

    Raises:
        BadInputError: the run cannot start, or this process has another configuration than rank 0.
        SystemExit: rank 0 could not start the run.
    """
    if world.rank == 0:
        return _plan_on_rank_zero(config, world, asked, store, resources, each)
    return _plan_from_rank_zero(config, store, world.rank), None


def _plan_on_rank_zero(
    config: RunConfig, world: World, asked: Asked, store: Store, resources: ExitStack, each: int
) -> tuple[SharedPlan, RunLock]:
    """Rank 0: choose, lock and fill the folder, and tell the others; of an error too, so that no rank waits for it."""
    others = range(each, world.world_size, each)
    try:
        folder = run_folder.choose_folder(config, restart_of=_restarted_launch())
        lock = resources.enter_context(RunLock(folder.paths.lock))
        shared = _settle(config, world, asked, folder)
        lock.training()
    except MgpuError as error:
        _say_and_leave(store, {"exit_code": error.exit_code}, others)
        raise
    if shared.train:
        store.set(OFFER, json.dumps(asdict(shared)))
    else:
        _say_and_leave(store, asdict(shared), others)
    return shared, lock


def is_node(joined: Mapping[str, str], config: RunConfig) -> bool:
    """Whether this process is one of srun's tasks, a node each, and has several workers to start; never torchrun's."""
    return joined.get("LOCAL_WORLD_SIZE") == "1" and devices_per_node(config) > 1


def refuse_alone(config: RunConfig, exit_code: int) -> None:
    """Rank 0, which found what the others did not look for: they leave with its exit code instead of waiting."""
    joined = existing_world(os.environ)
    os.environ.update(joined)
    world = World.from_environment(joined)
    each = devices_per_node(config) if is_node(joined, config) else 1
    _say_and_leave(rendezvous(config), {"exit_code": exit_code}, range(each, world.world_size * each, each))


def _say_and_leave(store: Store, offer: Mapping[str, object], others: Sequence[int]) -> None:
    """Tell the others that nothing will be trained, and wait until they know: the store leaves with this process."""
    store.set(OFFER, json.dumps(offer))
    wait_for(store, [f"{HEARD}/{rank}" for rank in others], timeout=LEAVING_S)


def _settle(config: RunConfig, world: World, asked: Asked, folder: RunFolder) -> SharedPlan:
    paths, launch = folder.paths, _this_launch()
    folder = run_folder.settle(folder, config, asked.alone, restart=bool(_restarted_launch()))
    if run_folder.completed(folder, config):
        finish.say_complete(paths)
        return SharedPlan(str(paths.root), _hash(config), "", record.next_attempt(paths), train=False)
    folder = record.begin(folder, config, asked.overrides, asked.command, launch)
    attempt = record.next_attempt(paths)
    finish.say_note(folder.note)
    try:
        step = resume_step(config, paths)
        threads = choose_threads(config, world.local_world_size)
        environment = describe_environment(asked.command, threads, world.world_size, asked.own, gpu_environment(config))
        environment["launch"] = launch
        prepared = prepare_data(config)
        announce_resume(config, prepared, paths, step)
    except BadInputError:
        folder.discard()
        raise
    with run_folder.writing_to(paths.root):
        record.record_launch(paths, config, asked.overrides, environment, prepared)
        record.keep_attempt_config(paths, attempt)
        history.begin(paths, attempt, step, restarts_without_progress(config))
    for left_over in paths.logs.glob("rank-*.error.json"):
        left_over.unlink()
    finish.print_before(config, prepared, environment, world.world_size)
    return SharedPlan(str(paths.root), _hash(config), str(step or ""), attempt, train=True)


def _plan_from_rank_zero(config: RunConfig, store: Store, rank: int) -> SharedPlan:
    """The other ranks: take rank 0's decisions, if it read the same configuration."""
    wait_for(store, [OFFER])  # the data may have to be prepared first
    told = json.loads(store.get(OFFER))
    if not told.get("train"):
        with suppress(RuntimeError):  # rank 0 waited long enough, and is gone
            store.set(f"{HEARD}/{rank}", "")
    if "exit_code" in told:
        raise SystemExit(told["exit_code"])  # rank 0 has said why
    shared = SharedPlan(**told)
    if shared.config_hash != _hash(config):
        fix = "give every node the same command and the same version of the files"
        reason = f"rank 0 composed another configuration, {shared.config_hash}: the nodes' configurations differ"
        raise ConfigError("config", _hash(config), fix, reason)
    return shared


def _train(
    world: World, paths: RunPaths, store: Store, shared: SharedPlan, resources: ExitStack, started: float, asked: Asked
) -> str:
    """Train; an error is reported and ends this process, because the other ranks may never arrive.

    Args:
        resources: what rank 0 has to give back (the lock).
        started: of the command, by the monotonic clock.
    """
    from mgpu_pipe.launch.worker import leave_error, train_in

    usual = sys.stderr
    config = load(paths.config)
    peers: dict[int, str] = {}
    with open_log(paths.rank_log(world.rank), world.rank, world.world_size, world.attempt) as log:
        text_log = io.TextIOWrapper(log, encoding="utf-8", errors="backslashreplace", write_through=True)
        sys.stderr = cast(TextIO, LiveStream(text_log, os.dup(2)))
        try:
            prepared, peers = prepare_on_every_node(world, config, paths, store)
            resume = Path(shared.resume) if shared.resume else None
            result = train_in(world, config, paths, prepared, store, resume=resume)
        except BaseException as raised:
            error = _with_its_cause(raised, world.rank, peers)
            retry = asked.again and can_be_retried(type(error).__name__, getattr(error, "exit_code", EXIT_FAILURE))
            if world.rank == 0:
                message = f"{type(error).__name__}: {error}"
                outcome = Outcome("failed", getattr(error, "exit_code", 1), world.attempt, message=message)
                finish.conclude(config, paths, outcome, time.monotonic() - started, _again(asked, paths))
            resources.close()
            leave_error(paths, error, world.rank, EXIT_STOPPED if retry else None)
        finally:
            sys.stderr = usual
    return result.status


def _with_its_cause(error: BaseException, rank: int, peers: Mapping[int, str]) -> BaseException:
    """``error``, or that a peer on this machine is stopped, where ``error`` is what waiting for one ends with."""
    if not follows_a_peers_end(error):
        return error
    for peer, identity in peers.items():
        boot, pid, _ = identity.split(":")
        if boot == boot_id() and process_identity(int(pid)) == identity and is_stopped(int(pid)):
            cause = WorkerError(
                f"rank {peer}'s process {pid} was stopped (SIGSTOP, or a debugger), and rank {rank} waited for it in "
                f"vain: {str(error).splitlines()[0][:200]}"
            )
            cause.__cause__ = error
            return cause
    return error


def prepare_on_every_node(
    world: World, config: RunConfig, paths: RunPaths, store: Store
) -> tuple[Prepared, dict[int, str]]:
    """The data on this node, made ready once where the node does not share rank 0's cache; a collective call.

    This happens before there is a process group, whose time-out must not include it. One process a node works,
    the others wait for the node's lock.

    Returns:
        The data, and every rank's process (see :func:`process_identity`).

    Raises:
        BadInputError: the data of some node cannot be prepared or is not rank 0's, whichever node this is.
    """
    from mgpu_pipe.launch.worker import prepared_here

    said = {"error": "", "process": process_identity(os.getpid())}
    try:
        prepared = prepared_here(config, paths)
    except BaseException as error:
        said["error"] = str(error) or type(error).__name__
        raise
    finally:
        store.set(f"{PREPARED}/{world.rank}", json.dumps(said))
    wait_for(store, [f"{PREPARED}/{rank}" for rank in range(world.world_size)])
    peers = {}
    for rank in range(world.world_size):
        there = json.loads(store.get(f"{PREPARED}/{rank}"))
        if there["error"]:
            raise BadInputError(f"rank {rank}: {there['error']}")
        peers[rank] = there["process"]
    return prepared, peers


def _hash(config: RunConfig) -> str:
    """What every rank composed alike; rank 0 alone has looked up which commits names mean."""
    return config_hash(without_revisions(config))


def _again(asked: Asked, paths: RunPaths) -> str:
    return asked.line(paths.root, start=joined_start())


def wait_for(store: Store, keys: Sequence[str], timeout: float = math.inf) -> bool:
    """Wait until all ``keys`` are there, without a time-out of the store's, and open to signals meanwhile.

    Returns:
        False after ``timeout`` seconds.
    """
    until = time.monotonic() + timeout
    while not store.check(list(keys)):
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_S)
    return True


def _this_launch() -> str:
    """Names the torchrun (or other parent) that started this process; the same after a restart by it."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else process_identity(os.getppid())


def _restarted_launch() -> str:
    """The launch that torchrun restarted this process for; empty at its first start."""
    return _this_launch() if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else ""
