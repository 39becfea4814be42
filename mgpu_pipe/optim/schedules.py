"""Learning-rate schedules: pure functions of the optimizer step, so a resume needs no schedule state."""

from __future__ import annotations

import math
from collections.abc import Callable

from mgpu_pipe.config.schema import SchedulerConfig

WSD_DECAY_SHARE = 0.1


def build_schedule(config: SchedulerConfig, total_steps: int) -> Callable[[int], float]:
    """Function that returns the factor of the peak learning rate at a zero-based optimizer step.

    After ``warmup`` steps of linear warm-up (step 0 takes ``1 / warmup`` of the peak): ``constant``;
    ``linear`` or ``cosine`` (Loshchilov and Hutter 2017, arXiv:1608.03983) down to ``min_lr_ratio`` at the horizon;
    ``wsd`` (Hu et al. 2024, arXiv:2404.06395): stable, then linear over the last ``decay_steps``. Steps beyond the
    horizon keep the final value.
    """
    warmup, floor = config.warmup(total_steps), config.min_lr_ratio
    decay = config.decay_steps if config.decay_steps is not None else max(1, round(total_steps * WSD_DECAY_SHARE))

    def share_left(step: int, start: int) -> float:
        span = max(1, total_steps - start)
        return min(1.0, max(0.0, (total_steps - step) / span))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.name == "constant":
            return 1.0
        if config.name == "wsd":
            return floor + (1 - floor) * share_left(step, max(warmup, total_steps - decay))
        left = share_left(step, warmup)
        if config.name == "cosine":
            left = 0.5 * (1 + math.cos(math.pi * (1 - left)))
        return floor + (1 - floor) * left

    return factor
