"""Checks of pipeline parallelism: schedule, stages, layers and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mgpu_pipe.architectures.find import axes_of, stages_of
from mgpu_pipe.architectures.formulas.pipeline_schedules import (
    SCHEDULES,
    StagesPerRank,
    layer_costs,
    micro_batches_fit,
    stage_layers,
    stages_by_rank,
)
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.fields import VISION, part_fields

SCHEDULE_KEY = "strategy.pipeline.schedule"
LAYERS_KEY = "strategy.pipeline.layers"


def pipeline_errors(
    fields: Mapping[str, Any],
    model_type: str,
    pp: int,
    schedule: str,
    num_micro_batches: int,
    compile_model: bool = False,
    layers: Sequence[int] | None = None,
    stages_per_rank: StagesPerRank = "auto",
    checkpointing: str = "none",
) -> list[ConfigError]:
    """Errors of the pipeline's settings; none if ``pp`` is 1.

    Args:
        fields: of the model's configuration, with ``num_hidden_layers``.
        num_micro_batches: of a step batch.
        compile_model: ``model.compile``.
        layers: the configured number of layers of every stage; None balances them.
        stages_per_rank: ``strategy.pipeline.stages_per_rank``.
        checkpointing: ``strategy.activation_checkpointing``.
    """
    if pp == 1:
        return []
    if schedule not in SCHEDULES:
        close = nearest(schedule, set(SCHEDULES))
        fix = f"did you mean {close}?" if close else f"use one of {', '.join(SCHEDULES)}"
        return [ConfigError(SCHEDULE_KEY, schedule, fix, "no such schedule")]
    errors: list[ConfigError] = []
    if stages_of(model_type) is None:
        fix, reason = f"use 1; the axes for it are {axes_of(model_type)}", f"{model_type} cannot be cut into stages"
        errors.append(ConfigError("strategy.pp", pp, fix, reason))
    if SCHEDULES[schedule].splits_backward:
        errors += _split_backward_errors(schedule, compile_model, checkpointing)
    errors += _stages_errors(schedule, stages_per_rank)
    if not errors or errors[-1].key != "strategy.pipeline.stages_per_rank":
        stages = sum(map(len, stages_by_rank(schedule, pp, stages_per_rank)))
        num_layers = fields.get("num_hidden_layers")
        if isinstance(num_layers, int):  # unknown for a family refused above
            errors += _layer_errors(num_layers, schedule, pp, stages, layers)
        if not errors and isinstance(fields.get(VISION), Mapping):
            errors += _picture_errors(fields, stages, layers)
    if not micro_batches_fit(schedule, pp, num_micro_batches):
        fitting = fitting_micro_batches(schedule, pp, num_micro_batches)
        fix = f"make it {' or '.join(map(str, fitting))} by data.global_batch_size or data.micro_batch_size"
        reason = f"on {pp} ranks it does not take {num_micro_batches} micro-batches a step"
        errors.append(ConfigError(SCHEDULE_KEY, schedule, fix, reason))
    return errors


def _split_backward_errors(schedule: str, compile_model: bool, checkpointing: str) -> Iterator[ConfigError]:
    """Errors of a schedule that computes gradients of inputs and of weights apart."""
    alternatives = " or ".join(name for name, other in SCHEDULES.items() if not other.splits_backward)
    if compile_model:
        fix = f"use false, or {SCHEDULE_KEY}={alternatives}"
        reason = f"{schedule} computes gradients of inputs and weights apart"
        reason += ", which torch refuses to do with compiled modules"
        yield ConfigError("model.compile", True, fix, reason)
    if checkpointing == "selective":
        fix = f"use full or none, or {SCHEDULE_KEY}={alternatives}"
        reason = f"{schedule} goes back through a block twice, which torch refuses where it is kept in part"
        yield ConfigError("strategy.activation_checkpointing", checkpointing, fix, reason)


def _picture_errors(fields: Mapping[str, Any], stages: int, by_hand: Sequence[int] | None) -> list[ConfigError]:
    """An error if the first stage lacks layers that add the tower's features (DeepStack, arXiv:2406.04334)."""
    num_deepstack = len(
        part_fields(str(fields["model_type"]), VISION, fields[VISION]).get("deepstack_visual_indexes") or ()
    )
    first = len(stage_layers(layer_costs(fields, 1), stages, by_hand)[0])
    if first >= num_deepstack:
        return []
    rest, others = fields["num_hidden_layers"] - num_deepstack, stages - 1
    if rest < others:
        fix = f"use a pipeline of fewer stages: at most {rest + 1}"
    else:
        cut = [num_deepstack, *(rest // others + (index < rest % others) for index in range(others))]
        fix = f"give the first at least {num_deepstack}, e.g. {LAYERS_KEY}=[{','.join(map(str, cut))}]"
    layers_value = ",".join(map(str, by_hand)) if by_hand else "auto"
    reason = f"pictures enter after each of the first {num_deepstack} layers, and the first stage has only {first}"
    return [ConfigError(LAYERS_KEY, layers_value, fix, reason)]


def fitting_micro_batches(schedule: str, pp: int, wanted: int) -> list[int]:
    """The nearest numbers of micro-batches below and above ``wanted`` that the schedule accepts."""
    below = next((n for n in range(wanted - 1, 0, -1) if micro_batches_fit(schedule, pp, n)), None)
    above = next(n for n in range(wanted + 1, wanted + 4 * pp + 2) if micro_batches_fit(schedule, pp, n))
    return [above] if below is None else [below, above]


def _stages_errors(schedule: str, stages_per_rank: StagesPerRank) -> list[ConfigError]:
    traits = SCHEDULES[schedule]
    if stages_per_rank == "auto" or stages_per_rank == traits.stages_per_rank:
        return []
    if traits.more_stages and stages_per_rank > traits.stages_per_rank:
        return []
    least = f"at least {traits.stages_per_rank}" if traits.more_stages else str(traits.stages_per_rank)
    reason = f"{schedule} has {least} on a rank"
    return [ConfigError("strategy.pipeline.stages_per_rank", stages_per_rank, f"use {least}", reason)]


def _layer_errors(
    num_layers: int, schedule: str, pp: int, stages: int, by_hand: Sequence[int] | None
) -> list[ConfigError]:
    each = stages // pp
    if stages > num_layers:
        smaller = f"strategy.pp={num_layers // each}" if num_layers // each > 1 else "strategy.pp=1"
        fewer = f", or {SCHEDULE_KEY}=1f1b" if each > 1 and pp <= num_layers else ""
        fix = f"use at most {smaller}{fewer}, or a model of at least {stages} layers"
        return [ConfigError("strategy.pp", pp, fix, f"{schedule} cuts {num_layers} layers into {stages} stages")]
    if by_hand is None:
        return []
    layers_value = ",".join(map(str, by_hand))
    if len(by_hand) != stages:
        return [
            ConfigError(
                LAYERS_KEY, layers_value, f"give {stages} numbers", f"{schedule} with pp={pp} has {stages} stages"
            )
        ]
    if min(by_hand) < 1:
        return [ConfigError(LAYERS_KEY, layers_value, "give every stage at least 1 layer")]
    if sum(by_hand) != num_layers:
        even = [num_layers // stages + (index < num_layers % stages) for index in range(stages)]
        reason = f"the sum is {sum(by_hand)}, the model has {num_layers} layers"
        return [
            ConfigError(LAYERS_KEY, layers_value, f"make the sum {num_layers}, e.g. {','.join(map(str, even))}", reason)
        ]
    return []
