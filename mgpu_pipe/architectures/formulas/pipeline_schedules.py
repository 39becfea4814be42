"""Pipeline schedules: the stages of each rank, and the numbers of micro-batches that they accept.

Sources: GPipe (Huang et al. 2019, arXiv:1811.06965); 1F1B and its interleaved form (Narayanan et al. 2021,
arXiv:2104.04473, section 2.2); zero bubble, ZB-H1 interleaved and ZB-V (Qi et al. 2024, arXiv:2401.10241, and
arXiv:2405.15362); DualPipeV (the V-shaped half of DualPipe, DeepSeek-V3, arXiv:2412.19437, section 3.2.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mgpu_pipe.config.group_keys import StrategyConfig

StagesPerRank = int | Literal["auto"]
"""``auto`` is the least number that the schedule allows."""


@dataclass(frozen=True)
class ScheduleTraits:
    """Fixed properties of a schedule.

    Attributes:
        stages_per_rank: number of stages that a rank holds; with ``more_stages``, the least number.
        v_shaped: a rank's second stage counts from the end, so that the first rank holds the first and the last one.
        splits_backward: gradients of inputs and of weights are separate passes; torch then refuses compiled modules.
    """

    stages_per_rank: int = 1
    more_stages: bool = False
    v_shaped: bool = False
    splits_backward: bool = False


SCHEDULES = {
    "gpipe": ScheduleTraits(),
    "1f1b": ScheduleTraits(),
    "interleaved_1f1b": ScheduleTraits(2, more_stages=True),
    "interleaved_zero_bubble": ScheduleTraits(2, more_stages=True, splits_backward=True),
    "zbv": ScheduleTraits(2, v_shaped=True, splits_backward=True),
    "dualpipev": ScheduleTraits(2, v_shaped=True, splits_backward=True),
}
"""The values of ``strategy.pipeline.schedule``."""


def splits_backward(strategy: StrategyConfig) -> bool:
    """Whether a pipeline of ``strategy`` computes gradients of inputs and of weights separately."""
    schedule = SCHEDULES.get(strategy.pipeline.schedule)  # none of an unknown name, which the checks refuse
    return strategy.pp != 1 and schedule is not None and schedule.splits_backward


def stages_by_rank(schedule: str, ranks: int, stages_per_rank: StagesPerRank = "auto") -> tuple[tuple[int, ...], ...]:
    """The stages that every rank holds, ascending: looped (``r, r + ranks, ...``) or V-shaped (``r, last - r``)."""
    traits = SCHEDULES[schedule]
    each = traits.stages_per_rank if stages_per_rank == "auto" else stages_per_rank
    if traits.v_shaped:
        return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
    return tuple(tuple(rank + turn * ranks for turn in range(each)) for rank in range(ranks))


def rounds(ranks: int, micro_batches: int) -> int:
    """Rounds in which interleaved schedules take the micro-batches."""
    return max(1, micro_batches // ranks)


def micro_batches_fit(schedule: str, ranks: int, micro_batches: int) -> bool:
    """Whether torch's schedule takes that many micro-batches on that many ranks."""
    if schedule == "1f1b":
        return micro_batches >= ranks
    if schedule == "dualpipev":
        return micro_batches >= 2 * ranks
    if schedule.startswith("interleaved"):
        return micro_batches >= 1 and micro_batches % rounds(ranks, micro_batches) == 0
    return micro_batches >= 1
