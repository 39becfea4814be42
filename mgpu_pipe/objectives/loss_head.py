"""The loss over a vocabulary where the output head is: the logits of a step are never whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.cross_entropy import (
    correct_predictions,
    linear_cross_entropy,
    logits_cross_entropy,
    logits_token_losses,
)
from mgpu_pipe.objectives.token_losses import linear_token_losses
from mgpu_pipe.parallel.vocabulary import shard_of

log = logging.getLogger(__name__)


class LossHead:
    """Lets a model's output head return the sum of losses instead of logits.

    The head module's ``forward`` is wrapped, so that the loss is computed where the head's weight is at hand: FSDP
    gathers it around the module's call, tensor parallelism shards it there, a pipeline holds it on the last stage.
    """

    def __init__(self, head: torch.nn.Linear, chunk_tokens: int | str) -> None:
        self.labels: torch.Tensor | None = None
        self.result: torch.Tensor | None = None
        self.counts_correct = False
        self.compute: Callable[..., torch.Tensor] = linear_cross_entropy
        self.correct: torch.Tensor | None = None
        self._head, self._chunk_tokens = head, chunk_tokens
        plain_forward = head.forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            if self.labels is None:
                return plain_forward(hidden)
            given = hidden, head.weight, head.bias, self.labels, self._chunk_tokens, shard_of(head)
            if self.counts_correct:
                self.correct = correct_predictions(*given)
            self.result = self.compute(*given)
            return self.result

        head.forward = forward  # type: ignore[method-assign, assignment]

    @property
    def applies(self) -> bool:
        """Whether the loss is to be computed here: not from whole logits, which a cut vocabulary never has."""
        return self._chunk_tokens != 0 or shard_of(self._head) is not None


class TokenLoss:
    """Sums of token losses of a model of transformers with an output head.

    Args:
        chunk_tokens: tokens whose logits exist at once; 0 computes the logits whole.
    """

    def __init__(self, model: Any, chunk_tokens: int | str) -> None:
        self._model = model
        head = model.get_output_embeddings()
        self._head = LossHead(head, chunk_tokens) if isinstance(head, torch.nn.Linear) else None

    def sum(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """The sum of the cross-entropies of one forward pass, a float64 scalar."""
        return self._sums(inputs, labels)[0]

    def sums(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """The same, and how many of the likeliest tokens are the labels; float64, (2,)."""
        loss, right = self.predictions(inputs, labels)
        return torch.stack([loss.double(), right.sum().double()])

    def predictions(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and which of the likeliest tokens are the labels, of their shape."""
        if self._head is not None:
            self._head.counts_correct = True
        try:
            loss, right = self._sums(inputs, labels)
        finally:
            if self._head is not None:
                self._head.counts_correct = False
        assert right is not None
        return loss, right

    def by_token(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of every label, fp32, of the shape of ``labels``; 0 where it is ``IGNORE_INDEX``."""
        return self.instead(inputs, labels, linear_token_losses, logits_token_losses).view(labels.shape)

    def instead(
        self,
        inputs: Mapping[str, Any],
        labels: torch.Tensor,
        of_head: Callable[..., torch.Tensor],
        of_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Another loss than the cross-entropy, of at most one dim.

        Args:
            of_head: takes the arguments of :func:`linear_cross_entropy`.
            of_logits: the same from whole logits and labels.
        """
        if self._head is not None:
            self._head.compute = of_head
        try:
            return self._sums(inputs, labels, of_logits)[0]
        finally:
            if self._head is not None:
                self._head.compute = linear_cross_entropy

    def _sums(
        self,
        inputs: Mapping[str, Any],
        labels: torch.Tensor,
        of_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = logits_cross_entropy,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._head is None or not self._head.applies:
            logits = self._model(**inputs).logits
            wanted = labels.reshape(logits.shape[:-1])
            right = (logits.detach().argmax(-1) == wanted) & (wanted != IGNORE_INDEX)
            return of_logits(logits, labels), right.view(labels.shape)
        self._head.labels, returned = labels, None
        try:
            returned = self._model(**inputs).logits
        except IndexError:  # of a scalar, which the loss is and logits are not
            if self._head.result is None:
                raise
        finally:
            self._head.labels = None
        loss, self._head.result = self._head.result, None
        correct, self._head.correct = self._head.correct, None
        if loss is not None and returned is not None and _same_values(returned, loss):
            return cast(torch.Tensor, returned), correct
        # The model does something to its logits after the head (soft-capping, scaling, cutting), so it needs them.
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.warning(
                "%s changes its logits after the head: they are computed whole, whatever "
                "objective.loss_chunk_tokens says",
                type(self._model).__name__.removeprefix("FSDP"),
            )
        self._head = None
        return self._sums(inputs, labels, of_logits)


def _same_values(returned: torch.Tensor, loss: torch.Tensor) -> bool:
    """Whether ``returned`` is the loss itself, or an alias of it that an engine's hook on the head made."""
    return returned is loss or (returned.shape == loss.shape and returned.data_ptr() == loss.data_ptr())
