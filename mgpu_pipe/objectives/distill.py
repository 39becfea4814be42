"""Distillation: a student learns a teacher's distribution over the next token, mixed with the labels.

The teacher is whole on each process that computes a loss, frozen, and sees the same packed rows. Of each model only the
hidden states before its head exist whole; see :mod:`mgpu_pipe.objectives.divergence`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from typing_extensions import Self

from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import materialise, run_model
from mgpu_pipe.models.pretrained import load_pretrained
from mgpu_pipe.models.rotary import fix_rotary_length
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Objective, Reference
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.objectives.distill_keys import DESCRIPTION, DRAWN, DistillConfig
from mgpu_pipe.objectives.divergence import Teaching, linear_distillation, token_divergences
from mgpu_pipe.objectives.loss_head import TokenLoss
from mgpu_pipe.objectives.packed_text import forward_kwargs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HALF = {"bf16": torch.bfloat16, "bf16_true": torch.bfloat16, "fp16": torch.float16}


class DistillObjective(Objective):
    """The divergence of a Hugging Face causal language model from another of the same vocabulary, and from the labels.

    Args:
        keys: ``objective.*``.
        teacher: whole, on any device; it is frozen.
    """

    description = DESCRIPTION
    num_sums = 3
    sampling_batch = CausalLMObjective.sampling_batch

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_factory: Any,
        learning_rate: LearningRate,
        keys: DistillConfig,
        teacher: PreTrainedModel,
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._keys = keys
        self._loss = TokenLoss(model, keys.loss_chunk_tokens)
        # In a tuple: as a module of this one it would be trained, saved and sharded with the student.
        self._teacher = (teacher.eval().requires_grad_(False), _Hidden(teacher))

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        keys = cast(DistillConfig, config.objective)
        return cls(model, optimizer_factory, learning_rate, keys, _teacher(config, keys))

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._taught(batch)[0]

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss, sums = self._taught(batch)
        return torch.cat([loss.double().reshape(1), sums])

    def _taught(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch, and the two sums that it is made of."""
        labels, (teacher, hidden) = batch["labels"], self._teacher
        teacher.to(labels.device)
        teaching = Teaching(self._keys, hidden.of(forward_kwargs(teacher, batch)), hidden.head.weight, hidden.head.bias)
        loss = self._loss.instead(
            self.model_inputs(batch),
            labels,
            partial(_of_head, teaching=teaching),
            partial(_of_logits, teaching=teaching),
        )
        assert teaching.sums is not None
        return loss, teaching.sums

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """By whole logits of both models, and the divergences' definitions."""
        teacher, keys, labels = self._teacher[0], self._keys, batch["labels"]
        counts = labels != IGNORE_INDEX
        logits = forward(**forward_kwargs(model, batch)).logits[counts].float()
        with torch.no_grad():
            taught = teacher(**forward_kwargs(teacher, batch)).logits[counts].float()
        student, target = ((values / keys.temperature).softmax(-1) for values in (logits, taught))
        if keys.divergence == "jensen_shannon":
            middle = (student + target) / 2
            divergence = (_kl(target, middle) + _kl(student, middle)) / 2
        else:
            divergence = _kl(target, student) if keys.divergence == "forward" else _kl(student, target)
        of_labels = F.cross_entropy(logits, labels[counts], reduction="sum")
        share = keys.teacher_weight
        return Reference((1 - share) * of_labels + share * keys.temperature**2 * divergence)


class _Hidden:
    """A model that gives the hidden states before its head."""

    def __init__(self, model: Any) -> None:
        self._model, self.head = model, model.get_output_embeddings()
        self._kept: torch.Tensor | None = None
        plain_forward = self.head.forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            if self._kept is None:
                return cast(torch.Tensor, plain_forward(hidden))
            self._kept = hidden
            return plain_forward(hidden[:, -1:])

        self.head.forward = forward

    @torch.no_grad()
    def of(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """(rows, seq_len, width), or under flash attention all rows laid end to end."""
        self._kept = torch.empty(0)
        try:
            self._model(**inputs)
            return self._kept
        finally:
            self._kept = None


def _teacher(config: RunConfig, keys: DistillConfig) -> PreTrainedModel:
    """Raises:
    ConfigError: the model changes its logits after its head.
    """
    if keys.teacher == DRAWN:
        teacher = materialise(run_model(replace(config, peft=type(config.peft)())), config.seed + 1, "cpu")
    else:
        source = ModelConfig(path=keys.teacher, config={}, attn_implementation=config.model.attn_implementation)
        teacher = load_pretrained(source, "cpu", model_class=DESCRIPTION.model_class)
    teacher.config.use_cache = False
    fix_rotary_length(teacher, config.data.seq_len)
    ids = torch.arange(2).unsqueeze(0)
    with torch.no_grad():
        logits, head = teacher.eval()(input_ids=ids).logits, cast(Any, teacher.get_output_embeddings())
        hidden = _Hidden(teacher).of({"input_ids": ids})
    if not torch.allclose(logits, F.linear(hidden, head.weight, head.bias), rtol=1e-4, atol=1e-5):
        reason = f"{type(teacher).__name__} changes its logits after the head"
        raise ConfigError("objective.teacher", keys.teacher, "use a teacher of another family", reason)
    cast(torch.nn.Module, teacher).to(HALF.get(resolve_precision(config), torch.float32))
    return teacher


def _of_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk_tokens: int | str,
    shard: None,
    teaching: Teaching,
) -> torch.Tensor:
    return linear_distillation(hidden, weight, bias, labels, chunk_tokens, teaching)


def _of_logits(logits: torch.Tensor, labels: torch.Tensor, teaching: Teaching) -> torch.Tensor:
    flat, wanted = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
    taught = F.linear(teaching.hidden, teaching.weight, teaching.bias).reshape(flat.shape).float()
    divergences = _Divergences.apply(flat, taught, teaching.keys)
    losses = F.cross_entropy(flat, wanted, ignore_index=IGNORE_INDEX, reduction="none")
    counts, share = wanted != IGNORE_INDEX, teaching.keys.teacher_weight
    sums = torch.stack([part.where(counts, 0.0).sum(dtype=torch.float64) for part in (losses, divergences)])
    teaching.sums = sums.detach()
    return (1 - share) * sums[0] + share * sums[1]


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: torch.Tensor, teacher: torch.Tensor, keys: DistillConfig) -> torch.Tensor:
        found, gradient = token_divergences(student, teacher, keys.divergence, keys.temperature)
        ctx.save_for_backward(gradient)
        return found

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_output.unsqueeze(1), None, None


def _kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one * (one.log() - other.log())).sum()


OBJECTIVE = DistillObjective
