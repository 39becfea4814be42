"""Keys whose ``auto`` or ``max`` a launch replaces by what it plans, before the run's configuration is frozen."""

from __future__ import annotations

from dataclasses import replace

from mgpu_pipe.config.schema import RunConfig

STRATEGY, MICRO_BATCH, SAVES = "strategy", "data.micro_batch_size", "checkpoint.every_n_steps"


def unplanned_keys(config: RunConfig) -> list[str]:
    """Keys of ``config`` that still ask for a plan."""
    asks = {
        STRATEGY: config.strategy.name == "auto",
        MICRO_BATCH: config.data.micro_batch_size == "max",
        SAVES: config.checkpoint.every_n_steps == "auto",
    }
    return [key for key, is_asked in asks.items() if is_asked]


def with_plan_of(config: RunConfig, planned: RunConfig) -> RunConfig:
    """``config`` with the values of ``planned``, the same configuration after planning, for what it asks."""
    keys = unplanned_keys(config)
    if STRATEGY in keys:
        plan = planned.plan
        predicted = replace(config.plan, predicted_seconds=plan.predicted_seconds, predicted_gib=plan.predicted_gib)
        config = replace(config, strategy=planned.strategy, plan=predicted)
    if STRATEGY in keys or MICRO_BATCH in keys:
        config = replace(config, data=replace(config.data, micro_batch_size=planned.data.micro_batch_size))
    if SAVES in keys:
        saves = replace(config.checkpoint, every_n_steps=planned.checkpoint.every_n_steps)
        config = replace(config, checkpoint=saves)
    return config
