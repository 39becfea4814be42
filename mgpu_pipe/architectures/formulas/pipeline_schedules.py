"""Pipeline schedules: the stages of each rank, the numbers of micro-batches that they accept, and layers of stages.

Sources: GPipe (Huang et al. 2019, arXiv:1811.06965); 1F1B and its interleaved form (Narayanan et al. 2021,
arXiv:2104.04473, section 2.2); zero bubble, ZB-H1 interleaved and ZB-V (Qi et al. 2024, arXiv:2401.10241, and
arXiv:2405.15362); DualPipeV (the V-shaped half of DualPipe, DeepSeek-V3, arXiv:2412.19437, section 3.2.1).

Layers are split by forward FLOPs per token. An embedding's lookup multiplies nothing. Only ratios matter: a backward
pass costs twice the forward pass everywhere. The cost of a vision-language model's tower depends on the pictures and
is ignored.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mgpu_pipe.architectures.formulas.flops import Shape, attention_forward_flops, forward_flops
from mgpu_pipe.architectures.formulas.parameters import (
    embedding_parameters,
    final_norm_parameters,
    has_exact_sizes,
    head_parameters,
    layer_counts,
)
from mgpu_pipe.architectures.formulas.towers import vision_parameters
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


@dataclass(frozen=True)
class LayerCosts:
    """Forward FLOPs per token, and parameters, of a model's parts in order."""

    embedding: float
    layers: tuple[float, ...]
    head: float
    embedding_parameters: int = 0
    layer_parameters: tuple[int, ...] = ()
    head_parameters: int = 0
    norm_parameters: int = 0
    tied: bool = False
    """Whether the head's weight is the embedding's."""
    is_exact: bool = True
    """Whether parameters are exact, not estimated from a layer's usual shape."""
    sees: bool = False
    """Whether the first stage also has the vision parts, whose work is not counted."""

    @property
    def total(self) -> float:
        return self.embedding + sum(self.layers) + self.head

    def stage(self, layers: range) -> float:
        """Cost of a stage with ``layers``."""
        first, last = layers.start == 0, layers.stop == len(self.layers)
        return self.embedding * first + sum(self.layers[layers.start : layers.stop]) + self.head * last


@dataclass(frozen=True)
class StageContent:
    """Content of a stage, for ``check``."""

    stage: int
    rank: int
    layers: range
    parameters: int | None
    """None if unknown."""
    share: float
    """Share of all FLOPs."""
    first: bool
    last: bool
    sees: bool = False
    """As in :class:`LayerCosts`."""

    def describe(self) -> str:
        """Description such as ``stage 0 on rank 0: embedding, layers 0-3, 1.2M parameters, 24% of the work``."""
        layers = f"layer {self.layers.start}" if len(self.layers) == 1 else f"layers {self.layers[0]}-{self.layers[-1]}"
        before = [*["vision", "projector"] * self.sees, "embedding"] * self.first
        parts = [*before, layers, *["norm and head"] * self.last]
        parts += [] if self.parameters is None else [f"{self.parameters / 1e6:.3g}M parameters"]
        whose = "language model's " if self.sees else ""
        return f"stage {self.stage} on rank {self.rank}: {', '.join(parts)}, {self.share:.0%} of the {whose}work"


def layer_costs(fields: Mapping[str, Any], seq_len: int) -> LayerCosts:
    """Costs of a causal language model from its configuration's fields (see :func:`models.fields.resolved_fields`)."""
    shape = Shape.from_fields(fields)
    attention = attention_forward_flops(shape, seq_len)
    layers = layer_counts(fields)
    vision = vision_parameters(fields)
    return LayerCosts(
        embedding=2.0 * shape.width,
        layers=tuple(forward_flops(layer.active) + attention for layer in layers),
        head=forward_flops(head_parameters(fields)),
        embedding_parameters=embedding_parameters(fields) + (0 if vision is None else vision.total),
        layer_parameters=tuple(layer.total for layer in layers),
        head_parameters=head_parameters(fields),
        norm_parameters=final_norm_parameters(fields),
        tied=bool(fields.get("tie_word_embeddings")),
        is_exact=has_exact_sizes(fields),
        sees=isinstance(fields.get("vision_config"), Mapping),
    )


def stage_layers(costs: LayerCosts, stages: int, by_hand: Sequence[int] | None = None) -> tuple[range, ...]:
    """Layers of every stage: consecutive, at least one each, with the cheapest costliest stage.

    Among equal cuts the one with the least sum of squared costs wins, which balances the other stages.

    Args:
        by_hand: given number of layers of every stage.

    Raises:
        ValueError: more stages than layers, or numbers that do not fit (``check`` reports it with a fix).
    """
    layers = len(costs.layers)
    if by_hand is not None:
        if len(by_hand) != stages or sum(by_hand) != layers or min(by_hand) < 1:
            raise ValueError(f"{list(by_hand)} does not cut {layers} layers into {stages} stages")
        ends = [sum(by_hand[: index + 1]) for index in range(stages)]
        return tuple(range(end - count, end) for end, count in zip(ends, by_hand, strict=True))
    if stages > layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages")
    sums = [0.0, *itertools.accumulate(costs.layers)]
    # best[stop]: (costliest stage, sum of squares, start of the last stage) of the first stages' best cut.
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for stage in range(1, stages + 1):
        row: dict[int, tuple[float, float, int]] = {}
        for stop in range(stage, layers - (stages - stage) + 1):
            options = []
            for start, (worst, squares, _) in best[-1].items():
                if start < stop:
                    cost = sums[stop] - sums[start] + costs.embedding * (start == 0) + costs.head * (stop == layers)
                    options.append((max(worst, cost), squares + cost * cost, start))
            row[stop] = min(options)
        best.append(row)
    cuts = [layers]
    for row in reversed(best[1:]):
        cuts.append(row[cuts[-1]][2])
    cuts.reverse()
    return tuple(range(start, stop) for start, stop in itertools.pairwise(cuts))


def stage_contents(costs: LayerCosts, layers: Sequence[range], ranks_of_stages: Sequence[int]) -> list[StageContent]:
    """Content of every stage.

    Args:
        ranks_of_stages: pipeline rank of every stage.
    """
    contents = []
    for stage, (stage_range, rank) in enumerate(zip(layers, ranks_of_stages, strict=True)):
        first, last = stage == 0, stage == len(layers) - 1
        # A tied head is a separate copy, unless the embedding is on the same rank.
        shares = last and costs.tied and rank == ranks_of_stages[0]
        parameters = sum(costs.layer_parameters[stage_range.start : stage_range.stop])
        parameters += costs.embedding_parameters * first
        parameters += (costs.norm_parameters + (0 if shares else costs.head_parameters)) * last
        share, known = costs.stage(stage_range) / costs.total, parameters if costs.is_exact else None
        contents.append(StageContent(stage, rank, stage_range, known, share, first, last, costs.sees))
    return contents
