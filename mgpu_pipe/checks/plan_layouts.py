"""The fastest layouts of a configuration on given hardware that fit in its memory, and the one to trace; no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.checks.check_sizes import size_errors, update_errors
from mgpu_pipe.checks.layout_candidates import Candidates, find_candidates, on_processes, with_layout
from mgpu_pipe.config.group_keys import PlanConfig, StrategyConfig
from mgpu_pipe.config.resolve import devices_per_node, resolve_precision
from mgpu_pipe.config.schema import LaunchConfig, RunConfig, TrainerConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.planning.hardware_profile import GIB, HardwareProfile, load_profile
from mgpu_pipe.planning.layout_search import Layout
from mgpu_pipe.planning.memory import MemoryPlan, memory_by_rank
from mgpu_pipe.planning.run_hardware import CPU, computing_hardware, hardware_here
from mgpu_pipe.planning.work import Hardware
from mgpu_pipe.system.hardware import host_memory
from mgpu_pipe.topology import ParallelDims

BULK_ERROR = 0.05
"""Share by which the bulk estimate of a layout's bytes may be too high; those that pass are computed for every rank."""
LARGEST_WORLD = 1 << 14
HOUR = 3600.0
Array = NDArray[np.float64]


@dataclass(frozen=True)
class PlannedRun:
    """A layout with its prediction."""

    profile: HardwareProfile
    gpus: int
    layout: Layout
    overrides: Sequence[str]
    """Overrides that choose the layout and the processes."""
    config: RunConfig
    seconds: float
    parts: Mapping[str, float]
    """Seconds by part of :class:`mgpu_pipe.planning.step_time.StepTime`."""
    tokens_per_step: float
    utilisation: float
    """Model FLOPs over the peak of all GPUs."""
    memory: MemoryPlan
    dollars_per_hour: float | None
    """Price of a GPU; None if unknown."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds

    @property
    def dollars_per_token(self) -> float:
        """nan without a price."""
        hourly = float("nan") if self.dollars_per_hour is None else self.dollars_per_hour * self.gpus
        return hourly / HOUR / self.tokens_per_second

    @property
    def is_tight(self) -> bool:
        """Whether it fits by the likely figure but not by the high one."""
        return self.memory.high > self.profile.memory_bytes

    @property
    def largest_loss(self) -> tuple[str, float]:
        """Part that takes most time besides computation, and its share of the step."""
        losses = {name: seconds for name, seconds in self.parts.items() if name != "compute"}
        name = max(losses, key=losses.__getitem__)
        return name, losses[name] / self.seconds


@dataclass
class Losers:
    """Numbers of layouts that are no plan, by reason."""

    tried: int = 0
    too_large: int = 0
    """A rank needs more memory than its GPU has, or its node's main memory."""
    too_large_for_host: int = 0
    """Those of them whose offloaded state exceeds a node's main memory."""
    refused: int = 0
    """A check refuses them."""
    errors: list[ConfigError] = field(default_factory=list)
    """Errors of the hardware and numbers of GPUs without a plan."""

    @property
    def slower(self) -> int:
        return self.tried - self.too_large - self.refused


def plan_layouts(config: RunConfig) -> tuple[list[PlannedRun], Losers]:
    """The best ``plan.rows`` layouts by ``plan.rank_by`` on all hardware and GPUs; ConfigError if none is found."""
    plans, losers = list[PlannedRun](), Losers()
    worlds = [
        (profile, gpus)
        for profile in _profiles(config.trainer, config.launch, config.plan)
        for gpus in _worlds(config.trainer, config.plan, profile)
    ]
    each = replace(config, plan=replace(config.plan, rows=max(1, config.plan.rows // len(worlds))))
    for profile, gpus in worlds:
        try:
            plans += _plans_on(find_candidates(each, profile, gpus), profile, losers)
        except ConfigError as error:
            losers.errors.append(error)
    if not plans:
        raise losers.errors[0]
    orders = {
        "speed": lambda plan: -plan.tokens_per_second,
        "cost": lambda plan: plan.dollars_per_token,
        "memory": lambda plan: plan.memory.likely,
    }
    return sorted(plans, key=orders[config.plan.rank_by]), losers


def _profiles(trainer: TrainerConfig, launch: LaunchConfig, plan: PlanConfig) -> list[HardwareProfile]:
    chosen = list(plan.hardware) or [hardware_here(trainer, launch)]
    profiles = [load_profile(name, plan.network) for name in chosen]
    if plan.rank_by == "cost":
        for profile in profiles:
            if _price(plan, profile) is None:
                fix = "give plan.price, dollars a GPU and hour, or dollars_per_hour in a profile of yours"
                raise ConfigError("plan.rank_by", "cost", fix, f"{profile.name} has no price")
    return profiles


def _price(plan: PlanConfig, profile: HardwareProfile) -> float | None:
    return plan.price if plan.price is not None else profile.dollars_per_hour or None


def _worlds(trainer: TrainerConfig, plan: PlanConfig, profile: HardwareProfile) -> list[int]:
    """Numbers of GPUs to plan for."""
    for gpus in plan.gpus:
        if gpus < 1:
            raise ConfigError("plan.gpus", gpus, "use numbers of at least 1")
    devices = trainer.devices
    each = devices if devices != "auto" else 1 if profile.accelerator == CPU else int(profile.gpus_per_node)
    return plan.gpus or [each * trainer.num_nodes]


def first_processes(trainer: TrainerConfig, launch: LaunchConfig, plan: PlanConfig) -> tuple[TrainerConfig, list[str]]:
    """Keys of the plan's first hardware and GPUs, and overrides; ConfigError if unknown, or no whole number of
    nodes."""
    profile = _profiles(trainer, launch, plan)[0]
    return on_processes(trainer, profile, _worlds(trainer, plan, profile)[0])


def _plans_on(candidates: Candidates, profile: HardwareProfile, losers: Losers) -> list[PlannedRun]:
    """The best layouts among the candidates, at most one of the same axes; ConfigError if none fits."""
    hardware = computing_hardware(
        candidates.config.precision, candidates.config.trainer, candidates.config.strategy, profile
    )
    if profile.accelerator == CPU:  # processes of this machine share its memory
        each = host_memory() / GIB / devices_per_node(candidates.config.trainer, candidates.config.strategy)
        profile = replace(profile, memory_gib=each)
    fits_host = _fits_host(candidates, profile)
    fits = fits_host & (candidates.sizes <= (1 + BULK_ERROR) * profile.memory_bytes)
    losers.tried += len(fits) + candidates.refused
    losers.refused += candidates.refused
    losers.too_large_for_host += int(len(fits) - fits_host.sum())
    losers.too_large += int(len(fits) - fits.sum())
    plans = list(_fitting(candidates, profile, hardware, fits, losers))
    if not plans:
        raise _does_not_fit(candidates, profile)
    return plans


def _fitting(
    candidates: Candidates, profile: HardwareProfile, hardware: Hardware, fits: NDArray[np.bool_], losers: Losers
) -> Iterator[PlannedRun]:
    """Layouts that fit and that no check refuses, the best first, until ``plan.rows`` are there."""
    rows, times = candidates.config.plan.rows, candidates.times(hardware, profile)
    total = np.asarray(times.total)
    score = candidates.sizes if candidates.config.plan.rank_by == "memory" else total
    seen = set[tuple[Any, ...]]()
    for index in np.argsort(np.where(fits, score, np.inf), kind="stable")[: int(fits.sum())].tolist():
        (kind, place), layout = candidates.locate(index), candidates.layout(index)
        axes = (layout.tp, layout.pp, layout.cp, layout.ep, layout.dp_shard, layout.sharding)
        if axes in seen:
            continue
        changed = with_layout(candidates.config, layout)
        try:
            memory = memory_by_rank(changed)
        except ConfigError:
            memory = None
        if memory is None or memory.likely > profile.memory_bytes:
            losers.too_large += 1
            continue
        unchecked = replace(changed, trainer=replace(changed.trainer, memory_check="off"))
        if size_errors(unchecked, elsewhere=True) or update_errors(unchecked):
            losers.refused += 1
            continue
        seen.add(axes)
        parts = {name: float(np.asarray(part)[index]) for name, part in vars(times).items()}
        seconds, flops = float(total[index]), float(np.asarray(kind.layouts.model_flops)[place])
        yield PlannedRun(
            profile=profile,
            gpus=candidates.gpus,
            layout=layout,
            overrides=[*layout.overrides, *candidates.words],
            config=changed,
            seconds=seconds,
            parts=parts,
            tokens_per_step=float(np.asarray(kind.layouts.tokens_per_step)[place]),
            utilisation=flops / seconds / candidates.gpus / float(hardware.peak),
            memory=memory,
            dollars_per_hour=_price(candidates.config.plan, profile),
        )
        if len(seen) == rows:
            return


LAYOUT_KEYS = (
    *("engine", "tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "sequence_parallel", "activation_checkpointing"),
    *("pipeline.schedule", "pipeline.stages_per_rank", "pipeline.layers", "context.method"),
    *("offload", "deepspeed.stage"),
)
"""Keys of ``strategy`` that a layout sets."""


def words_against(base: StrategyConfig, plan: PlannedRun) -> list[str]:
    """Overrides besides the plan's against ``base``, which other words compose with the plan's strategy."""
    present = {word.partition("=")[0] for word in plan.overrides}
    rest = "dp_replicate" if base.name == "ddp" else "dp_shard"  # auto is what the other axes leave
    words = []
    for key in LAYOUT_KEYS:
        value, planned = attrgetter(key)(base), attrgetter(key)(plan.config.strategy)
        is_same = value == planned or (key == rest and value == "auto")
        if not is_same and f"strategy.{key}" not in present:
            words.append(f"strategy.{key}={planned if isinstance(planned, str) else json.dumps(planned)}")
    return words


def _fits_host(candidates: Candidates, profile: HardwareProfile) -> NDArray[np.bool_]:
    processes = devices_per_node(candidates.config.trainer, candidates.config.strategy)
    return np.asarray(candidates.host * processes <= profile.host_memory_gib * GIB)


def _least(candidates: Candidates, profile: HardwareProfile) -> float:
    """Bytes of the smallest layout that fits in its host's memory."""
    return float(candidates.sizes[_fits_host(candidates, profile)].min())


def _does_not_fit(candidates: Candidates, profile: HardwareProfile) -> ConfigError:
    """The error that names the bytes that the smallest layout lacks, and a number of GPUs that is enough."""
    least = _least(candidates, profile)
    missing = max(0.0, least - profile.memory_bytes) / GIB
    enough, gpus = None, 2 * candidates.gpus
    while enough is None and gpus <= LARGEST_WORLD:
        try:
            least_of_more = _least(find_candidates(candidates.config, profile, gpus), profile)
            enough = gpus if least_of_more <= profile.memory_bytes else None
        except ConfigError:
            break
        gpus *= 2
    fix = f"use plan.gpus={enough}" if enough else "use a smaller model or peft=qlora"
    reason = f"no layout fits on {candidates.gpus} of {profile.name}: the smallest needs {least / GIB:.1f} GiB"
    reason += f", {missing:.1f} GiB too many"
    return ConfigError("plan.gpus", candidates.gpus, f"{fix}, or hardware with more memory", reason)


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
    """The configured layout on ``plan.hardware``; ConfigError for several worlds, ConfigErrors if not allowed."""
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
