"""Processes of this machine that compute a job with others and save no step: how they are started and how they end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import LaunchConfig, RunConfig, TrainerConfig
from mgpu_pipe.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK, BadInputError, ConfigError, print_line, print_text
from mgpu_pipe.import_path import python_module
from mgpu_pipe.launch.signals import SignalInbox
from mgpu_pipe.launch.supervisor import Outcome, supervise
from mgpu_pipe.launch.worker import limit_torch_threads
from mgpu_pipe.launch.workers import WorkerPlan
from mgpu_pipe.launch.world import World
from mgpu_pipe.system.child_process import bind_command
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.standard_streams import live_descriptor

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from mgpu_pipe.inference.batch.job_folder import Share
    from mgpu_pipe.inference.batch.settings import JobSettings
    from mgpu_pipe.inference.harness.harness_settings import HarnessSettings
    from mgpu_pipe.inference.open import LoadedRun

SETTINGS = "settings.json"
STOP_TIMEOUT_S = 5.0
"""Short, because there is nothing to save at the end."""


def refuse_other_machines(trainer: TrainerConfig, launch: LaunchConfig) -> None:
    """Raise ConfigError for several nodes or a scheduler where no world was joined."""
    wanted = {"trainer.num_nodes": (trainer.num_nodes, 1), "launch.type": (launch.type, "local")}
    for key, (value, here) in wanted.items():
        if value != here:
            fix, reason = "start it there, by srun or torchrun", "this command starts processes on this machine only"
            raise ConfigError(key, value, fix, reason)


def supervise_module(
    module: str,
    folder: Path,
    *arguments: str,
    processes: int,
    threads: int | Literal["auto"],
    inbox: SignalInbox,
    live: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Run ``python -m module folder arguments`` as ``processes`` workers of this machine, to their end.

    Args:
        threads: ``launch.threads_per_worker``.
        live: descriptor to which rank 0 also writes its standard error.
        variables: more variables of the workers.
    """
    world = World.on_this_machine(processes)
    plan = WorkerPlan(
        argv=python_module(module, str(folder), *arguments),
        world=world,
        paths=RunPaths(folder),
        environment={**world.thread_environment(threads), **(variables or {})},
        live_fd=live,
    )
    return supervise(plan, inbox, stop_timeout=STOP_TIMEOUT_S)


def run_processes(
    module: str, folder: Path, settings: str, processes: int, threads: int | Literal["auto"], if_stopped: str
) -> int:
    """Run ``python -m module folder`` as ``processes`` workers, to their end; returns the exit code.

    Args:
        folder: holds the frozen configuration.
        settings: text that the processes read from :data:`SETTINGS` in ``folder``.
        threads: ``launch.threads_per_worker``.
        if_stopped: what to print where a signal stopped them.
    """
    replace_file(folder / SETTINGS, settings)
    with live_descriptor() as live, SignalInbox() as inbox:
        outcome = supervise_module(module, folder, processes=processes, threads=threads, inbox=inbox, live=live)
    if outcome.status == "finished":
        return EXIT_OK
    if outcome.failure is not None:
        print_text(outcome.failure.show(), file=sys.stderr)
    else:
        print_line(if_stopped, file=sys.stderr)
    return outcome.exit_code or EXIT_FAILURE


@contextmanager
def temporary_folder(subject: str) -> Iterator[Path]:
    """Folder of a job; a ``TemporaryDirectory`` would be removed by a forked worker, too."""
    folder = Path(tempfile.mkdtemp(prefix=f"mgpu-pipe-{subject}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class ModelShare:
    """A job's model in this process.

    Attributes:
        share: the part of the job's work that this process computes.
        forward: replaces the model's forward pass on whole texts; None for the model's own.
        is_cut: whether this process holds a part of the model alone.
    """

    run: LoadedRun
    share: Share
    forward: Callable[..., Any] | None = None
    is_cut: bool = False


@contextmanager
def opened_share(
    world: World, store: Store, config: RunConfig, settings: JobSettings | HarnessSettings, wait_s: float
) -> Iterator[ModelShare]:
    """Open the model of a job as a rank of ``world``: whole, or the part that ``config`` gives this rank.

    Collective calls.

    Args:
        wait_s: seconds that a process waits for the others.
    """
    from mgpu_pipe.inference.batch.job_folder import Share
    from mgpu_pipe.inference.find_model import find_model
    from mgpu_pipe.inference.model_arguments import silence_transformers
    from mgpu_pipe.inference.open import LoadedRun
    from mgpu_pipe.inference.parallel_run import evaluation_config, open_parallel
    from mgpu_pipe.launch.process_group import process_group
    from mgpu_pipe.topology import ParallelDims

    limit_torch_threads()
    with process_group(world, store, device_type(config.trainer), wait_s) as device:
        if not ParallelDims.resolve(config.strategy, world.world_size).cuts_the_model:
            yield open_whole(settings, device, world.rank, world.world_size)
            return
        silence_transformers()
        source = find_model(settings.model)
        part = open_parallel(source, evaluation_config(source, config), device)
        run = LoadedRun(part.model, source.folder, source.tokenizer, source.config, None, source.is_trusted)
        yield ModelShare(run, Share(part.share, part.shares, part.is_share_first), part.forward, is_cut=True)


def open_whole(
    settings: JobSettings | HarnessSettings, device: torch.device | str, rank: int = 0, processes: int = 1
) -> ModelShare:
    """Open the whole model of a job in this process."""
    from mgpu_pipe.inference.batch.job_folder import Share
    from mgpu_pipe.inference.model_arguments import silence_transformers
    from mgpu_pipe.inference.open import load_run

    limit_torch_threads()
    silence_transformers()
    run = load_run(settings.model, device, settings.frozen_weights, settings.average)
    return ModelShare(run, Share(rank, processes))


TRACER = "mgpu_pipe.training.tracing.trace_rank"
ERROR = "error: "


def trace_ranks(ranks: Sequence[int], world: int, words: Sequence[str], model_type: str) -> list[dict[str, Any]]:
    """The traces of ``ranks`` of a world of ``world``.

    Args:
        words: options and overrides that compose the layout.
        model_type: of the model, for an error.

    Raises:
        BadInputError: the fake GPU cannot be made here.
        ConfigError: the model does not run on fake tensors.
    """

    def trace(rank: int) -> dict[str, Any]:
        command = bind_command(python_module(TRACER, str(rank), str(world), *words))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
            if done.returncode == EXIT_BAD_INPUT:
                raise BadInputError(last.removeprefix(ERROR))
            reason = f"this model does not run on fake tensors: {last}"
            raise ConfigError("model.type", model_type, "plan without --trace", reason)
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return figures

    with ThreadPoolExecutor(max(1, min(len(ranks), os.cpu_count() or 1))) as pool:
        return list(pool.map(trace, ranks))
