"""Process that computes its share of a batch job: ``python -m mgpu_pipe.launch.batch_worker <folder>``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.inference.batch.settings import AnswerSettings, EncodeSettings, JobSettings, ScoreSettings
from mgpu_pipe.launch.inference_world import SETTINGS
from mgpu_pipe.launch.worker import work_with_others
from mgpu_pipe.system.process_end import exit_now

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from mgpu_pipe.launch.distributed import World

LONGEST_WAIT_S = 30.0 * 24 * 3600
"""Seconds that a process waits for others, which may have longer texts."""


def main(folder: Path) -> None:
    """Compute as one process of the job."""

    def work(config: RunConfig, world: World, store: Store) -> None:
        settings = JobSettings.from_json((folder / SETTINGS).read_text(encoding="utf-8"))
        compute_in(world, store, settings, config)

    work_with_others(folder, work, is_live=True)


def compute_in(world: World, store: Store, settings: JobSettings, config: RunConfig) -> None:
    """Compute this rank's share of the job. A collective call."""
    import torch

    from mgpu_pipe.launch.distributed import process_group
    from mgpu_pipe.topology import ParallelDims

    kind = device_type(config.trainer)
    with process_group(world, store, kind, LONGEST_WAIT_S):
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
        if ParallelDims.resolve(config.strategy, world.world_size).cuts_the_model:
            assert isinstance(settings, AnswerSettings)
            _answer_together(settings, config, device)
        else:
            compute_share(settings, device, world.rank, world.world_size)


def _answer_together(settings: AnswerSettings, config: RunConfig, device: torch.device) -> None:
    """Answer prompts with a model of which this rank holds a part. A collective call."""
    from functools import partial

    from mgpu_pipe.inference.batch.answer import answer_prompts
    from mgpu_pipe.inference.batch.share import Share
    from mgpu_pipe.inference.find_model import find_model
    from mgpu_pipe.inference.generation import encoder_decoder_forward
    from mgpu_pipe.inference.model_arguments import silence_transformers
    from mgpu_pipe.inference.open import LoadedRun
    from mgpu_pipe.inference.parallel_run import evaluation_config, open_parallel

    _limit_threads()
    silence_transformers()
    source = find_model(settings.model)
    parallel = open_parallel(source, evaluation_config(source, config), device)
    model, forward = parallel.model, parallel.forward
    if model.config.is_encoder_decoder:  # generate() cannot call the encoder of a sharded model alone
        forward = forward or partial(encoder_decoder_forward, model)
    run = LoadedRun(model, source.folder, source.tokenizer, source.config, None, source.is_trusted)
    answer_prompts(settings, run, Share(parallel.share, parallel.shares, parallel.is_share_first), forward)


def _limit_threads() -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))


def compute_share(settings: JobSettings, device: torch.device | str, rank: int = 0, processes: int = 1) -> None:
    """Open the run and compute the share of this process."""
    from mgpu_pipe.inference.batch.answer import answer_prompts
    from mgpu_pipe.inference.batch.encode import encode_texts
    from mgpu_pipe.inference.batch.score import score_rows
    from mgpu_pipe.inference.batch.share import Share
    from mgpu_pipe.inference.model_arguments import silence_transformers
    from mgpu_pipe.inference.open import load_run

    _limit_threads()
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
