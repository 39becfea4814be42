"""Entry point of a worker: ``python -m mgpu_pipe.launch.worker <run folder>``.

It reads the run's frozen configuration and never composes. It binds its life to the launcher's and installs the stop
flag before any slow import.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO, cast

from mgpu_pipe.config.hub import is_at_commit
from mgpu_pipe.config.paths import RunPaths, cache_folder
from mgpu_pipe.config.resolve import unplanned_keys
from mgpu_pipe.errors import EXIT_OK, EXIT_STOPPED, DataError, MgpuError, conceal, one_line, print_line, print_text
from mgpu_pipe.import_path import allow_own_classes
from mgpu_pipe.launch import signals as stop
from mgpu_pipe.launch.failure import write_error
from mgpu_pipe.launch.workers import INHERITED_FDS, LIVE_FD, RESUME
from mgpu_pipe.system.process_end import Lifeline, exit_now
from mgpu_pipe.system.standard_streams import print_logs_safely

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from mgpu_pipe.config.schema import RunConfig
    from mgpu_pipe.data.samples import Prepared
    from mgpu_pipe.inference.during_training import Sample
    from mgpu_pipe.launch.world import World
    from mgpu_pipe.training.attempt import TrainResult


NODE_LOCK = "node.lock"


def main(folder: Path) -> int:
    """Train in the world that the launcher's variables describe; returns the exit code."""
    lifeline = Lifeline.attach(os.environ)
    stop.install(second_leaves=False)
    _set_up_streams()
    print_logs_safely()
    from mgpu_pipe.launch.world import World, launcher_store

    paths, world = RunPaths(folder), World.from_environment(os.environ)
    try:
        import_all()
        allow_own_classes()
        if lifeline is not None:
            lifeline.wait_for_go()
        from mgpu_pipe.config.freeze import load

        config = load(paths.config)
        resume = os.environ.get(RESUME)
        store = launcher_store(world, config.launch.collective_timeout)
        prepared = prepared_here(config, paths)
        result = train_in(world, config, paths, prepared, store, resume=Path(resume) if resume else None)
    except BaseException as error:
        leave_error(paths, error, world.rank)
    return EXIT_STOPPED if result.status == "stopped" else EXIT_OK


@contextmanager
def join_workers(folder: Path, *, is_live: bool = False) -> Iterator[tuple[RunConfig, World, Store]]:
    """Join the processes that the launcher started; yields the configuration in ``folder``, the world and its store.

    An error inside is written for the supervisor and ends the process.

    Args:
        is_live: rank 0 writes to the launcher's standard error.
    """
    lifeline = Lifeline.attach(os.environ)
    from mgpu_pipe.config.freeze import load
    from mgpu_pipe.launch.world import World, launcher_store

    paths, world = RunPaths(folder), World.from_environment(os.environ)
    try:
        allow_own_classes()
        if lifeline is not None:
            lifeline.wait_for_go()
        if is_live and world.rank == 0:
            sys.stderr = live_stream() or sys.stderr
        config = load(paths.config)
        yield config, world, launcher_store(world, config.launch.collective_timeout)
    except BaseException as error:
        leave_error(paths, error, world.rank)


def leave_error(paths: RunPaths, error: BaseException, rank: int, code: int | None = None) -> NoReturn:
    """Pass ``error`` to the launcher and exit with its code (or ``code``), without clean-up, which peers cannot
    join."""
    write_error(paths.rank_error(rank), error, rank)
    with suppress(OSError):  # a full disk takes no log either
        if isinstance(error, MgpuError):
            print_line(f"error: rank {rank}: {one_line(error)}", file=sys.stderr)
        else:
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            print_text(conceal(trace), end="", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(getattr(error, "exit_code", 1) if code is None else code)


def train_in(
    world: World, config: RunConfig, paths: RunPaths, prepared: Prepared, store: Store, *, resume: Path | None
) -> TrainResult:
    """Train in ``world``; rank 0 writes the summary. A collective call.

    Args:
        prepared: the data on this node.
        store: store of the process group.
        resume: step folder to resume from.
    """
    started = time.monotonic()
    if keys := unplanned_keys(config.strategy, config.data, config.checkpoint):
        raise AssertionError(f"no launch planned {', '.join(keys)}")
    import torch

    from mgpu_pipe.config.resolve import device_type
    from mgpu_pipe.inference.during_training import INFERENCE
    from mgpu_pipe.launch.process_group import process_group
    from mgpu_pipe.launch.world import keep_traces_in
    from mgpu_pipe.training.loggers import log_samples
    from mgpu_pipe.training.train import train

    if config.trainer.deterministic:  # cuBLAS reads it at first use; without it torch refuses its kernels
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device_type(config.trainer) == "cuda":
        keep_traces_in(paths.logs)
    limit_torch_threads()
    live = live_stream() if world.rank == 0 else None
    with process_group(world, store, device_type(config.trainer), config.launch.collective_timeout) as device:
        usual, sys.stderr = sys.stderr, live or sys.stderr
        try:
            result = train(
                config, paths, prepared, stop_requested=stop.stop_requested, resume=resume, inference=INFERENCE
            )
        finally:
            sys.stderr = usual
        samples = [] if result.whole_model else _make_samples(config, result, prepared, device)
    if world.rank == 0:
        if result.whole_model:
            result.model = None  # type: ignore[assignment]  # free its memory for the saved model
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            samples = _make_samples(config, result, prepared, device)
        every = config.trainer.sample_every_n_steps
        if every is None or result.step % every:  # otherwise they were logged at the end of the step
            log_samples(result.loggers, result.step, samples)
        _write_summary(world, paths, result, samples, time.monotonic() - started)
    return result


def limit_torch_threads() -> None:
    """Let torch compute on the threads that the launcher chose."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))


def _write_summary(world: World, paths: RunPaths, result: TrainResult, samples: list[Sample], seconds: float) -> None:
    """Write the summary; the launcher replaces ``wall_s`` by the whole command's time."""
    from mgpu_pipe.runs.history import write_summary

    known = {
        "status": result.status,
        "step": result.step,
        "world_size": world.world_size,
        **result.summary,
        "metrics": result.metrics,
        "wall_s": seconds,
        "attempts": world.attempt,
        "samples": samples,
    }
    write_summary(paths, known)


def prepared_here(config: RunConfig, paths: RunPaths) -> Prepared:
    """The data that the launcher prepared; a node without its cache prepares it again, which may take long.

    One process of the node fetches a model from the Hub.

    Raises:
        DataError: this node's files differ from rank 0's.
    """
    from mgpu_pipe.data.cache import hold_lock, writing_to_cache
    from mgpu_pipe.data.prepare_data import prepare, read_prepared
    from mgpu_pipe.launch.preparing import fetch_model

    prepared = read_prepared(json.loads(paths.data.read_text(encoding="utf-8")))
    cache = cache_folder(config.data.cache_dir)
    if config.model.path is not None and is_at_commit(config.model.path):
        with writing_to_cache(cache), hold_lock(cache / NODE_LOCK):
            fetch_model(config.model)
    if prepared.is_here():
        return prepared
    print_line("preparing the data on this node, which has no part in rank 0's cache", file=sys.stderr, flush=True)
    with writing_to_cache(cache), hold_lock(cache / NODE_LOCK):  # one process of the node works, the others wait
        here = prepare(config)
    if here.digest != prepared.digest:
        named = f"data.source={config.data.source}"
        raise DataError(f"{named}: the data on this node is not rank 0's; give all nodes the same files")
    return here


def _make_samples(config: RunConfig, result: TrainResult, prepared: Prepared, device: torch.device) -> list[Sample]:
    """Continuations of the prompts at the end of a run; of a sharded model a collective call."""
    from mgpu_pipe.inference.during_training import make_samples, shows_samples
    from mgpu_pipe.inference.open import load_run

    if not shows_samples(config.objective) or result.status != "finished":
        return []
    if not result.whole_model:
        folder, forward = prepared.tokenizer_folder, result.sampling_forward
        return make_samples(config, result.model, folder, prepared, together=True, forward=forward)
    if result.checkpoint is None:
        return []
    run = load_run(result.checkpoint, device)
    return make_samples(config, run.model, run.tokenizer_folder, prepared)


def import_all() -> None:
    """Import the modules of training during the preparation; garbage collection would take a tenth of the time."""
    gc.disable()
    import mgpu_pipe.data.text.prepare_text
    import mgpu_pipe.training.mesh
    import mgpu_pipe.training.train  # noqa: F401

    gc.freeze()
    gc.enable()


def _set_up_streams() -> None:
    """Make standard streams line buffered, and keep the run's lock from child programs."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable()
    for fd in filter(None, os.environ.get(INHERITED_FDS, "").split(",")):
        os.set_inheritable(int(fd), False)


def live_stream() -> TextIO | None:
    """Stream for progress, created after the imports so that libraries' log handlers keep the log."""
    if LIVE_FD not in os.environ:
        return None
    from mgpu_pipe.launch.preparing import LiveStream

    fd, log = int(os.environ[LIVE_FD]), sys.stderr
    os.set_inheritable(fd, False)

    def to_log(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        print_text(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or log)

    warnings.showwarning = to_log
    return cast(TextIO, LiveStream(log, fd))


if __name__ == "__main__":
    exit_now(main(Path(sys.argv[1])))
