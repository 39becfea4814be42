"""Simple preference optimisation: raises the chosen answer's mean log-probability over the rejected one's by a margin.

It needs no reference model (Meng, Xia and Chen 2024, arXiv:2405.14734).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Reference
from mgpu_pipe.objectives.preference_pairs import CHOSEN, REJECTED, ReferenceFreePairs, documents_of_pairs, plain_answer
from mgpu_pipe.objectives.simpo_keys import DESCRIPTION, SimPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SimPOObjective(ReferenceFreePairs):
    """Margin of the answers' mean log-probabilities, under a Hugging Face causal language model.

    Args:
        keys: ``objective.*``.
    """

    description = DESCRIPTION

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: SimPOConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate, keys.loss_chunk_tokens)
        self._beta, self._margin = keys.beta, keys.margin

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        return cls(model, optimizer_factory, learning_rate, cast(SimPOConfig, config.objective))

    def pair_values(self, means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rewards = self._beta * (means[:, CHOSEN] - means[:, REJECTED])
        return -F.logsigmoid(rewards - self._margin), rewards

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One answer at a time."""
        losses = []
        for row, documents in documents_of_pairs(batch):
            answers = [plain_answer(forward, batch, row, document) for document in documents]
            chosen, rejected = (value.double() / tokens for value, tokens in answers)
            losses.append((1 + (self._margin - self._beta * (chosen - rejected)).exp()).log())
        return Reference(torch.stack(losses).sum())


OBJECTIVE = SimPOObjective
