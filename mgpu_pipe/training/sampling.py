"""Samples of a language model while it trains (``trainer.sample_every_n_steps``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.inference.samples import make_samples
from mgpu_pipe.runs.samples_file import append_samples, cut_samples_after
from mgpu_pipe.strategies.base import EngineStrategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def sampler(
    config: RunConfig,
    paths: RunPaths,
    prepared: Prepared,
    model: PreTrainedModel,
    strategy: EngineStrategy,
    start_step: int,
) -> Callable[[int], None] | None:
    """Writes samples of the model as it is, every so many steps; None where none are wanted."""
    every, folder = config.trainer.sample_every_n_steps, prepared.tokenizer_folder
    if dist.get_rank() == 0:
        cut_samples_after(paths.samples, start_step)
    if every is None or folder is None:
        return None

    def sample(step: int) -> None:
        alone = strategy.holds_whole_model
        if step % every == 0 and (dist.get_rank() == 0 or not alone):
            forward = strategy.sampling_forward()
            # a compilation for other shapes than the training's would change the training's own
            with torch.compiler.set_stance("force_eager"):
                made = make_samples(config, model, folder, prepared, together=not alone, forward=forward)
            strategy.sampled()
            if dist.get_rank() == 0:
                append_samples(paths.samples, step, made)

    return sample
