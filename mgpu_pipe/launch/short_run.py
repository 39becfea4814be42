"""A run reduced to a few steps, for measuring: nothing is evaluated, saved, sampled or logged."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from mgpu_pipe.config.schema import RunConfig

UNKNOWN_LENGTH = 1_000_000
"""Schedule length in steps for a run whose length in epochs depends on its data."""


def short_run(config: RunConfig, steps: int, name: str) -> RunConfig:
    """``config`` reduced to its first steps, without evaluation, checkpoints and logging.

    Args:
        name: ``run.name``.
    """
    trainer = replace(
        config.trainer,
        max_steps=steps,
        max_epochs=None,
        max_time=None,
        val_every_n_steps=None,
        sample_every_n_steps=None,
        progress="off",
    )
    texts = ("sample_prompts", "sample_texts")
    total = config.scheduler.total_steps or config.trainer.max_steps or UNKNOWN_LENGTH
    prompts: dict[str, Any] = {option.name: [] for option in fields(config.objective) if option.name in texts}
    return replace(
        config,
        run=replace(config.run, name=name, dir=None),
        data=replace(config.data, validation_max_samples=1),
        objective=replace(config.objective, **prompts),
        scheduler=replace(config.scheduler, total_steps=total),
        checkpoint=replace(
            config.checkpoint, every_n_steps=None, every_n_minutes=None, save_last=False, keep_best=0, resume="none"
        ),
        trainer=trainer,
        eval=replace(config.eval, tasks={}),
        logger={},
        launch=replace(config.launch, max_restarts=0),
    )
