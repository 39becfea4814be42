"""Direct preference optimisation: raises the chosen answer's probability over the rejected one's, against a reference.

Losses as in Rafailov et al. 2023 (arXiv:2305.18290), Mitchell 2023 (label smoothing) and Azar et al. 2023
(arXiv:2310.12036, with means over the answers' tokens).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field
from mgpu_pipe.models.adapters.lora import without_adapters
from mgpu_pipe.objectives.answers import NOTHING, ReferencedAnswers, plain_answer
from mgpu_pipe.objectives.base import Batch, Forward, Reference, step_generator
from mgpu_pipe.objectives.preference_keys import DPO, DPOConfig
from mgpu_pipe.objectives.preference_pairs import CHOSEN, REJECTED, PairObjective, documents_of_pairs, random_answers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel


class DPOObjective(ReferencedAnswers, PairObjective):
    """Preference of chosen over rejected answers under a Hugging Face causal language model."""

    description = DPO
    keys: DPOConfig
    number = "pair"
    num_sums = 8

    @property
    def batch_spec(self) -> BatchSpec:
        """That of pairs, and ``reference``, float64 (rows, 2), the reference's log-probabilities of the chosen and the
        rejected answer, for the last stage."""
        pairs = super().batch_spec
        reference = Field(sequence_dim=None, dtype="float64", shape=(2,), stages="last")
        return replace(pairs, fields={**pairs.fields, "reference": reference})

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.contribute_once(self._pair_losses(batch)[0].sum())

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        losses, rewards, said, said_before = self._pair_losses(batch)
        right = rewards[:, CHOSEN] > rewards[:, REJECTED]
        sums = [losses.sum(0, True), right.sum(0, True), rewards.sum(0), said.sum(0), said_before.sum(0)]
        return self.contribute_once(torch.cat(sums).double())

    def _pair_losses(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Loss of pairs, (rows,); rewards and both probabilities of their answers, (rows, 2); 0 where none counts."""
        if self.keys.reference == "live":
            with torch.no_grad(), without_adapters(self.model):
                reference, _ = self.answers(batch)
        else:
            reference = self.reference_of(batch)
        log_probabilities, tokens = self.answers(batch)
        self.reference_table.record(batch["pair"], log_probabilities)
        counts = batch["pair"] != NOTHING
        losses, rewards = preference_losses(log_probabilities, reference, tokens, self.keys)
        answer_values = (rewards, log_probabilities.detach().exp(), reference.exp())
        return losses.where(counts, 0.0), *[value.where(counts.unsqueeze(1), 0.0) for value in answer_values]

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Pairs as :func:`.random_answers` makes them, with random numbers of the reference."""
        generator = step_generator(seed, step)
        ids = self.random_ids(generator, samples, seq_len)
        reference = -torch.rand(samples, 2, generator=generator, dtype=torch.float64)
        batch = random_answers(generator, step, ids)
        counts, rejected = batch["labels"] != IGNORE_INDEX, batch["rejected"] == 1
        tokens = torch.stack([(counts & side).sum(1) for side in (~rejected, rejected)], dim=1)
        vocabulary = int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
        return {**batch, "reference": reference - tokens.double() * float(torch.tensor(vocabulary).log())}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One answer at a time, by the formulas of the papers."""
        losses = []
        for row, documents in documents_of_pairs(batch):
            gained = []
            for side, document in enumerate(documents):
                answer, tokens = plain_answer(forward, batch, row, document)
                before = batch["reference"][row, side].to(answer.dtype)
                if self.keys.reference == "live":
                    with torch.no_grad(), without_adapters(model):
                        before, _ = plain_answer(forward, batch, row, document)
                gain = answer - before
                gained.append(gain / tokens if self.keys.loss == "ipo" else gain)
            losses.append(self._plain_loss(gained[CHOSEN] - gained[REJECTED]))
        return Reference(torch.stack(losses).sum())

    def _plain_loss(self, margin: torch.Tensor) -> torch.Tensor:
        beta, flipped = self.keys.beta, self.keys.label_smoothing
        if self.keys.loss == "ipo":
            return (margin - 0.5 / beta) ** 2
        wins = torch.sigmoid(beta * margin)
        return -(1 - flipped) * wins.log() - flipped * (1 - wins).log()


def preference_losses(
    answers: torch.Tensor, reference: torch.Tensor, tokens: torch.Tensor, keys: DPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each pair, (rows,), and rewards of its answers, (rows, 2).

    Args:
        answers, reference: log-probabilities of the answers, float64 (rows, 2).
        tokens: token counts of the answers, (rows, 2).
    """
    gains = answers - reference
    if keys.loss == "ipo":
        gains = gains / tokens.clamp_min(1.0)
    margin = gains[:, CHOSEN] - gains[:, REJECTED]
    rewards = keys.beta * gains.detach()
    if keys.loss == "ipo":
        return (margin - 0.5 / keys.beta).square(), rewards
    losses = -F.logsigmoid(keys.beta * margin) * (1 - keys.label_smoothing)
    if keys.label_smoothing:
        losses = losses - F.logsigmoid(-keys.beta * margin) * keys.label_smoothing
    return losses, rewards
