"""Contrastive preference optimisation: raises the chosen answer over the rejected one, and learns the chosen answer.

It needs no reference model (Xu et al. 2024, arXiv:2401.08417).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mgpu_pipe.objectives.answers import plain_answer
from mgpu_pipe.objectives.base import Batch, Forward, Reference
from mgpu_pipe.objectives.cpo_keys import DESCRIPTION, CPOConfig
from mgpu_pipe.objectives.preference_pairs import CHOSEN, REJECTED, ReferenceFreePairs, documents_of_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CPOObjective(ReferenceFreePairs):
    """Preference by whole answers' log-probabilities, and cross-entropy of chosen answers, under a Hugging Face causal
    language model."""

    description = DESCRIPTION
    keys: CPOConfig

    def pair_values(self, means: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rewards = self.keys.beta * means * tokens
        margins, smoothing = rewards[:, CHOSEN] - rewards[:, REJECTED], self.keys.label_smoothing
        losses = -F.logsigmoid(margins) * (1 - smoothing) - F.logsigmoid(-margins) * smoothing
        return losses - self.keys.chosen_weight * means[:, CHOSEN], margins

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One answer at a time."""
        losses, smoothing = [], self.keys.label_smoothing
        for row, documents in documents_of_pairs(batch):
            (chosen, tokens), (rejected, _) = (plain_answer(forward, batch, row, document) for document in documents)
            wins = torch.sigmoid(self.keys.beta * (chosen.double() - rejected.double()))
            preference = -(1 - smoothing) * wins.log() - smoothing * (1 - wins).log()
            losses.append(preference - self.keys.chosen_weight * chosen.double() / tokens)
        return Reference(torch.stack(losses).sum())


OBJECTIVE = CPOObjective
