"""Summarizes an attempt after its last step: its result, and the run's ``summary.json``. Inside a worker."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch

from mgpu_pipe.config.objective import bits_per_byte, description
from mgpu_pipe.config.resolve import uses_tf32
from mgpu_pipe.data.samples import imbalances
from mgpu_pipe.errors import GradientSpikeError
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.parallel.random_streams import STATISTICAL, uses_dropout
from mgpu_pipe.training.attempt import Attempt, TrainResult
from mgpu_pipe.training.build_attempt import BuiltModel, Engine
from mgpu_pipe.training.profiling.advice import findings
from mgpu_pipe.training.rank_memory import by_rank, memory_by_rank
from mgpu_pipe.training.recorder import peak_memory_gib
from mgpu_pipe.training.strategy import EngineStrategy


def summarize(
    attempt: Attempt, built: BuiltModel, objective: Objective, engine: Engine, trainer: pl.Trainer
) -> TrainResult:
    """The result of an attempt after its last step, or GradientSpikeError by ``optimizer.spike_guard``. Collective."""
    reader, recorder, checkpointer = attempt.reader, engine.recorder, engine.checkpointer
    if engine.strategy.spike_guard.stopped_by is not None:
        raise GradientSpikeError(engine.strategy.spike_guard.stopped_by, checkpointer.last_path)
    stopped_early = recorder.stopped and recorder.step < attempt.max_steps
    ended_by_time = stopped_early and _ended_by_time(engine.strategy, engine.stop_requested(), engine.clock.is_over())
    if reader is not None and recorder.step == attempt.start_step:  # killed after the last save, or stopped at once
        in_this_run = reader.folder.parent == attempt.paths.checkpoints
        if in_this_run or attempt.start_step >= attempt.max_steps:
            recorder.metrics.update(reader.state["metrics"])
            checkpointer.last_path = reader.folder
    status = "stopped" if stopped_early and not ended_by_time else "finished"
    metrics = _metrics(attempt, engine)
    summary = {
        "status": status,
        "step": recorder.step,
        "max_steps": recorder.max_steps,
        **({"max_time": attempt.config.trainer.max_time} if ended_by_time else {}),
        **_how_it_ran(attempt, built),
        "metrics": metrics,
        **_what_it_has(attempt, built, objective, engine),
    }
    return TrainResult(
        built.model,
        status,
        recorder.step,
        metrics,
        checkpointer.last_path,
        engine.strategy.holds_whole_model,
        summary,
        engine.strategy.sampling_forward(),
        trainer.loggers,
    )


def _ended_by_time(strategy: EngineStrategy, stop_requested: bool, over: bool) -> bool:
    """Whether ``trainer.max_time`` alone stopped the ranks; each knows its own reasons. A collective call."""
    reasons = torch.tensor([stop_requested, over], dtype=torch.float64, device=strategy.root_device)
    any_requested, any_over = strategy.sum_over_data(reasons).tolist()
    return any_over > 0 and not any_requested


def _metrics(attempt: Attempt, engine: Engine) -> dict[str, float]:
    """The last metrics, with baselines that the data knows."""
    prepared = attempt.prepared
    metrics = {**engine.recorder.metrics, **engine.recorder.throughput()}
    for metric in description(attempt.config.objective.name).metrics:
        if metric.baseline is not None and getattr(prepared, metric.baseline, None) is not None:
            metrics[f"val/{metric.baseline}"] = getattr(prepared, metric.baseline)
    return metrics | bits_per_byte(metrics, *prepared.evaluated_text())


def _how_it_ran(attempt: Attempt, built: BuiltModel) -> dict[str, Any]:
    config = attempt.config
    return {
        "world_size": attempt.dims.world_size,
        "topology": attempt.dims.as_dict(),
        "strategy": config.strategy.name,
        "objective": config.objective.name,
        "precision": attempt.precision,
        **({"parity": STATISTICAL} if uses_dropout(built.model) else {}),
        "tf32": uses_tf32(config.precision, config.trainer),
        "kernels": config.model.kernels,
    }


def _what_it_has(attempt: Attempt, built: BuiltModel, objective: Objective, engine: Engine) -> dict[str, Any]:
    """Checkpoint, model, batch, data, tasks, memory and times. Collective."""
    config, plan, device, checkpoint = attempt.config, attempt.plan, attempt.device, engine.checkpointer.last_path
    kind, sizes = type(built.model).__name__.removeprefix("FSDP"), (built.parameters, built.trained)
    details = objective.evaluation_details
    return {
        "checkpoint": str(checkpoint.relative_to(checkpoint.parents[1])) if checkpoint is not None else None,
        "model": {"name": config.model.name, "class": kind, "parameters": sizes[0], "trained": sizes[1]},
        "batch": {
            "global_batch_size": plan.global_batch_size,
            "micro_batch_size": plan.micro_batch_size,
            "num_micro_batches": plan.num_micro_batches,
            "data_parallel_size": plan.data_parallel_size,
            "seq_len": config.data.seq_len,
        },
        "data": attempt.prepared.as_dict(),
        **({"found": details} if details else {}),
        **({"tasks": engine.tasks.summary_values()} if engine.tasks is not None else {}),
        "memory": memory_by_rank(engine.strategy.memory_parts(), peak_memory_gib(device), device),
        "times": by_rank(engine.recorder.times(), device),
        **_profile(attempt, objective, engine),
    }


def _profile(attempt: Attempt, objective: Objective, engine: Engine) -> dict[str, Any]:
    """The entries of ``trainer.profile``; none without it. Collective."""
    if engine.profiler is None:
        return {}
    config = attempt.config
    samples = objective.samples(config, attempt.prepared.open(config, "train"))
    uneven = imbalances(samples, attempt.prepared.order(config.seed, config.data, len(samples)), attempt.plan)
    advise = partial(
        findings,
        strategy=config.strategy,
        data=config.data,
        objective=config.objective,
        dims=attempt.dims,
        plan=attempt.plan,
        uneven=uneven,
    )
    return engine.profiler.finish(advise, peak_memory_gib(attempt.device))
