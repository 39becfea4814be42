"""Process that computes its share of a batch job: ``python -m mgpu_pipe.launch.batch_worker <folder>``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import RunConfig, TrainerConfig
from mgpu_pipe.inference.batch.settings import AnswerSettings, EncodeSettings, JobSettings
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
        compute_in(world, store, settings, config.trainer)

    work_with_others(folder, work, is_live=True)


def compute_in(world: World, store: Store, settings: JobSettings, trainer: TrainerConfig) -> None:
    """Compute this rank's share of the job. A collective call."""
    import torch

    from mgpu_pipe.launch.distributed import process_group

    kind = device_type(trainer)
    with process_group(world, store, kind, LONGEST_WAIT_S):
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
        compute_share(settings, device, world.rank, world.world_size)


def compute_share(settings: JobSettings, device: torch.device | str, rank: int = 0, processes: int = 1) -> None:
    """Open the run and compute the share of this process."""
    import torch

    from mgpu_pipe.inference.batch.answer import answer_prompts
    from mgpu_pipe.inference.batch.encode import encode_texts
    from mgpu_pipe.inference.batch.share import Share
    from mgpu_pipe.inference.model_arguments import silence_transformers
    from mgpu_pipe.inference.open import load_run

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    silence_transformers()
    run = load_run(settings.model, device, settings.frozen_weights, settings.average)
    share = Share(rank, processes)
    if isinstance(settings, EncodeSettings):
        encode_texts(settings, run, share)
    elif isinstance(settings, AnswerSettings):
        answer_prompts(settings, run, share)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_now(0)
