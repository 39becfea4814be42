"""The model of a run on this rank's part of the mesh: forward passes, and the end of each step batch."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.packed_text import STARTS
from mgpu_pipe.parallel.context.attention import DOCUMENTS, documents_of, in_sequences, with_documents
from mgpu_pipe.parallel.context.sequences import forget_sequences
from mgpu_pipe.parallel.ddp import GradientReducer
from mgpu_pipe.parallel.fsdp import UsedParameters, reshard_all
from mgpu_pipe.parallel.parallelize import Fill, ParallelOptions, parallelize
from mgpu_pipe.parallel.pipeline.run_pipeline import MicroBatch
from mgpu_pipe.parallel.pipeline.stages import tied_parameter
from mgpu_pipe.parallel.tensor.collectives import reduce_replicated_gradients
from mgpu_pipe.topology import Meshes, ParallelDims
from mgpu_pipe.training.step import StepVotes
from mgpu_pipe.training.step_gradients import StepGradients, counted_once


class ParallelModel:
    """The parallelised model of ``objective`` on this rank. Building it is a collective call.

    Args:
        dims: the sizes of every axis.
        device: this process's device.
        fill: fills parameters and buffers of a model on the meta device, in place; None for a model that holds its
            weights.

    Attributes:
        meshes: the groups of ranks that this rank is in.
        parameters: the trained parameters of this rank.
        sharded: the root module of FSDP2, where it shards.
        pipeline: this rank's stages, where there are several.
        step_gradients: gradients of the current step batch.
        streams: random streams of dropout, where tensor-parallel ranks hold some activations whole and parts of others.
    """

    def __init__(
        self,
        objective: Objective,
        dims: ParallelDims,
        device: torch.device,
        options: ParallelOptions,
        fill: Fill | None,
    ) -> None:
        self._objective, self._dims, self._device, self._options = objective, dims, device, options
        self.meshes = Meshes(dims, device.type)
        self._parts = parallelize(
            objective, self.meshes, dims, device, options, fill, lambda: self.step_gradients.note_gradients()
        )
        self.sharded, self.pipeline, self.streams = self._parts.sharded, self._parts.pipeline, self._parts.streams
        model = objective.model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        reducer, used = None, None
        if self.sharded is not None:
            used = UsedParameters(model, self.parameters)
        elif dims.data_parallel_size > 1:
            reducer = GradientReducer(self.parameters, options.bucket_mib)
        counts_in_norm = counted_once(model) if dims.uses_model_axes else None
        self.step_gradients = StepGradients(self.parameters, reducer, used, counts_in_norm, device)

    def part_of(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's tokens of a micro-batch, with the documents that attention needs.

        Along a pipeline it has only the fields that this rank's stages need.
        """
        names = (*self.fields, *(name for name in (STARTS, DOCUMENTS) if name in micro_batch))
        return with_documents(self._objective.model, {name: micro_batch[name] for name in names})

    def known_on_host(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Values that :meth:`part_of` needs on the host, from a micro-batch that is not yet on the device."""
        return documents_of(self._objective.model, micro_batch)

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of a micro-batch that this rank needs."""
        stages = self.pipeline.views.values() if self.pipeline is not None else ()
        first = not stages or any(stage.first for stage in stages)
        last = not stages or any(stage.last for stage in stages)
        return self._objective.batch_spec.needed_fields(first, last)

    @property
    def counts_its_loss(self) -> bool:
        """Whether this rank contributes its sum of losses; tensor-parallel ranks hold the same sum."""
        return "tp" not in self._parts.groups or self._parts.groups["tp"].rank() == 0

    def begin_backward(self, last: bool) -> None:
        """Announce a micro-batch; ``last`` is the step batch's last. A pipeline does so by itself."""
        self.step_gradients.begin_backward(last, self.sharded, self.shards)

    @property
    def shards(self) -> bool:
        """Whether FSDP2 has several ranks to shard over."""
        return self._dims.dp_shard * self._dims.cp > 1 or self._dims.ep > 1

    def forward(self, part: MicroBatch) -> torch.Tensor:
        """The sum of losses of this rank's part (:meth:`part_of`) of a micro-batch, without a pipeline."""
        with in_sequences(self._objective.model, part):
            return self._objective.micro_batch_loss(part)

    def evaluate(self, part: MicroBatch) -> torch.Tensor:
        """The sums of the evaluation of this rank's part of a micro-batch, without a pipeline."""
        with in_sequences(self._objective.model, part):
            return self._objective.evaluation_sums(part)

    def end_step(
        self, loss_sum: torch.Tensor, votes: StepVotes, step_batch: StepBatch
    ) -> tuple[float, float, StepVotes]:
        """Reduce the gradients; the global loss, the gradient norm and the votes of all ranks. Collective."""
        forget_sequences()
        contributed = loss_sum if self.counts_its_loss else torch.zeros_like(loss_sum)
        return self.step_gradients.end(contributed, votes, step_batch, self._reduce_axes)

    def _reduce_axes(self) -> list[torch.nn.Parameter]:
        """All-reduce over the model axes; the parameters whose gradient other ranks hold too (tied across stages)."""
        if "tp" in self._parts.groups:
            reduce_replicated_gradients(self._objective.model, self._parts.groups["tp"])
        if self.pipeline is not None:
            self.pipeline.reduce_tied_gradients()
        tied = tied_parameter(self._objective.model)
        return [] if tied is None else [tied[1]]

    def step_metrics(self) -> dict[str, float]:
        """The spread of tokens over experts since the last call; empty for a dense model. Collective.

        ``experts/tokens_<i>`` counts, over all layers, the assignments that expert i was given: a token counts once for
        each of its ``top_k`` experts.
        """
        if not self._parts.num_experts:
            return {}
        uneven, counts = 0.0, [0.0] * (1 + self._parts.num_experts)
        if self._parts.expert_load is not None:
            load = self._parts.expert_load.take(
                self._parts.stage_group, 1 if self._options.sequence_parallel else self._dims.tp
            )
            uneven = load.max_over_mean
            counts[: 1 + len(load.by_expert)] = [float(load.dropped), *map(float, load.by_expert)]
        if "pp" in self._parts.groups:
            worst = torch.tensor([uneven], dtype=torch.float64, device=self._device)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._parts.groups["pp"])
            total = torch.tensor(counts, dtype=torch.float64, device=self._device)
            dist.all_reduce(total, group=self._parts.groups["pp"])
            uneven, counts = worst.item(), total.tolist()
        names = ["dropped_tokens", *(f"tokens_{expert}" for expert in range(self._parts.num_experts))]
        return {
            "experts/load_max_over_mean": uneven,
            **{f"experts/{name}": count for name, count in zip(names, counts, strict=True)},
        }

    def free_gathered(self) -> None:
        """Restore the sharded fp32 parameters after a forward pass without backward, which leaves compute copies."""
        forget_sequences()
        if self.sharded is not None:
            reshard_all(self.sharded)
