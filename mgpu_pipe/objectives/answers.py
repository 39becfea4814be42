"""Objectives over the log-probabilities of whole answers, such as preferences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Objective
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.objectives.losses.loss_head import TokenLoss
from mgpu_pipe.objectives.losses.router_balance import SummedOverRanks
from mgpu_pipe.objectives.text_config import TokenLossConfig

NOTHING = -1
"""Number of a sample that counts nothing."""


class AnswerObjective(Objective):
    """Base of objectives over log-probabilities of whole answers under a Hugging Face causal language model.

    Args:
        keys: ``objective.*``; a subclass narrows the type of the attribute ``keys``.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: TokenLossConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self.keys = keys
        self._loss = TokenLoss(model, keys.loss_chunk_tokens)
        self._sequences: dist.ProcessGroup | None = None

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        return cls(model, optimizer_factory, learning_rate, cast(TokenLossConfig, config.objective))

    def share_sequences(self, groups: Sequence[dist.ProcessGroup], along: dist.ProcessGroup | None) -> None:
        for group in groups:
            self._sequences = group

    sampling_batch = CausalLMObjective.sampling_batch
    row_losses = CausalLMObjective.row_losses

    def token_values(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each token of the answers, and 1 for these tokens; float64 (rows, seq_len)."""
        labels = batch["labels"]
        return -self._loss.by_token(self.model_inputs(batch), labels).double(), (labels != IGNORE_INDEX).double()

    def sum_over_sequences(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that hold other tokens of the same sequences."""
        return sums if self._sequences is None else SummedOverRanks.apply(sums, self._sequences)

    def contribute_once(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` on one of the ranks that share sequences, zero on the others, with the same gradient."""
        first = self._sequences is None or self._sequences.rank() == 0
        return value if first else value - value.detach()

    def random_ids(self, generator: torch.Generator, samples: int, seq_len: int) -> torch.Tensor:
        """Random tokens of the model's vocabulary, int64 (samples, seq_len)."""
        vocabulary = int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
        return torch.randint(0, vocabulary, (samples, seq_len), generator=generator)


def plain_answer(forward: Forward, batch: Batch, row: int, document: slice) -> tuple[torch.Tensor, int]:
    """Log-probability of one answer, alone and from whole logits, and its number of tokens."""
    labels = batch["labels"][row, document]
    logits = forward(input_ids=batch["input_ids"][row, None, document]).logits[0].float()
    value = -F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return value, int((labels != IGNORE_INDEX).sum())
