"""Distillation: a student learns a teacher's distribution over the next token, mixed with the labels.

The teacher reads the same packed rows. Logits of either model never exist whole, only the hidden states; see
:mod:`mgpu_pipe.objectives.losses.divergence`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import PreTrainedModel
from typing_extensions import Self

from mgpu_pipe.architectures.formulas.pipeline_schedules import stages_by_rank
from mgpu_pipe.checkpoint.live_tensors import model_shards
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.selection import resolve_source
from mgpu_pipe.config.group_keys import PipelineOptions
from mgpu_pipe.config.resolve import device_type, resolve_precision
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.lora import is_adapter
from mgpu_pipe.models.build import build_meta, materialise, materialise_empty, run_model
from mgpu_pipe.models.kernels.packed_attention import use_packed_attention
from mgpu_pipe.models.local_shards import cast_parameters
from mgpu_pipe.models.model_settings import recorded_model
from mgpu_pipe.models.rotary import fix_rotary_length
from mgpu_pipe.models.weights.pretrained import restore_buffers
from mgpu_pipe.models.weights.slices import FolderWeights
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Objective, Reference
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.objectives.distill_keys import DISTILL, DRAWN, KEY, DistillConfig, is_run
from mgpu_pipe.objectives.losses.divergence import Teaching, linear_distillation, token_divergences
from mgpu_pipe.objectives.losses.loss_head import TokenLoss
from mgpu_pipe.objectives.packed_text import forward_kwargs
from mgpu_pipe.parallel.fsdp import apply_fully_shard, reshard_all
from mgpu_pipe.parallel.rank_exchange import exchange_json
from mgpu_pipe.system.local_files import expand_home, is_file
from mgpu_pipe.topology import Meshes, ParallelDims

TEACHER_DTYPES = {"bf16": torch.bfloat16, "bf16_true": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
"""Data type of the teacher's weights by the student's precision; fp32 for others."""

Fill = Callable[[PreTrainedModel, torch.device], object]


class Teacher:
    """Model of ``objective.teacher``. Its construction is a collective call of all processes.

    Attributes:
        gathers: whether its forward pass gathers weights from other processes.
    """

    def __init__(self, config: RunConfig, keys: DistillConfig) -> None:
        """Raises:
        ConfigError: the model changes its logits after its head, or its weights are not all in one place.
        """
        self._config, self._keys = config, keys
        self._source = _source(keys)
        self._hidden: _HiddenStates | None = None
        device, mesh, computes = torch.device("cpu"), None, True
        if dist.is_initialized():
            dims = ParallelDims.resolve(config.strategy, dist.get_world_size())
            if device_type(config.trainer) == "cuda":
                device = torch.device("cuda", torch.cuda.current_device())
            mesh = Meshes(dims, device.type).mesh("stage") if keys.teacher_strategy == "fsdp" else None
            computes = dims.pp == 1 or _has_last_stage(config.strategy.pipeline, dims)
        self.gathers = mesh is not None and mesh.size() > 1
        if not computes:
            return
        model, fill = self._meta_model()
        if self.gathers:
            assert mesh is not None
            apply_fully_shard(model, mesh, "fp32")  # it computes in the type of its weights
        fill(model, device)
        if device.type == "cuda" and config.model.attn_implementation == "auto":
            use_packed_attention(model)
        self._hidden = _HiddenStates(model.eval())
        self._require_plain_logits(device)

    @contextmanager
    def teach(self, batch: Mapping[str, torch.Tensor]) -> Iterator[Teaching]:
        """The teacher's side of a micro-batch. Collective if :attr:`gathers`; the exit frees the gathered weights."""
        hidden = self._hidden
        assert hidden is not None, "this process computes no loss"
        model = hidden.model
        if not self.gathers:
            cast(torch.nn.Module, model).to(batch["labels"].device)
        states = hidden.before_head(forward_kwargs(model, batch))
        try:
            yield Teaching(self._keys, states, hidden.head.weight, hidden.head.bias)
        finally:
            self._free_gathered()

    @cached_property
    def whole_model(self) -> PreTrainedModel:
        """Unsharded copy on this process."""
        model, fill = self._meta_model()
        fill(model, torch.device("cpu"))
        return model.eval()

    def _free_gathered(self) -> None:
        if self.gathers and self._hidden is not None:
            reshard_all(self._hidden.model)

    def _meta_model(self) -> tuple[PreTrainedModel, Fill]:
        """The frozen model on the meta device, and a function that fills it, sharded or not."""
        config, source = self._config, self._source
        fill: Fill
        if source is None:
            model = run_model(replace(config, peft=type(config.peft)()))
            fill = partial(_draw, seed=config.seed + 1)
        elif is_file(source / "config.json"):
            folder = ModelConfig(path=str(source), attn_implementation=config.model.attn_implementation)
            model = build_meta(folder, DISTILL.model_class)
            fill = FolderWeights(folder)
        else:
            model, fill = _model_of_run(source, config.model)
        model.config.use_cache = False
        fix_rotary_length(model, config.data.seq_len)
        cast_parameters(model, TEACHER_DTYPES.get(resolve_precision(config.precision, config.trainer), torch.float32))
        model.requires_grad_(False)
        return model, fill

    def _require_plain_logits(self, device: torch.device) -> None:
        assert self._hidden is not None
        model, head = self._hidden.model, self._hidden.head
        ids = torch.arange(2, device=device).unsqueeze(0)
        with torch.no_grad():
            logits = model(input_ids=ids).logits
            expected = F.linear(self._hidden.before_head({"input_ids": ids}), head.weight, head.bias)
        self._free_gathered()
        if not torch.allclose(logits.float(), expected.float(), rtol=1e-4, atol=1e-5):
            name = type(model).__name__.removeprefix("FSDP")
            reason = f"{name} changes its logits after the head"
            raise ConfigError(KEY, self._keys.teacher, "use a teacher of another family", reason)


class _HiddenStates:
    """Model that returns the hidden states before its head."""

    def __init__(self, model: Any) -> None:
        self.model, self.head = model, model.get_output_embeddings()
        self._states: torch.Tensor | None = None
        plain_forward = self.head.forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            if self._states is None:
                return cast(torch.Tensor, plain_forward(hidden))
            self._states = hidden
            return cast(torch.Tensor, plain_forward(hidden[:, -1:]))

        self.head.forward = forward

    @torch.no_grad()
    def before_head(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Hidden states, (rows, seq_len, width); flash attention concatenates all rows."""
        self._states = torch.empty(0)
        try:
            self.model(**inputs)
            return self._states
        finally:
            self._states = None


def _source(keys: DistillConfig) -> Path | None:
    """Model folder or checkpoint of a run, equal on all processes; None for random weights. Collective."""
    if keys.teacher == DRAWN:
        return None
    folder = expand_home(keys.teacher)
    if not is_run(folder):
        return folder
    step = resolve_source(folder, verify="size", key=KEY)
    return Path(exchange_json(str(step), None)[0]) if dist.is_initialized() else step


def _has_last_stage(pipeline: PipelineOptions, dims: ParallelDims) -> bool:
    stages = stages_by_rank(pipeline.schedule, dims.pp, pipeline.stages_per_rank)
    return max(map(max, stages)) in stages[dims.coordinates(dist.get_rank())["pp"]]


def _draw(model: PreTrainedModel, device: torch.device, seed: int) -> None:
    materialise(model, seed, device)


def _model_of_run(step: Path, student: ModelConfig) -> tuple[PreTrainedModel, Fill]:
    reader = CheckpointReader(step)
    if reader.left_out is not None or any(is_adapter(name) for name in reader.names("model")):
        fix = f"give what mgpu-pipe export {step} --merge writes"
        raise ConfigError(KEY, step, fix, "the run trained adapters")
    recorded = recorded_model(reader.state.get("model_config"), step)
    recorded = replace(recorded, attn_implementation=student.attn_implementation)
    model = build_meta(recorded, DISTILL.model_class)
    reader.require({name: tuple(weights.shape) for name, weights in model.named_parameters()}, "model")

    def fill(model: PreTrainedModel, device: torch.device) -> None:
        materialise_empty(model, device)
        restore_buffers(model, reader.state, step)
        reader.read(model_shards(model), "model")

    return model, fill


class DistillObjective(Objective):
    """Divergence of a Hugging Face causal language model from a teacher of the same vocabulary, and from the labels.

    Args:
        keys: ``objective.*``.
    """

    description = DISTILL
    num_sums = 3
    sampling_batch = CausalLMObjective.sampling_batch
    row_losses = CausalLMObjective.row_losses

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_factory: Any,
        learning_rate: LearningRate,
        keys: DistillConfig,
        teacher: Teacher,
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._keys = keys
        self._loss = TokenLoss(model, keys.loss_chunk_tokens)
        # Not a submodule: it would be trained, saved and sharded with the student.
        self._teacher = teacher
        self.gathers = teacher.gathers

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        keys = cast(DistillConfig, config.objective)
        return cls(model, optimizer_factory, learning_rate, keys, Teacher(config, keys))

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._distill(batch)[0]

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss, sums = self._distill(batch)
        return torch.cat([loss.double().reshape(1), sums])

    def _distill(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of a micro-batch, and its two sums: cross-entropies and divergences."""
        with self._teacher.teach(batch) as teaching:
            loss = self._loss.custom_loss(
                self.model_inputs(batch),
                batch["labels"],
                partial(linear_distillation, teaching=teaching),
                partial(_logits_loss, teaching=teaching),
            )
        assert teaching.sums is not None
        return loss, teaching.sums

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """From whole logits of both models, by the divergences' definitions."""
        teacher, keys, labels = self._teacher.whole_model, self._keys, batch["labels"]
        counts = labels != IGNORE_INDEX
        logits = forward(**forward_kwargs(model, batch)).logits[counts].float()
        with torch.no_grad():
            teacher_logits = teacher(**forward_kwargs(teacher, batch)).logits[counts].float()
        student, target = ((values / keys.temperature).softmax(-1) for values in (logits, teacher_logits))
        if keys.divergence == "jensen_shannon":
            middle = (student + target) / 2
            divergence = (_kl(target, middle) + _kl(student, middle)) / 2
        else:
            divergence = _kl(target, student) if keys.divergence == "forward" else _kl(student, target)
        label_loss = F.cross_entropy(logits, labels[counts], reduction="sum")
        share = keys.teacher_weight
        return Reference((1 - share) * label_loss + share * keys.temperature**2 * divergence)


def _logits_loss(logits: torch.Tensor, labels: torch.Tensor, teaching: Teaching) -> torch.Tensor:
    flat, wanted = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
    teacher_logits = F.linear(teaching.hidden, teaching.weight, teaching.bias).reshape(flat.shape).float()
    divergences = _Divergences.apply(flat, teacher_logits, teaching.keys)
    losses = F.cross_entropy(flat, wanted, ignore_index=IGNORE_INDEX, reduction="none")
    counts, share = wanted != IGNORE_INDEX, teaching.keys.teacher_weight
    sums = torch.stack([part.where(counts, 0.0).sum(dtype=torch.float64) for part in (losses, divergences)])
    teaching.sums = sums.detach()
    return (1 - share) * sums[0] + share * sums[1]


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: torch.Tensor, teacher: torch.Tensor, keys: DistillConfig) -> torch.Tensor:
        divergences, gradient = token_divergences(student, teacher, keys.divergence, keys.temperature)
        ctx.save_for_backward(gradient)
        return divergences

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_output.unsqueeze(1), None, None


def _kl(target: torch.Tensor, approximation: torch.Tensor) -> torch.Tensor:
    return (target * (target.log() - approximation.log())).sum()
