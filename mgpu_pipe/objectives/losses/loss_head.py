"""Loss computed inside a model's output head, so that the logits of a step never exist whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.losses.chunked_head import ChunkedHead
from mgpu_pipe.objectives.losses.cross_entropy import (
    correct_predictions,
    linear_cross_entropy,
    linear_token_losses,
    logits_cross_entropy,
    logits_token_losses,
)
from mgpu_pipe.parallel.tensor.heads import shard_of

log = logging.getLogger(__name__)


class LossHead:
    """Lets a model's output head return the sum of losses instead of logits.

    It wraps the head module's ``forward`` to compute the loss where the head's weight is available: FSDP gathers it
    around the module's call, tensor parallelism shards it there, a pipeline has it on the last stage.
    """

    def __init__(self, head: torch.nn.Linear, chunk_tokens: int | str) -> None:
        self.labels: torch.Tensor | None = None
        self.result: torch.Tensor | None = None
        self.counts_correct = False
        self.compute: Callable[[ChunkedHead], torch.Tensor] = linear_cross_entropy
        self.correct: torch.Tensor | None = None
        self._head, self._chunk_tokens = head, chunk_tokens
        plain_forward = head.forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            if self.labels is None:
                return plain_forward(hidden)
            chunked = ChunkedHead(hidden, head.weight, head.bias, self.labels, self._chunk_tokens, shard_of(head))
            if self.counts_correct:
                self.correct = correct_predictions(chunked)
            self.result = self.compute(chunked)
            return self.result

        head.forward = forward  # type: ignore[method-assign, assignment]

    @property
    def applies(self) -> bool:
        """Whether the head computes the loss, instead of whole logits; always with a sharded vocabulary."""
        return self._chunk_tokens != 0 or shard_of(self._head) is not None


class TokenLoss:
    """Sums of token losses of a transformers model with an output head.

    Args:
        chunk_tokens: tokens whose logits exist at once; 0 computes the logits whole.
    """

    def __init__(self, model: Any, chunk_tokens: int | str) -> None:
        self._model = model
        head = model.get_output_embeddings()
        self._head = LossHead(head, chunk_tokens) if isinstance(head, torch.nn.Linear) else None

    def sum(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """Sum of the cross-entropies of one forward pass, a float64 scalar."""
        return self._run_model(inputs, labels)[0]

    def sums(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """Sum of the cross-entropies, and number of right predictions; float64, (2,)."""
        loss, right = self.predictions(inputs, labels)
        return torch.stack([loss.double(), right.sum().double()])

    def predictions(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the cross-entropies, and mask of right predictions in the labels' shape."""
        if self._head is not None:
            self._head.counts_correct = True
        try:
            loss, right = self._run_model(inputs, labels)
        finally:
            if self._head is not None:
                self._head.counts_correct = False
        assert right is not None
        return loss, right

    def by_token(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of each label, fp32, in the shape of ``labels``; 0 where it is ``IGNORE_INDEX``."""
        return self.custom_loss(inputs, labels, linear_token_losses, logits_token_losses).view(labels.shape)

    def custom_loss(
        self,
        inputs: Mapping[str, Any],
        labels: torch.Tensor,
        head_loss: Callable[[ChunkedHead], torch.Tensor],
        logits_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Another loss instead of the cross-entropy, of at most one dim.

        Args:
            head_loss: the loss from the head, its hidden states and the labels.
            logits_loss: the same loss from whole logits and labels.
        """
        if self._head is not None:
            self._head.compute = head_loss
        try:
            return self._run_model(inputs, labels, logits_loss)[0]
        finally:
            if self._head is not None:
                self._head.compute = linear_cross_entropy

    def _run_model(
        self,
        inputs: Mapping[str, Any],
        labels: torch.Tensor,
        logits_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = logits_cross_entropy,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Loss of a forward pass, and the mask of right predictions; None if the head was not asked for them."""
        if self._head is None or not self._head.applies:
            logits = self._model(**inputs).logits
            wanted = labels.reshape(logits.shape[:-1])
            right = (logits.detach().argmax(-1) == wanted) & (wanted != IGNORE_INDEX)
            return logits_loss(logits, labels), right.view(labels.shape)
        self._head.labels, returned = labels, None
        try:
            returned = self._model(**inputs).logits
        except IndexError:  # the model indexes its logits, but the loss is a scalar
            if self._head.result is None:
                raise
        finally:
            self._head.labels = None
        loss, self._head.result = self._head.result, None
        correct, self._head.correct = self._head.correct, None
        if loss is not None and returned is not None and _same_values(returned, loss):
            return cast(torch.Tensor, returned), correct
        # The model changes its logits after the head (soft-capping, scaling, cutting), so it needs them.
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.warning(
                "%s changes its logits after the head: they are computed whole, without objective.loss_chunk_tokens",
                type(self._model).__name__.removeprefix("FSDP"),
            )
        self._head = None
        return self._run_model(inputs, labels, logits_loss)


def _same_values(returned: torch.Tensor, loss: torch.Tensor) -> bool:
    """Whether ``returned`` is the loss or its alias, made by an engine's hook on the head."""
    return returned is loss or (returned.shape == loss.shape and returned.data_ptr() == loss.data_ptr())
