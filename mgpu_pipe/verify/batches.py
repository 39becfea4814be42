"""The batches of a verification, which the objective draws, cut as the product's loader would.

They are made from (seed, step) alone, so that every process makes the same ones and takes its share.
"""

from __future__ import annotations

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.batch_spec import BatchSpec
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.objectives.base import Batch, Objective
from mgpu_pipe.topology import BatchPlan


def micro_batches(batch: Batch, spec: BatchSpec, size: int) -> list[Batch]:
    """``batch`` in consecutive pieces of ``size`` samples."""
    return [{name: value[at : at + size] for name, value in batch.items()} for at in range(0, spec.rows(batch), size)]


def step_batch_of(batch: Batch, spec: BatchSpec, step: int, plan: BatchPlan, data_parallel_rank: int) -> StepBatch:
    """One process's share of a global batch, as the product's loader would give it."""
    share = plan.samples_per_process
    first = data_parallel_rank * share
    mine = {name: value[first : first + share] for name, value in batch.items()}
    return StepBatch(
        step=step,
        first_sample=step * plan.global_batch_size,
        num_samples=plan.global_batch_size,
        micro_batches=micro_batches(mine, spec, plan.micro_batch_size),
        loss_denominator=spec.valid_targets(batch),
    )


def global_batch(objective: Objective, config: RunConfig, step: int) -> Batch:
    """All samples of one optimizer step of the (small) ``config``."""
    data = config.data
    return objective.random_batch(config.seed, step, data.global_batch_size, data.seq_len, data.packing != "none")
