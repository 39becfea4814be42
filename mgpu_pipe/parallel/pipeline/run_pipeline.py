"""Pipeline parallelism: step batches, evaluation and sampling over the stages of a cut model.

Training runs torch's schedules (:mod:`parallel.pipeline.schedule`) on the micro-batches of the step batch.
Evaluation and sampling run forward passes slot by slot (:func:`forward_slots`): ranks work on different
micro-batches, and send a slot's results before the next slot. All messages of a slot are one batch, so no order of
stages deadlocks. These micro-batches may be ragged, and of any number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mgpu_pipe.architectures.formulas.pipeline_schedules import LayerCosts, StagesPerRank, stage_layers, stages_by_rank
from mgpu_pipe.data.step_batch import BatchSpec
from mgpu_pipe.parallel.device_memory import ForwardMeter, gathered_bytes
from mgpu_pipe.parallel.pipeline.schedule import ScheduledStage, build_schedule, reduce_tied_gradients
from mgpu_pipe.parallel.pipeline.stages import StageView, caches_of_stages, cut_stages, hidden_width, lengthen_missing
from mgpu_pipe.parallel.pipeline.work_order import forward_slots
from mgpu_pipe.system.compat.torch_private import find_fsdp_units

MicroBatch = Mapping[str, torch.Tensor]


class StageObjective(Protocol):
    """The part of an objective that a pipeline uses; the last stage computes the losses."""

    @property
    def batch_spec(self) -> BatchSpec:
        """The spec of the micro-batches."""

    def model_inputs(self, batch: MicroBatch) -> Mapping[str, Any]:
        """Keyword arguments of the model's forward pass."""

    def micro_batch_loss(self, batch: MicroBatch) -> torch.Tensor:
        """The micro-batch's sum of losses, a float64 scalar."""

    def evaluation_sums(self, batch: MicroBatch) -> torch.Tensor:
        """The sums that evaluation accumulates, the sum of losses first; float64."""


InStage = Callable[[MicroBatch, bool, float, Callable[[], torch.Tensor]], torch.Tensor]
"""Runs a stage's forward pass: the micro-batch, whether the stage is the last, the loss scale, and the pass itself."""


@dataclass(frozen=True)
class PipelinePlan:
    """Which stages are where, equal on every rank.

    Attributes:
        schedule: one of :data:`mgpu_pipe.architectures.formulas.pipeline_schedules.SCHEDULES`.
        layers: of every stage.
        stages_of_ranks: the stages of every pipeline rank.
    """

    schedule: str
    layers: tuple[range, ...]
    stages_of_ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def make(
        cls,
        schedule: str,
        ranks: int,
        costs: LayerCosts,
        by_hand: Sequence[int] | None = None,
        stages_per_rank: StagesPerRank = "auto",
    ) -> PipelinePlan:
        """Cut by cost, or by hand (the number of layers of every stage, in the order of the stages)."""
        stages_of_ranks = stages_by_rank(schedule, ranks, stages_per_rank)
        return cls(schedule, stage_layers(costs, sum(map(len, stages_of_ranks)), by_hand), stages_of_ranks)

    @property
    def ranks_of_stages(self) -> tuple[int, ...]:
        ranks = {stage: rank for rank, stages in enumerate(self.stages_of_ranks) for stage in stages}
        return tuple(ranks[stage] for stage in range(len(self.layers)))

    @property
    def last_rank(self) -> int:
        """The rank that holds the last stage, where losses and logits are."""
        return self.ranks_of_stages[-1]

    def cut(self, model: nn.Module, rank: int) -> list[StageView]:
        """Delete from a meta ``model`` what ``rank`` does not hold; its stages."""
        return cut_stages(model, self.layers, self.stages_of_ranks, rank)


class Pipeline:
    """Runs the stages of this rank with those of the others of ``group``; every call is one of the whole group.

    Args:
        plan: where the stages are.
        views: this rank's stages, from :meth:`PipelinePlan.cut`, once the model is filled (and sharded).
        group: this rank's pipeline.
        device: of activations.
        objective: its losses are computed on the last stage alone.
        dtype: of hidden states between stages: what the model computes in.
        in_stage: runs each forward pass of a stage within its context managers.
        after_weights: called when gradients of weights were computed apart from those of inputs.
        measure: measure what each stage's first forward pass leaves for its backward pass.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        views: Sequence[StageView],
        group: dist.ProcessGroup,
        device: torch.device,
        objective: StageObjective,
        dtype: torch.dtype = torch.float32,
        in_stage: InStage = lambda batch, last, scale, compute: compute(),
        after_weights: Callable[[], None] = lambda: None,
        measure: bool = False,
    ) -> None:
        self.plan, self.views, self.group = plan, {view.index: view for view in views}, group
        self.stages: list[ScheduledStage] = []
        """The scheduled stages of the last step batch."""
        self._device, self._objective, self._dtype = device, objective, dtype
        self._model = views[0].model
        self._width = hidden_width(self._model)
        self._in_stage, self._after_weights = in_stage, after_weights
        self._measure = measure
        self._left: dict[int, int] = {}
        self._seed = self._loss_scale = 1.0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._schedules: dict[tuple[object, ...], tuple[object, list[ScheduledStage]]] = {}

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    # -- training -----------------------------------------------------------------------------------------------

    def run_step_batch(
        self, micro_batches: Sequence[MicroBatch], loss_denominator: float, loss_scale: float = 1.0
    ) -> torch.Tensor:
        """Forward and backward of a step batch; gradients are added to what the parameters hold.

        Args:
            micro_batches: equal in shape, and the same on every rank of the pipeline.
            loss_denominator: what the sum of losses is divided by; ``loss_scale`` multiplies it in the backward pass
                only.

        Returns:
            The sum of losses on the rank of the last stage, a float64 scalar; zero on the others.
        """
        self._seed, self._loss_scale = loss_scale / loss_denominator, loss_scale
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._find_sharded()
        count = len(micro_batches)
        schedule, self.stages = self._schedule(count, self._boundary_shape(micro_batches[0]))
        merged = self._objective.batch_spec.join(micro_batches)
        # torch wants a target to compute a loss with; the micro-batch has its own.
        schedule.step(**merged, target=torch.empty(count), return_outputs=False)  # type: ignore[attr-defined]
        return self._loss_sum

    def reduce_tied_gradients(self) -> None:
        """Sum the gradients of embeddings tied across ranks; once a step batch, after all other reductions."""
        reduce_tied_gradients(self._model, self.group, self.plan.ranks_of_stages[0], self.plan.last_rank)

    def _schedule(self, count: int, boundary: tuple[int, ...]) -> tuple[object, list[ScheduledStage]]:
        key = (count, boundary)
        if key not in self._schedules:
            stages: list[ScheduledStage] = []
            for view in self.views.values():
                ScheduledStage(
                    self._model,
                    view.index,
                    len(self.plan.layers),
                    self._device,
                    self.group,
                    partial(self._train_stage, view),
                    boundary,
                    self._dtype,
                    stages,
                    self._after_weights,
                )
            self._schedules[key] = build_schedule(self.plan.schedule, stages, count, self._scale_loss), stages
        return self._schedules[key]

    def _scale_loss(self, loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss * self._seed

    def _train_stage(self, view: StageView, received: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        if self._measure and view.index not in self._left:
            output = self._run_measured(view, received, batch)
        else:
            output = self._forward(view, received, batch)
        if view.last:
            self._loss_sum += output.detach()
        return output

    def _run_measured(self, view: StageView, received: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        gathered = gathered_bytes(self._model)
        with ForwardMeter(self._device) as meter:
            output = self._forward(view, received, batch)
        gathered = gathered_bytes(self._model) - gathered
        self._left[view.index] = max(0, meter.left_bytes() - gathered)
        return output

    def activation_bytes(self) -> int | None:
        """The most that this rank's stages kept for backward passes in the last step batch; None if unknown."""
        if not self._measure or not self.stages:
            return None
        return sum(self._left[stage.stage_index] * stage.most_in_flight for stage in self.stages)

    def _forward(self, view: StageView, received: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        return self._with(self._objective.micro_batch_loss, view, received, batch)

    def _with(
        self,
        result_of: Callable[[MicroBatch], torch.Tensor],
        view: StageView,
        received: torch.Tensor | None,
        batch: MicroBatch,
    ) -> torch.Tensor:
        """Hidden states, or on the last stage ``result_of`` the micro-batch."""
        spec = self._objective.batch_spec
        batch = spec.in_stage(batch, view.first, view.last)

        def compute() -> torch.Tensor:
            if not view.last:
                return self._sent(view(received, self._objective.model_inputs(batch)), spec.rows(batch))
            with view.activate(received):
                return result_of(batch)

        return self._in_stage(batch, view.last, self._loss_scale, compute)

    def _sent(self, output: torch.Tensor, rows: int) -> torch.Tensor:
        """The output for the next stage, without the row that an objective may add for the first stage."""
        return output if len(output) == rows else output[:rows].clone()

    def _find_sharded(self) -> None:
        """Make FSDP2's root find its units while all stages are in the model, before its first forward pass."""
        if isinstance(self._model, FSDPModule):
            find_fsdp_units(self._model)

    def _boundary_shape(self, batch: MicroBatch) -> tuple[int, ...]:
        spec = self._objective.batch_spec
        return spec.rows(batch), spec.length(batch), self._width

    # -- forward passes alone -----------------------------------------------------------------------------------

    @torch.no_grad()
    def run_evaluation(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """The evaluation's sums on the last stage's rank, zero elsewhere; micro-batches of any shapes, or none."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for output in self._forward_all(micro_batches, partial(self._with, self._objective.evaluation_sums)):
            total = total + output
        return total

    @torch.no_grad()
    def logits(
        self, batch: MicroBatch, vocabulary: int, keep: int = 1, cached: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        """Logits of the last positions of every row, float32 of shape (rows, positions, vocabulary), on all ranks.

        Args:
            batch: the same on every rank.
            keep: number of last positions to keep; 0 keeps all, as in transformers.
            cached: the model's arguments in ``generate()`` with its ``past_key_values``, where the batch holds new
                tokens alone.
        """
        outputs = self._forward_all([batch], partial(self._logits, keep, cached))
        spec = self._objective.batch_spec
        shape = (spec.rows(batch), keep or spec.length(batch), vocabulary)
        shared = outputs[0] if outputs else torch.empty(shape, device=self._device)
        source = dist.get_global_rank(self.group, self.plan.last_rank)
        dist.broadcast(shared, source, group=self.group)
        return shared

    def _logits(
        self,
        keep: int,
        cached: Mapping[str, Any] | None,
        view: StageView,
        received: torch.Tensor | None,
        batch: MicroBatch,
    ) -> torch.Tensor:
        spec = self._objective.batch_spec
        if cached is None:
            inputs = self._objective.model_inputs(spec.in_stage(batch, view.first, view.last))
            output = self._in_stage(batch, view.last, 1.0, lambda: view(received, inputs))
        else:
            cache = caches_of_stages(cached["past_key_values"], list(self.views))[view.index]
            inputs = {**cached, "past_key_values": cache}
            output = self._in_stage(batch, view.last, 1.0, lambda: view(received, inputs))
            lengthen_missing(cache, view.layers, self._boundary_shape(batch)[:2], self._device)
        return output[:, -keep:].float().contiguous() if view.last else self._sent(output, spec.rows(batch))

    def _forward_all(
        self,
        micro_batches: Sequence[MicroBatch],
        compute: Callable[[StageView, torch.Tensor | None, MicroBatch], torch.Tensor],
    ) -> list[torch.Tensor]:
        """The last stage's outputs in order; none on the other ranks."""
        self._find_sharded()
        ranks, last = self.plan.ranks_of_stages, len(self.plan.layers) - 1
        stages_of_ranks = self.plan.stages_of_ranks
        waiting: dict[tuple[int, int], torch.Tensor] = {}
        outputs: list[torch.Tensor] = []
        for slot in forward_slots(
            self.plan.schedule, len(stages_of_ranks), len(micro_batches), len(stages_of_ranks[0])
        ):
            messages: list[dist.P2POp] = []
            for _, stage, index in slot:
                source, target = ranks[stage], ranks[min(stage + 1, last)]
                if source == self.rank:
                    output = compute(self.views[stage], waiting.pop((stage, index), None), micro_batches[index])
                    if stage == last:
                        outputs.append(output)
                    elif target == source:
                        waiting[stage + 1, index] = output
                    else:
                        messages.append(self._message(dist.isend, output.contiguous(), target))
                elif target == self.rank and stage != last:
                    shape = self._boundary_shape(micro_batches[index])
                    buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
                    waiting[stage + 1, index] = buffer
                    messages.append(self._message(dist.irecv, buffer, source))
            for work in dist.batch_isend_irecv(messages) if messages else []:
                work.wait()
        return outputs

    def _message(self, operation: Callable[..., object], tensor: torch.Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, dist.get_global_rank(self.group, rank), self.group)
