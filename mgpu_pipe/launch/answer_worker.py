"""Process that answers its share of a file of prompts: ``python -m mgpu_pipe.launch.answer_worker <folder>``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.inference.batch.settings import BatchSettings
from mgpu_pipe.launch.inference_world import SETTINGS
from mgpu_pipe.launch.worker import work_with_others
from mgpu_pipe.system.process_end import exit_now

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from mgpu_pipe.launch.distributed import World

LONGEST_WAIT_S = 30.0 * 24 * 3600
"""Seconds that a process waits for others, which may have longer prompts."""


def main(folder: Path) -> None:
    """Answer as one process of the job."""

    def work(config: RunConfig, world: World, store: Store) -> None:
        settings = BatchSettings.from_json((folder / SETTINGS).read_text(encoding="utf-8"))
        answer_in(world, store, settings, config)

    work_with_others(folder, work, is_live=True)


def answer_in(world: World, store: Store, settings: BatchSettings, config: RunConfig) -> None:
    """Answer this rank's share of the file. A collective call."""
    import torch

    from mgpu_pipe.launch.distributed import process_group

    kind = device_type(config)
    with process_group(world, store, kind, LONGEST_WAIT_S):
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
        answer_share(settings, device, world.rank, world.world_size)


def answer_share(settings: BatchSettings, device: torch.device | str, rank: int = 0, processes: int = 1) -> None:
    """Open the run and answer the share of this process."""
    import torch

    from mgpu_pipe.inference.batch.answer import Share, answer_prompts
    from mgpu_pipe.inference.model_arguments import silence_transformers
    from mgpu_pipe.inference.open import load_run

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    silence_transformers()
    run = load_run(settings.model, device, settings.frozen_weights, settings.average)
    answer_prompts(settings, run, Share(rank, processes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_now(0)
