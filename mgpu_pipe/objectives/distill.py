"""Distillation: a student learns a teacher's distribution over the next token, mixed with the labels.

The teacher sees the same packed rows. Of each model only the hidden states before its head exist whole; see
:mod:`mgpu_pipe.objectives.divergence`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Objective, Reference
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.objectives.distill_keys import DESCRIPTION, DistillConfig
from mgpu_pipe.objectives.divergence import Teaching, linear_distillation, token_divergences
from mgpu_pipe.objectives.loss_head import TokenLoss
from mgpu_pipe.objectives.packed_text import forward_kwargs
from mgpu_pipe.objectives.teacher import Teacher
from mgpu_pipe.parallel.vocabulary import VocabularyShard

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DistillObjective(Objective):
    """The divergence of a Hugging Face causal language model from another of the same vocabulary, and from the labels.

    Args:
        keys: ``objective.*``.
    """

    description = DESCRIPTION
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
        # No module of this one: it would be trained, saved and sharded with the student.
        self._teacher = teacher
        self.gathers = teacher.gathers

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        keys = cast(DistillConfig, config.objective)
        return cls(model, optimizer_factory, learning_rate, keys, Teacher(config, keys))

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._taught(batch)[0]

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss, sums = self._taught(batch)
        return torch.cat([loss.double().reshape(1), sums])

    def _taught(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch, and the two sums that it is made of."""
        with self._teacher.taught(batch) as teaching:
            loss = self._loss.instead(
                self.model_inputs(batch),
                batch["labels"],
                partial(_of_head, teaching=teaching),
                partial(_of_logits, teaching=teaching),
            )
        assert teaching.sums is not None
        return loss, teaching.sums

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """By whole logits of both models, and the divergences' definitions."""
        teacher, keys, labels = self._teacher.whole, self._keys, batch["labels"]
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


def _of_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk_tokens: int | str,
    shard: VocabularyShard | None,
    teaching: Teaching,
) -> torch.Tensor:
    return linear_distillation(hidden, weight, bias, labels, chunk_tokens, teaching, shard)


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
