"""``strategy=auto``: the planner's fastest layout of a run's processes, frozen into the configuration."""

from __future__ import annotations

import shlex
from dataclasses import replace

from mgpu_pipe.checks.notices import Notice
from mgpu_pipe.checks.plan_layouts import plan_layouts
from mgpu_pipe.config.resolve import devices_per_node
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.planning.hardware_profile import GIB

AUTO = "auto"
TRIED = 8
"""Fastest layouts of which the first is taken that fits by the high figure of its memory too."""


def with_planned_strategy(config: RunConfig) -> tuple[RunConfig, list[Notice]]:
    """``config`` of ``strategy=auto`` with the planned strategy and micro-batch, and a notice that says which.

    Raises:
        ConfigError: no layout fits, or the planner does not know the model, the objective or the hardware.
    """
    trainer = replace(config.trainer, devices=devices_per_node(config.trainer, config.strategy))
    plan = replace(config.plan, gpus=[], rows=TRIED, rank_by="speed", hardware=config.plan.hardware[:1])
    try:
        plans, _ = plan_layouts(replace(config, trainer=trainer, plan=plan))
    except ConfigError as error:
        if error.key == "plan.hardware":
            raise
        fix = f"{error.fix.replace('plan.gpus=', 'trainer.devices=')}; or choose a strategy, such as strategy=fsdp"
        raise ConfigError("strategy", AUTO, fix, error.reason) from None
    best = next((each for each in plans if not each.is_tight), plans[0])
    predicted = replace(config.plan, predicted_seconds=best.seconds, predicted_gib=best.memory.allocated / GIB)
    planned = replace(config, strategy=best.config.strategy, data=best.config.data, plan=predicted)
    text = (
        f"auto is {shlex.join(best.layout.overrides)}; predicted: {best.seconds:.3g} s a step and "
        f"{best.memory.likely / GIB:.3g} GiB a process on {best.profile.name}"
    )
    return planned, [Notice("strategy", text)]
