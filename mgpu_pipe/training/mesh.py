"""The mesh engine: one Lightning Strategy on a torch device mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from transformers.modeling_outputs import CausalLMOutputWithPast
from typing_extensions import Unpack

from mgpu_pipe.architectures.formulas.pipeline_schedules import layer_costs
from mgpu_pipe.checkpoint.live_tensors import restore_numbers
from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.protocols import FeatureGatherer, TextGenerator, gather_features
from mgpu_pipe.optim.gradients import LossScale, clip_gradients, scale_gradients
from mgpu_pipe.optim.muon import Muon
from mgpu_pipe.optim.whole_matrices import WholeMatrices
from mgpu_pipe.parallel.device_memory import ForwardMeter, gathered_bytes, storage_bytes
from mgpu_pipe.parallel.fsdp import ShardingOptions
from mgpu_pipe.parallel.parallelize import ParallelOptions
from mgpu_pipe.parallel.pipeline.run_pipeline import MicroBatch, Pipeline, PipelinePlan
from mgpu_pipe.parallel.pipeline.stages import can_cache_stages
from mgpu_pipe.parallel.random_streams import step_seed
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.parallel_model import ParallelModel
from mgpu_pipe.training.step import NonFiniteStep, StepVotes
from mgpu_pipe.training.strategy import EngineOptions, EngineStrategy, SamplingForward


class MeshStrategy(EngineStrategy):
    """Runs whole optimizer steps on a mesh of processes. Made by all ranks alike, a collective call.

    The process group exists already when the strategy is made. ``fp32`` data parallelism alone keeps whole weights and
    sums gradients by :class:`~mgpu_pipe.parallel.ddp.GradientReducer`; everything else goes through FSDP2.

    Args:
        dims: the sizes of every axis.
        device: this process's device.
        options: how the model is cut over them.
        engine_options: see :class:`~mgpu_pipe.training.strategy.EngineOptions`.
    """

    strategy_name = "mgpu_mesh"

    def __init__(
        self,
        dims: ParallelDims,
        device: torch.device,
        options: ParallelOptions | None = None,
        **engine_options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(dims, device, **engine_options)
        self._options = options or ParallelOptions()
        self._parallel_model: ParallelModel | None = None
        self._loss_scale = LossScale() if self._options.precision == "fp16" else None

    @classmethod
    def run_options(cls, config: RunConfig, dims: ParallelDims) -> dict[str, Any]:
        strategy = config.strategy
        plan = None
        if dims.pp > 1:
            costs = layer_costs(resolved_fields(config.model), config.data.seq_len)
            chosen = strategy.pipeline
            plan = PipelinePlan.make(chosen.schedule, dims.pp, costs, chosen.layers or None, chosen.stages_per_rank)
        options = ParallelOptions(
            precision=resolve_precision(config.precision, config.trainer),
            fp8_recipe=config.precision.fp8_recipe,
            bucket_mib=strategy.bucket_mib,
            sharding=ShardingOptions(
                strategy.fsdp.reshard_after_forward,
                strategy.fsdp.prefetch,
                offload=strategy.offload == "cpu",
                reduce=config.precision.reduce,
            ),
            activation_checkpointing=strategy.activation_checkpointing,
            compile_model=config.model.compile is True,
            sequence_parallel=strategy.sequence_parallel,
            pipeline=plan,
            context_method=strategy.context.method,
            whole_parts=strategy.parts.whole,
            tower_checkpointing=strategy.parts.activation_checkpointing,
        )
        return {"options": options}

    # -- what Lightning asks ------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                self._gather_matrices(optimizer)

    def _gather_matrices(self, optimizer: Muon) -> None:
        """Let the optimizer see whole matrices where ranks hold parts of them. A collective call."""
        if self.dims.dp_shard * self.dims.cp * self.dims.tp == 1:
            return
        ranks = self.parallel_model.meshes.group("replica")
        optimizer.cut = [
            WholeMatrices(self.objective.model, group["params"], ranks, self._device)
            for group in optimizer.param_groups
            if group["matrices"]
        ]

    # -- assembling ---------------------------------------------------------------------------------------------

    def parallelise(self, model: torch.nn.Module) -> None:
        """Split ``model`` over the mesh, then fill its parameters, each rank its own parts. A collective call."""
        assert model is self.objective.model
        if self._parallel_model is not None:
            return  # by an earlier fit or validation
        self._parallel_model = ParallelModel(self.objective, self.dims, self._device, self._options, self._materialise)

    @property
    def parallel_model(self) -> ParallelModel:
        assert self._parallel_model is not None, "the model is parallel once training is set up"
        return self._parallel_model

    # -- one step -----------------------------------------------------------------------------------------------

    def begin_step(self, step_batch: StepBatch) -> list[MicroBatch]:
        if self._dropout_seed is not None:
            self._seed(self._dropout_seed, step_batch.step)
        self.parallel_model.step_gradients.begin()
        return [self.parallel_model.part_of(micro_batch) for micro_batch in step_batch.micro_batches]

    def forward_backward(self, parts: Sequence[MicroBatch], step_batch: StepBatch) -> torch.Tensor | None:
        parallel_model = self.parallel_model
        scale = self._loss_scale.value if self._loss_scale is not None else 1.0
        if parallel_model.pipeline is not None:
            # The micro-batches of a pipeline are under way together, so no stop comes between two of them.
            loss_sum = parallel_model.pipeline.run_step_batch(parts, step_batch.loss_divisor, scale)
            activations = parallel_model.pipeline.activation_bytes()
            if activations is not None:
                self._memory["activations"] = activations
            return loss_sum
        gather_features(self.objective, parts, len(parts), self)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, part in enumerate(parts):
            if self.micro_batch_stop.should_leave(index, len(parts)):
                return None
            parallel_model.begin_backward(last=index == len(parts) - 1)
            loss = self._forward(part)
            loss.backward(torch.full_like(loss, scale / step_batch.loss_divisor))
            loss_sum += loss.detach()
        return loss_sum

    def _seed(self, seed: int, step: int) -> None:
        shared, per_rank = (
            step_seed(seed, step, place)
            for place in (self.dims.randomness_rank(self.global_rank), self.dims.own_randomness_rank(self.global_rank))
        )
        if self.parallel_model.streams is None:
            torch.manual_seed(shared)
        else:
            self.parallel_model.streams.begin(shared, per_rank)

    def _forward(self, part: MicroBatch) -> torch.Tensor:
        """The loss of a micro-batch's part; the first one's activations are measured."""
        if "activations" in self._memory or self._options.compile_model:
            return self.parallel_model.forward(part)
        with ForwardMeter(self._device) as meter:
            loss = self.parallel_model.forward(part)
        gathered = gathered_bytes(self.objective.model) if self.parallel_model.sharded is not None else 0
        self._memory["activations"] = max(0, meter.left_bytes() - gathered)
        return loss

    def reduce_gradients(
        self, loss_sum: torch.Tensor, votes: StepVotes, step_batch: StepBatch
    ) -> tuple[float, float, StepVotes]:
        return self.parallel_model.end_step(loss_sum, votes, step_batch)

    def unscale(self, gradient_norm: float, step_batch: StepBatch) -> tuple[float, bool]:
        if "gradients" not in self._memory:
            gradients = (p.grad for p in self.parallel_model.parameters if p.grad is not None)
            self._memory["gradients"] = storage_bytes(gradients, self._device.type)
        if self._loss_scale is None:
            return gradient_norm, True
        gradient_norm /= self._loss_scale.value
        finite = gradient_norm - gradient_norm == 0.0
        if finite:
            scale_gradients(self.parallel_model.parameters, 1.0 / self._loss_scale.value)
        try:
            self._loss_scale.update(finite)
        except OverflowError:
            raise NonFiniteStep("the gradient norm", step_batch) from None
        return gradient_norm, finite

    def drop_gradients(self) -> None:
        self.parallel_model.step_gradients.drop()

    def clip(self, gradient_norm: float) -> None:
        if self._max_norm is not None:
            clip_gradients(self.parallel_model.parameters, gradient_norm, self._max_norm)

    def zero_gradients(self) -> None:
        self.parallel_model.step_gradients.zero()

    @torch.no_grad()
    def run_evaluation(self, step_batch: StepBatch) -> torch.Tensor:
        parallel_model, micro_batches = self.parallel_model, step_batch.micro_batches
        if parallel_model.shards or isinstance(self.objective, FeatureGatherer) or self.objective.gathers:
            micro_batches = self._as_many_as_any(micro_batches)
        if parallel_model.pipeline is not None:
            total = parallel_model.pipeline.run_evaluation(
                [parallel_model.part_of(micro_batch) for micro_batch in micro_batches]
            )
        else:
            parts = [parallel_model.part_of(micro_batch) for micro_batch in micro_batches]
            gather_features(self.objective, parts, len(step_batch.micro_batches), self)
            total = torch.zeros((), dtype=torch.float64, device=self._device)
            for part in parts:
                total = total + parallel_model.evaluate(part)
        parallel_model.free_gathered()
        return total if parallel_model.counts_its_loss else torch.zeros_like(total)

    def _as_many_as_any(self, micro_batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Pad with empty micro-batches until ranks have equally many: a forward pass gathers from all ranks."""
        spec = self.objective.batch_spec
        length = spec.length(micro_batches[0]) if micro_batches else 0
        most = torch.tensor([len(micro_batches), length], device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        count, length = most.tolist()
        missing = count - len(micro_batches)
        return [*micro_batches, *[spec.empty(length, self._device)] * missing]

    @property
    def counts_its_samples(self) -> bool:
        return self.parallel_model.counts_its_loss

    def needed_fields(self) -> tuple[str, ...]:
        return self.parallel_model.fields

    def known_on_host(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        return self.parallel_model.known_on_host(micro_batch)

    def step_metrics(self) -> dict[str, float]:
        return self.parallel_model.step_metrics()

    def sampling_forward(self) -> SamplingForward | None:
        pipeline = self.parallel_model.pipeline
        if pipeline is None:
            return None
        config = cast(Any, self.objective.model).config
        return SamplingForward(partial(pipeline_forward, pipeline, self.objective), can_cache_stages(config))

    def free_gathered(self) -> None:
        self.parallel_model.free_gathered()

    # -- state --------------------------------------------------------------------------------------------------

    def shards_written(self) -> None:
        for optimizer in self.optimizers:
            restore_numbers(optimizer)

    def state_entries(self) -> dict[str, Any]:
        """Entries of this strategy in ``state.json``, equal on every rank."""
        scale = {"loss_scale": self._loss_scale.state()} if self._loss_scale is not None else {}
        return {**super().state_entries(), **scale}

    def restore_entries(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_entries` from a checkpoint's state, which may be of another precision."""
        super().restore_entries(state)
        if self._loss_scale is not None and "loss_scale" in state:
            self._loss_scale.restore(state["loss_scale"])

    def memory_parts(self) -> dict[str, int]:
        """Bytes this rank keeps on its device: of weights, gradients and optimizer state, and of activations.

        Activations are those that the run's first forward pass kept for its backward pass; in a pipeline, for the
        micro-batches that a stage holds at once. They are unknown where blocks are compiled. Gradients are those after
        the first step batch.
        """
        self.parallel_model.free_gathered()
        kind = self._device.type
        states = [v for optimizer in self.optimizers for state in optimizer.state.values() for v in state.values()]
        return {
            "weights": storage_bytes(self.objective.model.parameters(), kind),
            "gradients": self._memory.get("gradients", 0),
            "optimizer": storage_bytes((v for v in states if isinstance(v, torch.Tensor)), kind),
            **{name: size for name, size in self._memory.items() if name == "activations"},
        }


def pipeline_forward(
    pipeline: Pipeline, objective: Objective, *args: Any, logits_to_keep: int = 1, **inputs: Any
) -> Any:
    """Forward pass of ``generate()`` over the stages (:class:`SamplingForward`); with ``past_key_values`` of new tokens
    alone."""
    if not isinstance(objective, TextGenerator):
        raise NotImplementedError(f"{type(objective).__name__} does not generate text; define sampling_batch")
    batch, cache = objective.sampling_batch(*args, **inputs), inputs.get("past_key_values")
    vocabulary = int(cast(Any, objective).model.config.get_text_config().vocab_size)
    logits = pipeline.logits(batch, vocabulary, logits_to_keep, None if cache is None else inputs)
    return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
