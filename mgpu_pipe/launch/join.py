"""Joins a world that torchrun or srun started.

Every rank composes the same command. Rank 0 chooses the folder, freezes the configuration there and broadcasts both
the folder and the configuration's hash through the store; the other ranks compare the hash with theirs.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from mgpu_pipe.config.freeze import config_hash, load
from mgpu_pipe.config.hub import without_revisions
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import unplanned_keys, with_plan_of
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, BadInputError, ConfigError, MgpuError, WorkerError
from mgpu_pipe.launch import outcome as finish
from mgpu_pipe.launch import signals as stop
from mgpu_pipe.launch.failure import can_be_retried, follows_a_peers_end
from mgpu_pipe.launch.outcome import LaunchResult
from mgpu_pipe.launch.preparing import LiveStream
from mgpu_pipe.launch.resume import resume_step
from mgpu_pipe.launch.run_start import AttemptStart, begin_run, prepare_attempt
from mgpu_pipe.launch.supervisor import Outcome
from mgpu_pipe.launch.worker import leave_error, prepared_here, train_in
from mgpu_pipe.launch.workers import is_stopped, open_log
from mgpu_pipe.launch.world import World, enter, is_node_task, joined_store, run_environment, wait_for
from mgpu_pipe.runs import record, run_folder
from mgpu_pipe.runs.lock import RunLock, boot_id, process_identity
from mgpu_pipe.runs.resume_command import CommandLine, joined_start
from mgpu_pipe.runs.run_folder import RunFolder
from mgpu_pipe.system.child_process import die_with_parent
from mgpu_pipe.system.joined_world import existing_world

if TYPE_CHECKING:
    from torch.distributed import Store

    from mgpu_pipe.data.samples import Prepared

OFFER, PREPARED, CONCLUDED, READ = "offer", "prepared", "concluded", "read"
LEAVING_S = 10.0
"""Seconds that the other ranks have to read the end."""


def join(joined: Mapping[str, str], config: RunConfig, command_line: CommandLine) -> LaunchResult:
    """Train as a rank of the ``joined`` world; returns, or ends the process on an error while training.

    Under torchrun a stopped run exits with code 0, because torchrun takes any other for a crash (the summary says
    ``stopped``). Otherwise rank 0 exits with 75.

    Raises:
        BadInputError: the configuration does not fit the world or differs between ranks, or the run cannot start.
    """
    started = time.monotonic()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
    stop.install(second_leaves=True, message=stop.STOPPING if joined["RANK"] == "0" else "")
    world = enter(joined, config.trainer, config.strategy, config.launch.threads_per_worker)
    os.environ.update(run_environment(config.trainer, config.data.cache_dir))
    with ExitStack() as resources:
        store = joined_store(config.launch.collective_timeout)
        shared, _ = agree(config, world, command_line, store, resources)
        paths = RunPaths(Path(shared.folder))
        if not shared.train:
            return LaunchResult("finished", EXIT_OK, paths.root)
        status = _train(replace(world, attempt=shared.attempt), paths, store, shared, resources, started, command_line)
        if world.rank == 0:
            outcome = Outcome(status, EXIT_OK, shared.attempt)
            finish.conclude(config, paths, outcome, time.monotonic() - started, _again(command_line, paths))
            store.set(CONCLUDED, "")
            others = [f"{READ}/{rank}" for rank in range(1, world.world_size)]
            wait_for(store, others, timeout=LEAVING_S)  # the store ends with this process
        else:
            _await_conclusion(store, world.rank)
    exits_stopped = status == "stopped" and world.rank == 0 and "TORCHELASTIC_RUN_ID" not in os.environ
    return LaunchResult(status, EXIT_STOPPED if exits_stopped else EXIT_OK, paths.root)


def _await_conclusion(store: Store, rank: int) -> None:
    """Wait until rank 0 has written the run's end, so that a script on any rank reads a finished run."""
    try:
        wait_for(store, [CONCLUDED])
        store.set(f"{READ}/{rank}", "")
    except RuntimeError:  # rank 0 and its store are gone: it has concluded, or printed why not
        return


@dataclass(frozen=True)
class SharedPlan:
    """Rank 0's decisions for every rank."""

    folder: str
    config_hash: str
    resume: str
    attempt: int
    train: bool
    """False if the run is complete already."""


def agree(
    config: RunConfig, world: World, command_line: CommandLine, store: Store, resources: ExitStack, each: int = 1
) -> tuple[SharedPlan, RunLock | None]:
    """Rank 0's plan and, on rank 0, the lock of the run's folder, which ``resources`` releases.

    Args:
        each: ranks per calling process.

    Raises:
        BadInputError: the run cannot start, or this process's configuration differs from rank 0's.
        SystemExit: rank 0 could not start the run.
    """
    if world.rank:
        with report_errors(store, world.rank // each):
            return _plan_from_rank_zero(config, store, world.rank), None
    others = range(each, world.world_size, each)
    try:
        folder = run_folder.choose_folder(config, restart_of=_restarted_launch())
        lock = resources.enter_context(RunLock(folder.paths.lock))
        shared = _prepare_attempt(config, world, command_line, folder)
        lock.training()
    except MgpuError as error:
        _broadcast_and_exit(store, {"exit_code": error.exit_code}, others)
        raise
    if shared.train:
        store.set(OFFER, json.dumps(asdict(shared)))
    else:
        _broadcast_and_exit(store, asdict(shared), others)
    return shared, lock


def refuse_alone(devices: int, timeout: float, exit_code: int) -> None:
    """On rank 0: broadcast an error that only it looks for, so that the others exit with its code."""
    joined = existing_world(os.environ)
    os.environ.update(joined)
    world = World.from_environment(joined)
    each = devices if is_node_task(joined, devices) else 1
    store = joined_store(timeout)
    _broadcast_and_exit(store, {"exit_code": exit_code}, range(each, world.world_size * each, each))


def _broadcast_and_exit(store: Store, offer: Mapping[str, object], others: Sequence[int]) -> None:
    """Broadcast that nothing will be trained, and wait until the others read it: the store ends with this process."""
    store.set(OFFER, json.dumps(offer))
    wait_for(store, [f"{READ}/{rank}" for rank in others], timeout=LEAVING_S)


def _prepare_attempt(config: RunConfig, world: World, command_line: CommandLine, folder: RunFolder) -> SharedPlan:
    """Begin the run and prepare its attempt on rank 0; returns the plan for every rank."""
    paths, launch, launched = folder.paths, _this_launch(), time.time()
    # Only rank 0 looks up commits.
    shared_hash = config_hash(replace(config, **without_revisions(config.model, config.data)))
    run = begin_run(config, folder, command_line, launch, restart=bool(_restarted_launch()))
    attempt = record.next_attempt(paths)
    if run is None:
        return SharedPlan(str(paths.root), shared_hash, "", attempt, train=False)
    try:
        step = resume_step(config.checkpoint, paths)
        variables = run_environment(config.trainer, config.data.cache_dir)
        prepare_attempt(config, paths, command_line, AttemptStart(attempt, world, step, variables, launched, launch))
    except BadInputError:
        run.discard()
        raise
    for left_over in paths.logs.glob("rank-*.error.json"):
        left_over.unlink()
    return SharedPlan(str(paths.root), shared_hash, str(step or ""), attempt, train=True)


def _plan_from_rank_zero(config: RunConfig, store: Store, rank: int) -> SharedPlan:
    """On the other ranks: take rank 0's plan if its configuration is the same."""
    wait_for(store, [OFFER])  # rank 0 may prepare the data first
    offer = json.loads(store.get(OFFER))
    if not offer.get("train"):
        with suppress(RuntimeError):  # rank 0 timed out and is gone
            store.set(f"{READ}/{rank}", "")
    if "exit_code" in offer:
        raise SystemExit(offer["exit_code"])  # rank 0 has printed the reason
    shared = SharedPlan(**offer)
    # Rank 0 alone plans, where it alone looks up names on the Hub.
    if unplanned_keys(config.strategy, config.data, config.checkpoint):
        if not shared.train:
            return shared
        config = with_plan_of(config, load(RunPaths(Path(shared.folder)).config))
    own_hash = config_hash(replace(config, **without_revisions(config.model, config.data)))
    if shared.config_hash != own_hash:
        fix = "give every node the same command and the same version of the files"
        reason = f"rank 0 composed another configuration, {shared.config_hash}: the nodes' configurations differ"
        raise ConfigError("config", own_hash, fix, reason)
    return shared


def _train(
    world: World,
    paths: RunPaths,
    store: Store,
    shared: SharedPlan,
    resources: ExitStack,
    started: float,
    command_line: CommandLine,
) -> str:
    """Train; an error is reported and ends this process, because the other ranks may be gone."""
    usual = sys.stderr
    with report_errors(store, world.rank):
        config = load(paths.config)
    peers: dict[int, str] = {}
    with open_log(paths.rank_log(world.rank), world.rank, world.world_size, world.attempt) as log:
        text_log = io.TextIOWrapper(log, encoding="utf-8", errors="backslashreplace", write_through=True)
        sys.stderr = cast(TextIO, LiveStream(text_log, os.dup(2)))
        try:
            prepared, peers = prepare_on_every_node(world, store, partial(prepared_here, config, paths))
            resume = Path(shared.resume) if shared.resume else None
            result = train_in(world, config, paths, prepared, store, resume=resume)
        except BaseException as raised:
            error = _with_its_cause(raised, world.rank, peers)
            retry = command_line.again and can_be_retried(
                type(error).__name__, getattr(error, "exit_code", EXIT_FAILURE)
            )
            if world.rank == 0:
                message = f"{type(error).__name__}: {error}"
                outcome = Outcome("failed", getattr(error, "exit_code", 1), world.attempt, message=message)
                finish.conclude(config, paths, outcome, time.monotonic() - started, _again(command_line, paths))
            resources.close()
            leave_error(paths, error, world.rank, EXIT_STOPPED if retry else None)
        finally:
            sys.stderr = usual
    return result.status


def _with_its_cause(error: BaseException, rank: int, peers: Mapping[int, str]) -> BaseException:
    """``error``, or its cause if it is a timeout of waiting for a stopped peer on this machine."""
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


@contextmanager
def report_errors(store: Store, rank: int) -> Iterator[None]:
    """Send an error of this process to the ranks that wait for it in :func:`prepare_on_every_node`.

    Args:
        rank: this process's rank among those that prepare data.
    """
    try:
        yield
    except Exception as error:
        with suppress(RuntimeError):  # rank 0 and its store are gone
            store.set(f"{PREPARED}/{rank}", json.dumps(_status(error)))
        raise


def _status(error: BaseException | None = None) -> dict[str, str]:
    message = "" if error is None else str(error) or type(error).__name__
    return {"error": message, "process": process_identity(os.getpid())}


def prepare_on_every_node(
    world: World, store: Store, prepare: Callable[[], Prepared]
) -> tuple[Prepared, dict[int, str]]:
    """Prepare the data on this node if it does not share rank 0's cache; a collective call.

    It runs before the process group exists, whose timeout must not include it. One process per node works, the others
    wait for the node's lock.

    Args:
        prepare: see :func:`mgpu_pipe.launch.worker.prepared_here`.

    Returns:
        The data, and every rank's process (see :func:`process_identity`).

    Raises:
        BadInputError: the data of any node cannot be prepared or differs from rank 0's.
    """
    status = _status()
    try:
        prepared = prepare()
    except BaseException as error:
        status = _status(error)
        raise
    finally:
        store.set(f"{PREPARED}/{world.rank}", json.dumps(status))
    wait_for(store, [f"{PREPARED}/{rank}" for rank in range(world.world_size)])
    peers = {}
    for rank in range(world.world_size):
        peer_status = json.loads(store.get(f"{PREPARED}/{rank}"))
        if peer_status["error"]:
            raise BadInputError(f"rank {rank}: {peer_status['error']}")
        peers[rank] = peer_status["process"]
    return prepared, peers


def _again(command_line: CommandLine, paths: RunPaths) -> str:
    return command_line.line(paths.root, start=joined_start())


def _this_launch() -> str:
    """ID of the torchrun (or other parent) that started this process; the same after its restarts."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else process_identity(os.getppid())


def _restarted_launch() -> str:
    """The launch whose process torchrun restarted; empty at the first start."""
    return _this_launch() if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else ""
