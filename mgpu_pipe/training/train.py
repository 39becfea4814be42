"""Trains one attempt of a run, inside a worker. :func:`train` is the page to read first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.loader import evaluation_step_batches, train_step_batches
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.errors import BadInputError, MgpuError, print_line
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.system.compat.lightning_private import quiet_libraries
from mgpu_pipe.training.attempt import Attempt, Inference, TrainResult
from mgpu_pipe.training.build_attempt import (
    BuiltModel,
    Engine,
    MetricsFiles,
    build_engine,
    build_model,
    build_objective,
)
from mgpu_pipe.training.rank_memory import is_out_of_memory, out_of_memory, write_snapshot
from mgpu_pipe.training.step import NonFiniteStep
from mgpu_pipe.training.summarize import summarize
from mgpu_pipe.training.trainer import run_trainer


def train(
    config: RunConfig,
    paths: RunPaths,
    prepared: Prepared,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
    resume: Path | None = None,
    inference: Inference | None = None,
) -> TrainResult:
    """Train from scratch, or from the step folder ``resume``, inside an initialised process group. Collective.

    Args:
        inference: needed where ``eval.tasks`` or ``trainer.sample_every_n_steps`` is set.

    Raises:
        NonFiniteError: on every rank, before the update: the loss or the gradient norm is not finite. Or a checkpoint
            would contain infinity or NaN.
        CheckpointError, CheckpointSaveError: a checkpoint cannot be read or written.
        BadInputError: the Trainer refuses a callback or a logger.
    """
    quiet_libraries()
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(config.trainer.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads it
    attempt = Attempt.from_config(config, paths, prepared, resume)
    attempt, built = build_model(attempt)
    objective = build_objective(attempt, built.model)
    files = MetricsFiles.from_attempt(attempt, objective)
    try:
        engine = build_engine(attempt, built, objective, files, stop_requested, inference)
        trainer = fit(attempt, built, objective, engine)
    finally:
        files.close()
    return summarize(attempt, built, objective, engine, trainer)


def fit(attempt: Attempt, built: BuiltModel, objective: Objective, engine: Engine) -> pl.Trainer:
    """Run the steps that are left; returns Lightning's Trainer, which ran them."""
    try:
        return _fit(attempt, objective, engine)
    except MisconfigurationException as error:
        refusal = " ".join(str(error).split())
        raise BadInputError(f"callbacks, logger: Lightning refuses this: {refusal}; change or remove it") from error
    except NonFiniteStep as step:
        raise engine.checkpointer.not_finite(step.what, step.step_batch) from None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _out_of_memory(error, attempt, built, engine) from error
    finally:
        if engine.profiler is not None:
            engine.profiler.close()


def _fit(attempt: Attempt, objective: Objective, engine: Engine) -> pl.Trainer:
    config, prepared, plan, rank = attempt.config, attempt.prepared, attempt.plan, attempt.data_parallel_rank
    evaluation = evaluation_step_batches(config, prepared, plan, rank, objective.samples)
    trainer = run_trainer(attempt, engine.strategy, engine.recorder, engine.profiler)
    batches = train_step_batches(
        config,
        prepared,
        plan,
        rank,
        start_sample=attempt.start_step * plan.global_batch_size,
        max_steps=attempt.max_steps,
        view=objective.samples,
    )
    trainer.fit(objective, batches, evaluation if prepared.validation_samples else None)
    return trainer


def _out_of_memory(error: BaseException, attempt: Attempt, built: BuiltModel, engine: Engine) -> MgpuError:
    """The error of a rank that ran out of memory, with the known parts of its memory; writes CUDA's snapshot."""
    parts: dict[str, int] = {}
    with suppress(Exception):  # an engine may not know its parts in the middle of a step
        parts = engine.strategy.memory_parts()
    if attempt.device.type == "cuda":
        with suppress(OSError):  # without the snapshot, on a full disk, the error still names the cause
            print_line(write_snapshot(attempt.paths.profile / f"memory-rank-{attempt.rank}.json"), file=sys.stderr)
    return out_of_memory(error, attempt, built.model, parts)
