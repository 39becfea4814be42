"""``generate --input`` and ``encode``: a batch job of this process, of processes that it starts, or as a rank.

``python -m mgpu_pipe.launch.batch_job <folder>`` is one of the started processes.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import device_type, world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_OK
from mgpu_pipe.inference.batch.settings import AnswerSettings, EncodeSettings, JobSettings, ScoreSettings
from mgpu_pipe.inference.find_model import ModelSource
from mgpu_pipe.launch.process_job import SETTINGS, refuse_other_machines, run_processes
from mgpu_pipe.launch.worker import join_workers, limit_torch_threads
from mgpu_pipe.launch.world import enter, joined_store
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.process_end import exit_now

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from mgpu_pipe.launch.world import World

LONGEST_WAIT_S = 30.0 * 24 * 3600
"""Seconds that a process waits for others, which may have longer texts."""


def run_job(settings: JobSettings, source: ModelSource, config: RunConfig) -> int:
    """Run the job on the configured processes.

    Args:
        config: gives processes and threads.

    Returns:
        The exit code.

    Raises:
        BadInputError: a setting is wrong, or an unfinished job with other settings is there.
    """
    folder, launch, joined = settings.folder(), config.launch, existing_world(os.environ)
    if joined:  # the ranks share the folder of the output and nothing else
        world = enter(joined, config.trainer, config.strategy, launch.threads_per_worker)
        store = joined_store(launch.collective_timeout)
        with folder.locked() if world.rank == 0 else nullcontext():
            if world.rank == 0:
                folder.begin(settings.identity(source))
            _compute_in(world, store, settings, config)
        return EXIT_OK
    refuse_other_machines(config.trainer, launch)
    with folder.locked():
        folder.begin(settings.identity(source))
        processes = world_size(config.trainer, config.strategy)
        if processes == 1:
            _compute_share(settings, settings.device)
            return EXIT_OK
        freeze(config, RunPaths(folder.root).config)
        stopped = f"stopped; the same command resumes from {folder.root}"
        module = "mgpu_pipe.launch.batch_job"
        return run_processes(module, folder.root, settings.to_json(), processes, launch.threads_per_worker, stopped)


def main(folder: Path) -> None:
    """Compute as one process of the job."""
    with join_workers(folder, is_live=True) as (config, world, store):
        settings = JobSettings.from_json((folder / SETTINGS).read_text(encoding="utf-8"))
        _compute_in(world, store, settings, config)


def _compute_in(world: World, store: Store, settings: JobSettings, config: RunConfig) -> None:
    """Compute this rank's share of the job. A collective call."""
    from mgpu_pipe.launch.process_group import process_group
    from mgpu_pipe.topology import ParallelDims

    with process_group(world, store, device_type(config.trainer), LONGEST_WAIT_S) as device:
        if ParallelDims.resolve(config.strategy, world.world_size).cuts_the_model:
            assert isinstance(settings, AnswerSettings)
            _answer_together(settings, config, device)
        else:
            _compute_share(settings, device, world.rank, world.world_size)


def _answer_together(settings: AnswerSettings, config: RunConfig, device: torch.device) -> None:
    """Answer prompts with a model of which this rank holds a part. A collective call."""
    from mgpu_pipe.inference.batch.answer import answer_prompts
    from mgpu_pipe.inference.batch.share import Share
    from mgpu_pipe.inference.find_model import find_model
    from mgpu_pipe.inference.model_arguments import silence_transformers
    from mgpu_pipe.inference.open import LoadedRun
    from mgpu_pipe.inference.parallel_run import EncoderDecoderForward, evaluation_config, open_parallel

    limit_torch_threads()
    silence_transformers()
    source = find_model(settings.model)
    parallel = open_parallel(source, evaluation_config(source, config), device)
    model, forward = parallel.model, parallel.forward
    if model.config.is_encoder_decoder:
        forward = forward or EncoderDecoderForward(model)
    run = LoadedRun(model, source.folder, source.tokenizer, source.config, None, source.is_trusted)
    share = Share(parallel.share, parallel.shares, parallel.is_share_first)
    answer_prompts(settings, run, share, forward, is_cut=True)


def _compute_share(settings: JobSettings, device: torch.device | str, rank: int = 0, processes: int = 1) -> None:
    """Open the run and compute the share of this process."""
    from mgpu_pipe.inference.batch.answer import answer_prompts
    from mgpu_pipe.inference.batch.encode import encode_texts
    from mgpu_pipe.inference.batch.pair_scorer import score_rows
    from mgpu_pipe.inference.batch.share import Share
    from mgpu_pipe.inference.model_arguments import silence_transformers
    from mgpu_pipe.inference.open import load_run

    limit_torch_threads()
    silence_transformers()
    run = load_run(settings.model, device, settings.frozen_weights, settings.average)
    share = Share(rank, processes)
    if isinstance(settings, EncodeSettings):
        encode_texts(settings, run, share)
    elif isinstance(settings, ScoreSettings):
        score_rows(settings, run, share)
    elif isinstance(settings, AnswerSettings):
        answer_prompts(settings, run, share)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_now(0)
