"""Causal language modelling: the next token's cross-entropy, summed over valid tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, StepBatch
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Objective, Reference
from mgpu_pipe.objectives.losses.loss_head import TokenLoss
from mgpu_pipe.objectives.losses.router_balance import RouterLoss
from mgpu_pipe.objectives.packed_text import forward_kwargs, packed_text
from mgpu_pipe.objectives.text_keys import CausalLMConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CausalLMObjective(Objective):
    """Cross-entropy of a Hugging Face causal language model.

    Args:
        chunk_tokens: ``objective.loss_chunk_tokens``; 0 computes the logits whole.
        router_aux_loss: ``objective.router_aux_loss``; 0 leaves the routers alone.

    Attributes:
        router_loss: the routers' balance loss, or None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_factory: Any,
        learning_rate: LearningRate,
        chunk_tokens: int | str,
        router_aux_loss: float = 0.0,
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self.router_loss = RouterLoss(model, router_aux_loss) if router_aux_loss else None
        self._loss = TokenLoss(model, chunk_tokens)

    @classmethod
    def arguments(cls, keys: CausalLMConfig) -> tuple[Any, ...]:
        return keys.loss_chunk_tokens, keys.router_aux_loss

    @property
    def batch_spec(self) -> BatchSpec:
        """Packed text. With a router loss every pipeline stage gets the labels."""
        return packed_text("last" if self.router_loss is None else "all")

    def share_sequences(self, groups: Sequence[dist.ProcessGroup], along: dist.ProcessGroup | None) -> None:
        if self.router_loss is not None:
            self.router_loss.reduce_over(groups, along)

    def stage_output(
        self, batch: Mapping[str, torch.Tensor], scale: float, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        if self.router_loss is None or not torch.is_grad_enabled():
            return compute()
        with self.router_loss.collecting():
            return self.router_loss.attach_to(compute(), batch["labels"], scale)

    def sampling_batch(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return {"input_ids": input_ids, "position_ids": position_ids}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        labels, kwargs = batch["labels"], forward_kwargs(model, batch)
        if self.router_loss is None:
            return Reference(_cross_entropy(forward(**kwargs).logits, labels))
        output = forward(**kwargs, output_router_logits=True)
        top_k = int(getattr(model.config, "num_experts_per_tok", 0) or 0)
        balance = balance_losses(output.router_logits, labels, top_k)
        return Reference(_cross_entropy(output.logits, labels), self.router_loss.coefficient * balance)

    def start_step(self, step_batch: StepBatch) -> None:
        if self.router_loss is not None:
            self.router_loss.start_step(step_batch.loss_denominator, step_batch.num_samples)

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self.router_loss is None or not torch.is_grad_enabled():
            return self._token_loss(batch)
        with self.router_loss.collecting():
            return self.router_loss.add_to(self._token_loss(batch), batch["labels"])

    def row_losses(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss.by_token(self.model_inputs(batch), batch["labels"]).double().sum(1)

    def _token_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss.sum(self.model_inputs(batch), batch["labels"])


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def balance_losses(routed: Sequence[torch.Tensor], labels: torch.Tensor, top_k: int) -> torch.Tensor:
    """Sum over rows of the routers' mean balance loss, by its definition (objectives.losses.router_balance).

    Args:
        routed: logits of all tokens, one tensor per router.
    """
    total = torch.zeros(())
    for router in routed:
        experts = router.shape[-1]
        for row, label in zip(router.view(*labels.shape, experts), labels, strict=True):
            valid_logits = row[label != IGNORE_INDEX].float()
            if len(valid_logits):
                probabilities = valid_logits.softmax(-1)
                chosen = F.one_hot(probabilities.topk(top_k).indices, experts).sum(1).float()
                total = total + experts * (chosen.mean(0) * probabilities.mean(0)).sum() / len(routed)
    return total
