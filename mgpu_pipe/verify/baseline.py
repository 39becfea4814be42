"""Plain computation of one process that strategies are compared with; it shares no code with them.

It takes the objective's plain losses of stock forward passes, one backward pass, a float64 norm and the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from mgpu_pipe.checkpoint.live_tensors import model_shards, optimizer_shards
from mgpu_pipe.checkpoint.tensor_slices import LocalShard
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.data.step_batch import BatchSpec, StepBatch
from mgpu_pipe.models.build import materialise, run_model
from mgpu_pipe.models.rotary import fix_rotary_length
from mgpu_pipe.objectives.base import Batch, Objective
from mgpu_pipe.optim.optimizers import build_schedule, optimizer_factory
from mgpu_pipe.topology import BatchPlan


def micro_batches(batch: Batch, spec: BatchSpec, size: int) -> list[Batch]:
    """``batch`` in consecutive pieces of ``size`` samples."""
    return [
        {name: value[start : start + size] for name, value in batch.items()}
        for start in range(0, spec.rows(batch), size)
    ]


def step_batch_of(batch: Batch, spec: BatchSpec, step: int, plan: BatchPlan, data_parallel_rank: int) -> StepBatch:
    """One process's share of a global batch, like that of the loader."""
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


def global_batch(objective: Objective, data: DataConfig, seed: int, step: int, *, packed: bool) -> Batch:
    """All samples of an optimizer step of the small run."""
    return objective.random_batch(seed, step, data.global_batch_size, data.seq_len, packed)


CLIP_EPSILON = 1e-6
"""Epsilon of torch.nn.utils.clip_grad_norm_."""
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}
BATCH_STATISTICS = (".running_mean", ".running_var")
"""Buffers of a batch norm; torch takes them in the type of its weights."""
LOSS_SCALE = 2.0**16
"""Initial scale of torch.amp.GradScaler."""


@dataclass
class PlainStep:
    """Result of a step: loss, norm before clipping, and clipped gradients by parameter name."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]


class BaselineRun:
    """Model on one process with keyed initial weights.

    Args:
        objective: provides the plain losses; its model is not used.
        precision: ``bf16`` and ``fp16`` compute as one such process does: parameters cast for the forward and
            backward passes, fp32 master weights, gradients summed over micro-batches in fp32; under fp16 the loss is
            scaled. ``bf16_true`` computes everything in bf16.
    """

    def __init__(self, config: RunConfig, objective: Objective, precision: str = "fp32") -> None:
        self._objective = objective
        model = run_model(config)
        fix_rotary_length(model, config.data.seq_len)
        self.model = materialise(model, config.seed, "cpu")
        if precision == "bf16_true":
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        self._scale = LOSS_SCALE if precision == "fp16" else 1.0
        self.optimizer = optimizer_factory(config.optimizer, model, precision)(model)
        self._compute_dtype = COMPUTE.get(precision)
        self._max_norm = config.trainer.gradient_clip_val
        self._schedule = build_schedule(config.scheduler, config.scheduler.total_steps or 1)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, number: int, batches: Sequence[Batch]) -> PlainStep:
        """Runs one optimizer step.

        Args:
            number: zero-based step, for the schedule.
            batches: the step's samples, in one or several forward passes.
        """
        self.optimizer.zero_grad(set_to_none=True)
        spec = self._objective.batch_spec
        count = sum(spec.valid_targets(batch) for batch in batches)
        samples = sum(spec.rows(batch) for batch in batches)
        losses = []
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for batch in batches:
            reference = self._objective.reference_loss(self._forward, self.model, batch)
            loss, auxiliary = reference.loss_sum / count, reference.auxiliary_sum / samples
            ((loss + auxiliary) * self._scale).backward()
            losses.append(float(loss.detach()))
            self._add_rounded(sums)
        with torch.no_grad():
            for parameter, gradient in sums.items():
                parameter.grad = gradient
            gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
            for gradient in gradients.values():
                gradient.div_(self._scale)
            norm = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
            if self._max_norm is not None and norm > self._max_norm:
                for gradient in gradients.values():
                    gradient.mul_(self._max_norm / (norm + CLIP_EPSILON))
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = 0.0 if number < group.get("frozen_until", 0) else rate * self._schedule(number)
        self.optimizer.step()
        return PlainStep(sum(losses), norm, gradients)

    def _add_rounded(self, sums: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        """Moves the gradients of a micro-batch to ``sums``, in the precision that the parameters are cast to.

        The plain losses cast them anew for each sample, and a micro-batch's gradient would be a sum in fp32.
        """
        if self._compute_dtype is None:
            return
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.to(self._compute_dtype).float()
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
                parameter.grad = None

    def weights(self) -> list[LocalShard]:
        return model_shards(self.model)

    def optimizer_state(self) -> list[LocalShard]:
        return optimizer_shards(self.model, self.optimizer)

    def _forward(self, **inputs: Any) -> Any:
        if self._compute_dtype is None:
            return self.model(**inputs)
        statistics = (item for item in self.model.named_buffers() if item[0].endswith(BATCH_STATISTICS))
        cast = {name: t.to(self._compute_dtype) for name, t in chain(self.model.named_parameters(), statistics)}
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():  # pictures, sound
                inputs[name] = value.to(self._compute_dtype)
        return torch.func.functional_call(self.model, cast, kwargs=inputs)
