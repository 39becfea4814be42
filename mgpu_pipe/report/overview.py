"""Describes a run before its start: model, topology, batch arithmetic, data, precision."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mgpu_pipe.architectures.family import PARTS, PROJECTOR, parts_in
from mgpu_pipe.architectures.formulas.parameters import count_parameters
from mgpu_pipe.architectures.formulas.pipeline_schedules import (
    LayerCosts,
    layer_costs,
    stage_contents,
    stage_layers,
    stages_by_rank,
)
from mgpu_pipe.config.data_sources import find_source
from mgpu_pipe.config.group_keys import (
    ALL_LINEAR,
    OptimizerConfig,
    ParameterGroup,
    PartOptions,
    PeftConfig,
    PipelineOptions,
    PlanConfig,
    SchedulerConfig,
    StrategyConfig,
)
from mgpu_pipe.config.hydra.interpolation import hide_environment
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.resolve import device_type, resolve_precision, uses_tf32, world_size
from mgpu_pipe.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    PrecisionConfig,
    RunConfig,
    TrainerConfig,
)
from mgpu_pipe.data.model_field import resolve_packing
from mgpu_pipe.models.fields import model_fields
from mgpu_pipe.parallel.pipeline.work_order import schedule_lines
from mgpu_pipe.planning.goodput import Failures, best_interval, useful_share
from mgpu_pipe.planning.memory_limits import gib, predict_memory
from mgpu_pipe.report import numbers
from mgpu_pipe.system.conf_folders import OWN
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.deepspeed.deepspeed_config import ENGINE, deepspeed_config

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared
    from mgpu_pipe.planning.memory import MemoryPlan


OFFLOADED = {"offload_optimizer": "optimizer state", "offload_param": "weights"}
LEAST_SHARE = 0.005
"""Terms of memory below this share of all are not shown."""
MINUTE = 60.0
NAMES_WIDTH = len("checkpoint") + 2
"""Width of the column of names."""


def overview(config: RunConfig, conf_options: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Rows of ``mgpu-pipe check``, name and text, for a right configuration with options of ``./conf``."""
    strategy, processes = config.strategy, world_size(config.trainer, config.strategy)
    dims = ParallelDims.resolve(strategy, processes)
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    details = []
    if strategy.engine == ENGINE:
        settings = deepspeed_config(strategy, config.precision, config.trainer, plan)
        details.append(("deepspeed", _deepspeed(settings, strategy.deepspeed_config)))
    if strategy.engine == "mesh" and dims.pp > 1:
        room = shutil.get_terminal_size().columns - NAMES_WIDTH
        costs = layer_costs(model_fields(config.model), config.data.seq_len)
        details += [("pipeline", line) for line in _pipeline(strategy.pipeline, costs, dims, plan, max(40, room))]
    rows = summary(config, conf_options=conf_options)
    if baseline := _majority(config.data, config.objective):
        rows.insert(1 + [name for name, _ in rows].index("data"), ("majority", baseline))
    details += [("memory", line) for line in _memory_lines(predict_memory(config), strategy)]
    saves = config.checkpoint.every_n_minutes
    details += [("failures", line)] if (line := goodput_line(config.plan, saves, processes)) else []
    after = 1 + [name for name, _ in rows].index("strategy")
    run = config.run.dir or f"{config.run.root}/{config.run.name}/<date>_<time>-<hash>"
    return [*rows[:after], *details, *rows[after:], ("run", run)]


def goodput_line(plan: PlanConfig, minutes: float | None, processes: int) -> str | None:
    """Best time between saves (now every ``minutes``) and useful share, or None without ``plan.failure_hours``."""
    if plan.failure_hours is None:
        return None
    failures = Failures.from_gpus(plan.failure_hours, processes, plan.save_stall_s, plan.restart_s)
    best = best_interval(failures)
    text = (
        f"one every {numbers.duration(failures.between)}; {useful_share(best, failures):.1%} of the time is useful "
        f"with checkpoint.every_n_minutes={best / MINUTE:.3g}, which is best"
    )
    if minutes is None:
        return text
    return f"{text}; {useful_share(minutes * MINUTE, failures):.1%} with checkpoint.every_n_minutes={minutes:g}"


def _memory_lines(plan: MemoryPlan | None, strategy: StrategyConfig) -> list[str]:
    """Lines with the predicted memory of the worst rank, in all and by term; none if it is not known."""
    if plan is None:
        return []
    rank = f"pipeline rank {plan.rank}" if strategy.pp != 1 else "a rank"
    assumed = f", assumed of {plan.assumes}" if plan.assumes else ""
    terms = sorted(plan.terms.items(), key=lambda term: -term[1])
    parts = [f"{name} {gib(size)}" for name, size in terms if size >= LEAST_SHARE * plan.likely]
    return [f"{rank} needs {gib(plan.likely)} ({gib(plan.low)} to {gib(plan.high)}){assumed}", ", ".join(parts)]


def summary(
    config: RunConfig,
    world: int | None = None,
    prepared: Prepared | None = None,
    hardware: str = "",
    conf_options: Sequence[str] = (),
) -> list[tuple[str, str]]:
    """Rows that describe a run: a name and its text.

    Args:
        world: processes of the run; None takes the configured number.
        prepared: its data; None before preparation (``check``).
        hardware: in words, e.g. ``2 CPU cores, 1 thread each`` or ``8 x NVIDIA H200``.
        conf_options: options from ``./conf`` in the working folder.
    """
    strategy, trainer, peft = config.strategy, config.trainer, config.peft
    packing = resolve_packing(config.model, config.data, config.objective)
    dims = ParallelDims.resolve(strategy, world or world_size(trainer, strategy))
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    parts = _parts(config.model, peft, config.optimizer.groups, strategy.parts, dims)
    return [
        ("model", _model(config.seed, config.model, config.objective)),
        *([("adapters", _adapters(peft))] if peft.name != "none" else []),
        *([("parts", parts)] if parts else []),
        ("data", _data(replace(config.data, packing=packing), prepared)),
        ("strategy", _strategy(strategy, trainer, dims, hardware)),
        ("batch", _batch(config.data, plan)),
        ("steps", _steps(config.data, trainer, prepared)),
        ("optimizer", _optimizer(config.optimizer, config.scheduler, trainer)),
        ("precision", _precision(config.precision, trainer)),
        ("checkpoint", _checkpoint(config.checkpoint)),
        *([("own conf", f"{' '.join(conf_options)} (./{OWN})")] if conf_options else []),
    ]


def _model(seed: int, model: ModelConfig, objective: ObjectiveConfig) -> str:
    fields = {**model_fields(model), **objective.model_fields()}
    count = count_parameters(fields, description(objective.name).model_class)
    size = "" if count is None else f", {_millions(count.total)} parameters"
    start = f"weights of {model.path}" if model.path else f"random weights, seed {seed}"
    return f"{model.name} ({fields.get('model_type')}){size}; {start}"


def _millions(count: int) -> str:
    if count >= 10**9:
        return f"{count / 10**9:.2f}B"
    return f"{count / 10**6:.1f}M" if count >= 10**6 else f"{count / 10**3:.0f}k"


def _adapters(peft: PeftConfig) -> str:
    also = f"; trained besides: {', '.join(peft.train_also)}" if peft.train_also else ""
    return f"{peft.name}, rank {peft.r}, scaled by {peft.scale:.3g}, next to {', '.join(peft.targets)}{also}"


def _parts(
    model: ModelConfig, peft: PeftConfig, groups: Mapping[str, ParameterGroup], options: PartOptions, dims: ParallelDims
) -> str:
    """Training of each part of a multi-part model: trained, frozen or adapted; whole on the ranks that cut the rest;
    lists other patterns unchanged."""
    described = []
    adapted = [part for part in PARTS if part in peft.targets or (ALL_LINEAR in peft.targets and part != PROJECTOR)]
    for part in parts_in(model_fields(model)):
        frozen = part in model.freeze or (peft.name != "none" and part not in peft.train_also)
        how = peft.name if peft.name != "none" and part in adapted else "frozen" if frozen else "trained"
        group = next((entry for entry in groups.values() if part in entry.parameters), None)
        apart = f" ({_group_settings(group)})" if group is not None and how != "frozen" else ""
        described.append(f"{part} {how}{apart}{_part_strategy(options, part, dims)}")
    named = (model.freeze, peft.train_also, *(group.parameters for group in groups.values()))
    patterns = [pattern for several in named for pattern in several if pattern not in PARTS]
    besides = f"; besides as said of {', '.join(patterns)}" if patterns and described else ""
    return f"{', '.join(described)}{besides}"


def _part_strategy(parts: PartOptions, part: str, dims: ParallelDims) -> str:
    """The strategy of a tower where it differs from that of the rest; empty for other parts."""
    notes = [f"whole on each of tp={dims.tp} ranks, its inputs dealt over them by cost"] * (part in parts.whole)
    recomputes = {"none": "its blocks kept", "full": "its blocks recomputed"}
    if part in ("vision", "audio") and parts.activation_checkpointing != "same":
        notes.append(recomputes[parts.activation_checkpointing])
    return f" ({'; '.join(notes)})" if notes else ""


def _data(data: DataConfig, prepared: Prepared | None) -> str:
    source = data.source if find_source(data.source) else f"{data.source} (plug-in)"
    where = f" {', '.join(data.paths)}" if data.paths else ""
    if data.validation_paths:
        held_out = f"held out {', '.join(data.validation_paths)}"
    else:
        share = f"{100 * data.validation_fraction:.3g}%"
        held_out = (
            f"{share} of the {'documents' if data.tokens() else 'samples'} held out" if data.validation_fraction else ""
        )
    amounts = [f", {numbers.count(number)} {what}" for number, what in prepared.amounts()] if prepared else []
    if prepared:
        held_out = f"{prepared.train_samples:,} samples to train on, {prepared.validation_samples:,} held out"
    parts = [f"{source}{where}{''.join(amounts)}", data.sample_text(), held_out]
    return "; ".join(part for part in parts if part)


def _majority(data: DataConfig, objective: ObjectiveConfig) -> str:
    """The accuracy of the most frequent class, the baseline of a classifier; empty for other objectives."""
    if not description(objective.name).samples.startswith("labelled"):
        return ""
    from mgpu_pipe.data.classes import count_majority

    majority = count_majority(data)
    if majority is None:
        return ""
    counted_samples = f"{'' if majority.whole else 'the first '}{majority.samples:,} samples"
    accuracy = f"{100 * majority.share:.1f}% accuracy by always saying {majority.name}"
    return f"{accuracy} ({majority.classes} classes, {counted_samples})"


def _strategy(strategy: StrategyConfig, trainer: TrainerConfig, dims: ParallelDims, hardware: str) -> str:
    world, device = dims.world_size, "GPU" if device_type(trainer) == "cuda" else "CPU"
    processes = f"{world} {device} process{'es' if world > 1 else ''}"
    nodes = f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
    sizes = f": {dims.describe()}" if world > 1 else ""
    return f"{strategy.name}, {processes}{nodes}{sizes}{f' on {hardware}' if hardware else ''}"


def _deepspeed(settings: Mapping[str, Any], from_user: Mapping[str, Any]) -> str:
    """The ZeRO stage's shards, offloaded parts, bucket size and the user's settings."""
    zero = settings["zero_optimization"]
    sharded = ("optimizer state", "optimizer state and gradients", "weights, gradients and optimizer state")
    parts = [f"ZeRO-{zero['stage']} shards {sharded[zero['stage'] - 1]}"]
    parts += [f"{what} in {zero[key]['device']} memory" for key, what in OFFLOADED.items() if key in zero]
    parts.append(f"buckets of {numbers.count(zero['reduce_bucket_size'])} elements")
    if from_user:
        parts.append(f"set by you: {json.dumps(hide_environment(dict(from_user)))}")
    return f"{', '.join(parts)}; all settings: deepspeed.json in the run's folder"


def _pipeline(chosen: PipelineOptions, costs: LayerCosts, dims: ParallelDims, plan: BatchPlan, width: int) -> list[str]:
    """The schedule as a picture of ``width`` columns, its bubble, and what each stage holds."""
    stages_of_ranks = stages_by_rank(chosen.schedule, dims.pp, chosen.stages_per_rank)
    layers = stage_layers(costs, sum(map(len, stages_of_ranks)), chosen.layers or None)
    ranks = {stage: rank for rank, stages in enumerate(stages_of_ranks) for stage in stages}
    contents = stage_contents(costs, layers, [ranks[stage] for stage in range(len(layers))])
    return schedule_lines(chosen.schedule, dims.pp, plan.num_micro_batches, contents, chosen.stages_per_rank, width)


def _batch(data: DataConfig, plan: BatchPlan) -> str:
    tokens = plan.global_batch_size * data.tokens()
    return (
        f"{plan.global_batch_size} samples = {plan.data_parallel_size} x {plan.num_micro_batches} micro-batches x "
        f"{plan.micro_batch_size}" + (f"; {tokens:,} tokens a step" if tokens else "")
    )


def _steps(data: DataConfig, trainer: TrainerConfig, prepared: Prepared | None) -> str:
    steps, a_step = trainer.max_steps, data.global_batch_size
    if steps is None and prepared:
        steps = (trainer.max_epochs or 1) * prepared.train_samples // a_step
    if steps is None:
        return f"{trainer.max_epochs} epochs"
    epochs = ""
    if prepared and prepared.train_samples:
        epochs = f", {numbers.figure(steps * a_step / prepared.train_samples, 3)} epochs"
    every = trainer.val_every_n_steps
    evaluated = "evaluated at the end" if every is None else f"evaluated every {every} steps"
    if prepared and not prepared.validation_samples:
        evaluated = "not evaluated: no data is held out"
    seen = steps * a_step * (data.tokens() or 1)
    return f"{steps:,} ({seen:,} {'tokens' if data.tokens() else 'samples'}{epochs}), {evaluated}"


def _optimizer(optimizer: OptimizerConfig, scheduler: SchedulerConfig, trainer: TrainerConfig) -> str:
    ratio = scheduler.warmup_ratio
    total = scheduler.total_steps or trainer.max_steps or scheduler.warmup_steps
    length = f"{scheduler.warmup(total)} steps" if ratio is None else f"{100 * ratio:g}% of all steps"
    warmup = f" after {length} of warm-up" if scheduler.warmup_steps or ratio else ""
    name, clip = optimizer._target_.rpartition(".")[2], trainer.gradient_clip_val
    clipped = "" if clip is None else f", gradient norm clipped to {clip:g}"
    layers = "" if optimizer.layer_decay == 1 else f" times {optimizer.layer_decay:g} a block downwards"
    rate = f"lr {optimizer.lr:g}{layers} {scheduler.name}{warmup}"
    groups = "".join(f"; {label}: {_group_settings(group)}" for label, group in optimizer.groups.items())
    evaluated = ", which is evaluated" if optimizer.ema.evaluate else ""
    average = f"; averaged by {optimizer.ema.decay:g}{evaluated}" if optimizer.ema.decay is not None else ""
    return f"{name}, {rate}, weight decay {optimizer.weight_decay:g}{clipped}{groups}{average}"


def _group_settings(group: ParameterGroup) -> str:
    """The settings in which a group of parameters differs."""
    settings = (
        ("" if group.lr is None else f"lr {group.lr:g}"),
        ("" if group.weight_decay is None else f"weight decay {group.weight_decay:g}"),
        (f"frozen until step {group.frozen_until}" if group.frozen_until else ""),
    )
    return ", ".join(filter(None, settings)) or "as the rest"


def _precision(precision: PrecisionConfig, trainer: TrainerConfig) -> str:
    chosen = resolve_precision(precision, trainer)
    text = f"{chosen} (auto)" if precision.name == "auto" else chosen
    return f"{text}, matrix products in TF32" if uses_tf32(precision, trainer) else text


def _checkpoint(checkpoint: CheckpointConfig) -> str:
    saves = [f"every {checkpoint.every_n_steps} steps"] if checkpoint.every_n_steps else []
    saves += [f"every {checkpoint.every_n_minutes:g} minutes"] if checkpoint.every_n_minutes else []
    saves += ["at the end"] if checkpoint.save_last else []
    retention = f", the newest {checkpoint.keep_last} kept" if checkpoint.keep_last else ", all kept"
    text = f"{' and '.join(saves)}{retention}" if saves else "none"
    if checkpoint.resume != "none":
        text += f"; resumes {checkpoint.resume}"
    return f"{text}; weights from {checkpoint.init_from}" if checkpoint.init_from else text
