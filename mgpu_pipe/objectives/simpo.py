"""Simple preference optimisation: raises the chosen answer's mean log-probability over the rejected one's by a margin.

It needs no reference model (Meng, Xia and Chen 2024, arXiv:2405.14734).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mgpu_pipe.objectives.answers import plain_answer
from mgpu_pipe.objectives.base import Batch, Forward, Reference
from mgpu_pipe.objectives.preference_pairs import CHOSEN, REJECTED, ReferenceFreePairs, documents_of_pairs
from mgpu_pipe.objectives.simpo_keys import DESCRIPTION, SimPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SimPOObjective(ReferenceFreePairs):
    """Margin of the answers' mean log-probabilities, under a Hugging Face causal language model."""

    description = DESCRIPTION
    keys: SimPOConfig

    def pair_values(self, means: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rewards = self.keys.beta * (means[:, CHOSEN] - means[:, REJECTED])
        return -F.logsigmoid(rewards - self.keys.margin), rewards

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One answer at a time."""
        losses = []
        for row, documents in documents_of_pairs(batch):
            answers = [plain_answer(forward, batch, row, document) for document in documents]
            chosen, rejected = (value.double() / tokens for value, tokens in answers)
            losses.append((1 + (self.keys.margin - self.keys.beta * (chosen - rejected)).exp()).log())
        return Reference(torch.stack(losses).sum())


OBJECTIVE = SimPOObjective
