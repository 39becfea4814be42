"""The layout that ``plan --trace`` runs: the plan's first, or the one that was typed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mgpu_pipe.checks.check_sizes import size_errors
from mgpu_pipe.checks.plan_layouts import PlannedRun, first_processes
from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.planning.memory import MemoryPlan, memory_by_rank
from mgpu_pipe.topology import ParallelDims

OBJECTIVE, ENGINE = "causal_lm", "mesh"
"""Objective whose micro-batches are known, and engine whose steps run on fake tensors."""


@dataclass(frozen=True)
class TracedLayout:
    """A layout to trace.

    Attributes:
        words: overrides that the typed ones need besides.
        memory: predicted; None for a model whose shapes are not known.
        plain: predicted where blocks are not compiled, as they are traced.
    """

    config: RunConfig
    words: Sequence[str]

    @cached_property
    def memory(self) -> MemoryPlan | None:
        return memory_by_rank(self.config)

    @cached_property
    def plain(self) -> MemoryPlan | None:
        return memory_by_rank(replace(self.config, model=replace(self.config.model, compile=False)))

    @property
    def ranks(self) -> list[int]:
        """Ranks to trace: the first of the pipeline's first and last stages, and of the one that needs most memory."""
        dims = ParallelDims.from_config(self.config.trainer, self.config.strategy)
        stages = {0, dims.pp - 1, 0 if self.plain is None else self.plain.rank}
        firsts: dict[int, int] = {}
        for rank in range(dims.world_size):
            firsts.setdefault(dims.coordinates(rank)["pp"], rank)
        return [firsts[stage] for stage in sorted(stages)]


def typed_layout(config: RunConfig) -> TracedLayout:
    """The layout of the configuration as it is, on the hardware of ``plan.hardware``.

    Raises:
        ConfigError: several sizes of a world.
        ConfigErrors: a strategy that its world, model or batch does not allow.
    """
    refuse_untraceable(config)
    trainer, words = first_processes(config.trainer, config.launch, config.plan)
    placed = replace(config, trainer=trainer)
    ParallelDims.from_config(placed.trainer, placed.strategy)
    unchecked = replace(placed, trainer=replace(placed.trainer, memory_check="off"))
    errors = size_errors(unchecked, elsewhere=True)
    if errors:
        raise ConfigErrors(errors)
    return TracedLayout(placed, words)


def planned_layout(plan: PlannedRun) -> TracedLayout:
    """The layout of a plan."""
    refuse_untraceable(plan.config)
    return TracedLayout(plan.config, plan.overrides)


def refuse_untraceable(config: RunConfig) -> None:
    """Raise a ConfigError for what does not run on fake tensors, or for several worlds."""
    for key, values in (("plan.gpus", config.plan.gpus), ("plan.hardware", config.plan.hardware)):
        if len(values) > 1:
            raise ConfigError(key, list(values), "give one of them", "--trace runs one layout")
    strategy, precision = config.strategy, resolve_precision(config.precision, config.trainer)
    refused: list[tuple[str, Any, bool, str]] = [
        ("objective.name", config.objective.name, config.objective.name != OBJECTIVE, f"use objective={OBJECTIVE}"),
        ("strategy.engine", strategy.engine, strategy.engine != ENGINE, "use a strategy such as fsdp or megatron"),
        ("strategy.offload", strategy.offload, strategy.offload != "none", "use strategy.offload=none"),
        ("precision", precision, precision == "fp8", "trace precision=bf16, which keeps the same weights"),
    ]
    for key, value, is_refused, fix in refused:
        if is_refused:
            raise ConfigError(key, value, fix, "--trace does not know it on fake tensors")
