"""Odds ratio preference optimisation: learns the chosen answer, and raises its odds over the rejected one's.

It needs no reference model and no training on answers before (Hong, Lee and Thorne 2024, arXiv:2403.07691).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mgpu_pipe.objectives.answers import plain_answer
from mgpu_pipe.objectives.base import Batch, Forward, Reference
from mgpu_pipe.objectives.orpo_keys import DESCRIPTION, ORPOConfig
from mgpu_pipe.objectives.preference_pairs import CHOSEN, REJECTED, ReferenceFreePairs, documents_of_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST = 1e-12
"""Least distance of a mean log-probability from 0, where the odds are infinite."""


class ORPOObjective(ReferenceFreePairs):
    """Cross-entropy of chosen answers, and the odds ratio of both, under a Hugging Face causal language model."""

    description = DESCRIPTION
    keys: ORPOConfig

    def pair_values(self, means: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_odds = means - torch.log(-torch.expm1(means.clamp_max(-LEAST)))
        ratio = log_odds[:, CHOSEN] - log_odds[:, REJECTED]
        return self.keys.odds_weight * -F.logsigmoid(ratio) - means[:, CHOSEN], ratio

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One answer at a time, from the odds of its mean token."""
        losses = []
        for row, documents in documents_of_pairs(batch):
            answers = [plain_answer(forward, batch, row, document) for document in documents]
            chosen, rejected = ((value.double() / tokens).exp() for value, tokens in answers)
            odds_ratio = chosen / (1 - chosen) / (rejected / (1 - rejected))
            losses.append(-chosen.log() - self.keys.odds_weight * (odds_ratio / (1 + odds_ratio)).log())
        return Reference(torch.stack(losses).sum())


OBJECTIVE = ORPOObjective
