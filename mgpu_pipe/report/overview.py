"""What a run will be, in words: model, topology, batch arithmetic, data, precision. No torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mgpu_pipe.checks.model import model_fields
from mgpu_pipe.config.conf_folders import OWN
from mgpu_pipe.config.optimizer import ParameterGroup
from mgpu_pipe.config.peft import ALL_LINEAR, PeftConfig
from mgpu_pipe.config.plugins import DATA_SOURCES
from mgpu_pipe.config.resolve import device_type, resolve_precision, uses_tf32, world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.families.parts import PARTS, PROJECTOR, parts_in
from mgpu_pipe.planner.parameters import count_parameters
from mgpu_pipe.report import numbers
from mgpu_pipe.strategies.deepspeed_config import ENGINE, deepspeed_config
from mgpu_pipe.topology import BatchPlan, ParallelDims

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared

NAMES_WIDTH = len("checkpoint") + 2
"""Columns that the rows' names take."""


def overview(config: RunConfig, own: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Rows of ``mgpu-pipe check``: a name and what there is to say; for a configuration without errors.

    Args:
        own: the options that ``./conf`` of the working folder brought.
    """
    dims, plan = _sizes(config, None)
    details = [("deepspeed", json.dumps(deepspeed_config(config, plan)))] if config.strategy.engine == ENGINE else []
    if config.strategy.engine == "mesh" and dims.pp > 1:
        room = shutil.get_terminal_size().columns - NAMES_WIDTH
        details += [("pipeline", line) for line in _pipeline(config, dims, plan, max(40, room))]
    rows = summary(config, own=own)
    after = 1 + [name for name, _ in rows].index("strategy")
    run = config.run.dir or f"{config.run.root}/{config.run.name}/<date>_<time>-<hash>"
    return [*rows[:after], *details, *rows[after:], ("run", run)]


def summary(
    config: RunConfig,
    world: int | None = None,
    prepared: Prepared | None = None,
    hardware: str = "",
    own: Sequence[str] = (),
) -> list[tuple[str, str]]:
    """Rows that say what a run will be.

    Args:
        world: processes of the run; None takes the configured number.
        prepared: its data; None where none was prepared (``check``).
        hardware: in words, e.g. ``2 CPU cores, 1 thread each`` or ``8 x NVIDIA H200``.
        own: the options that ``./conf`` of the working folder brought.
    """
    dims, plan = _sizes(config, world)
    return [
        ("model", _model(config)),
        *([("adapters", _adapters(config.peft))] if config.peft.name != "none" else []),
        *([("parts", parts)] if (parts := _parts(config)) else []),
        ("data", _data(config, prepared)),
        ("strategy", _strategy(config, dims, hardware)),
        ("batch", _batch(config, plan)),
        ("steps", _steps(config, prepared)),
        ("optimizer", _optimizer(config)),
        ("precision", _precision(config)),
        ("checkpoint", _checkpoint(config)),
        *([("own conf", f"{' '.join(own)} (./{OWN})")] if own else []),
    ]


def _sizes(config: RunConfig, world: int | None) -> tuple[ParallelDims, BatchPlan]:
    dims = ParallelDims.resolve(config.strategy, world or world_size(config))
    return dims, BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)


def _model(config: RunConfig) -> str:
    model, fields = config.model, model_fields(config)
    count = count_parameters(fields)
    size = "" if count is None else f", {_millions(count.total)} parameters"
    start = f"weights of {model.path}" if model.path else f"random weights, seed {config.seed}"
    return f"{model.name} ({fields.get('model_type')}){size}; {start}"


def _millions(count: int) -> str:
    if count >= 10**9:
        return f"{count / 10**9:.2f}B"
    return f"{count / 10**6:.1f}M" if count >= 10**6 else f"{count / 10**3:.0f}k"


def _adapters(peft: PeftConfig) -> str:
    also = f"; trained besides: {', '.join(peft.train_also)}" if peft.train_also else ""
    return f"{peft.name}, rank {peft.r}, scaled by {peft.scale:.3g}, beside {', '.join(peft.targets)}{also}"


def _parts(config: RunConfig) -> str:
    """How each part of a model of several is trained; what patterns of names say besides is told as they are."""
    peft, found = config.peft, []
    adapted = [part for part in PARTS if part in peft.targets or (ALL_LINEAR in peft.targets and part != PROJECTOR)]
    for part in parts_in(model_fields(config)):
        frozen = part in config.model.freeze or (peft.name != "none" and part not in peft.train_also)
        how = peft.name if peft.name != "none" and part in adapted else "frozen" if frozen else "trained"
        group = next((one for one in config.optimizer.groups.values() if part in one.parameters), None)
        apart = f" ({_apart(group)})" if group is not None and how != "frozen" else ""
        found.append(f"{part} {how}{apart}")
    named = (config.model.freeze, peft.train_also, *(group.parameters for group in config.optimizer.groups.values()))
    patterns = [pattern for several in named for pattern in several if pattern not in PARTS]
    besides = f"; besides as said of {', '.join(patterns)}" if patterns and found else ""
    return f"{', '.join(found)}{besides}"


def _data(config: RunConfig, prepared: Prepared | None) -> str:
    data = config.data
    source = data.source if data.source in DATA_SOURCES else f"{data.source} (plug-in)"
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


def _strategy(config: RunConfig, dims: ParallelDims, hardware: str) -> str:
    world, device = dims.world_size, "GPU" if device_type(config) == "cuda" else "CPU"
    processes = f"{world} {device} process{'es' if world > 1 else ''}"
    nodes = f" on {config.trainer.num_nodes} nodes" if config.trainer.num_nodes > 1 else ""
    shown = f": {dims.describe()}" if world > 1 else ""
    return f"{config.strategy.name}, {processes}{nodes}{shown}{f' on {hardware}' if hardware else ''}"


def _pipeline(config: RunConfig, dims: ParallelDims, plan: BatchPlan, width: int) -> list[str]:
    """The schedule as a picture of ``width`` columns, its bubble, and what each stage holds."""
    from mgpu_pipe.parallel.pipeline_streams import stages_by_rank
    from mgpu_pipe.planner.pipeline import layer_costs, stage_contents, stage_layers
    from mgpu_pipe.report.pipeline_picture import schedule_lines

    chosen = config.strategy.pipeline
    stages_of_ranks = stages_by_rank(chosen.schedule, dims.pp, chosen.stages_per_rank)
    costs = layer_costs(model_fields(config), config.data.seq_len)
    layers = stage_layers(costs, sum(map(len, stages_of_ranks)), chosen.layers or None)
    ranks = {stage: rank for rank, stages in enumerate(stages_of_ranks) for stage in stages}
    contents = stage_contents(costs, layers, [ranks[stage] for stage in range(len(layers))])
    return schedule_lines(chosen.schedule, dims.pp, plan.num_micro_batches, contents, chosen.stages_per_rank, width)


def _batch(config: RunConfig, plan: BatchPlan) -> str:
    tokens = plan.global_batch_size * config.data.tokens()
    return (
        f"{plan.global_batch_size} samples = {plan.data_parallel_size} x {plan.num_micro_batches} micro-batches x "
        f"{plan.micro_batch_size}" + (f"; {tokens:,} tokens a step" if tokens else "")
    )


def _steps(config: RunConfig, prepared: Prepared | None) -> str:
    trainer, steps, a_step = config.trainer, config.trainer.max_steps, config.data.global_batch_size
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
        evaluated = "not evaluated: nothing is held out"
    seen = steps * a_step * (config.data.tokens() or 1)
    return f"{steps:,} ({seen:,} {'tokens' if config.data.tokens() else 'samples'}{epochs}), {evaluated}"


def _optimizer(config: RunConfig) -> str:
    optimizer, scheduler = config.optimizer, config.scheduler
    ratio = scheduler.warmup_ratio
    length = f"{scheduler.warmup_steps} steps" if ratio is None else f"{100 * ratio:g}% of all steps"
    warmup = f" after {length} of warm-up" if scheduler.warmup_steps or ratio else ""
    name, clip = optimizer._target_.rpartition(".")[2], config.trainer.gradient_clip_val
    clipped = "" if clip is None else f", gradient norm clipped to {clip:g}"
    layers = "" if optimizer.layer_decay == 1 else f" times {optimizer.layer_decay:g} a block downwards"
    rate = f"lr {optimizer.lr:g}{layers} {scheduler.name}{warmup}"
    groups = "".join(f"; {label}: {_apart(group)}" for label, group in optimizer.groups.items())
    evaluated = ", which is evaluated" if optimizer.ema.evaluate else ""
    average = f"; averaged by {optimizer.ema.decay:g}{evaluated}" if optimizer.ema.decay is not None else ""
    return f"{name}, {rate}, weight decay {optimizer.weight_decay:g}{clipped}{groups}{average}"


def _apart(group: ParameterGroup) -> str:
    """In what a group of parameters differs."""
    told = (
        ("" if group.lr is None else f"lr {group.lr:g}"),
        ("" if group.weight_decay is None else f"weight decay {group.weight_decay:g}"),
        (f"frozen until step {group.frozen_until}" if group.frozen_until else ""),
    )
    return ", ".join(filter(None, told)) or "as the rest"


def _precision(config: RunConfig) -> str:
    chosen = resolve_precision(config)
    text = f"{chosen} (auto)" if config.precision.name == "auto" else chosen
    return f"{text}, matrix products in TF32" if uses_tf32(config) else text


def _checkpoint(config: RunConfig) -> str:
    checkpoint = config.checkpoint
    saves = [f"every {checkpoint.every_n_steps} steps"] if checkpoint.every_n_steps else []
    saves += [f"every {checkpoint.every_n_minutes:g} minutes"] if checkpoint.every_n_minutes else []
    saves += ["at the end"] if checkpoint.save_last else []
    kept = f", the newest {checkpoint.keep_last} kept" if checkpoint.keep_last else ", all kept"
    text = f"{' and '.join(saves)}{kept}" if saves else "none"
    if checkpoint.resume != "none":
        text += f"; resumes {checkpoint.resume}"
    return f"{text}; weights from {checkpoint.init_from}" if checkpoint.init_from else text
