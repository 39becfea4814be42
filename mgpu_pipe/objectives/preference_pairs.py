"""Preferences: objectives over pairs of answers, one chosen and one rejected.

A sample is a pair, one packed row of two documents: the conversation with the chosen answer, then that with the
rejected one. So one forward pass reads both, no rank or micro-batch splits a pair, and pairs support all that packed
rows do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field
from mgpu_pipe.objectives.answers import NOTHING, AnswerObjective, plain_answer
from mgpu_pipe.objectives.base import Batch, Forward, Reference, step_generator
from mgpu_pipe.objectives.packed_text import packed_text, skips_last
from mgpu_pipe.objectives.preference_keys import CPO, ORPO, SIMPO, CPOConfig, ORPOConfig, SimPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CHOSEN, REJECTED = 0, 1
"""Columns of tensors with a value per answer."""


class PairObjective(AnswerObjective):
    """Base of objectives over pairs of answers under a Hugging Face causal language model."""

    @property
    def batch_spec(self) -> BatchSpec:
        """Packed rows of one pair each, and for the last stage: ``rejected``, 1 for tokens of the second document;
        ``pair``, int64 (rows,), the pair's number in its set."""
        packed = packed_text()
        fields = {
            **packed.fields,
            "labels": replace(packed.fields["labels"], target=False),
            "rejected": Field(stages="last"),
            "pair": Field(sequence_dim=None, padding=NOTHING, target=True, stages="last"),
        }
        return replace(packed, fields=fields)

    def answers(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and token counts of each pair's answers; float64 (rows, 2)."""
        token_values, counts = self.token_values(batch)
        rejected = batch["rejected"] == 1
        sums = torch.stack(
            [(value * side).sum(1) for value in (token_values, counts) for side in (~rejected, rejected)], dim=1
        )
        sums = self.sum_over_sequences(sums)
        return sums[:, :2], sums[:, 2:]

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Pairs of uneven answers after a common prompt. In every third step the last one counts nothing."""
        generator = step_generator(seed, step)
        return random_answers(generator, step, self.random_ids(generator, samples, seq_len))


class ReferenceFreePairs(PairObjective):
    """Base of objectives over pairs of answers that need no reference model: losses of mean log-probabilities."""

    num_sums = 4

    @abstractmethod
    def pair_values(self, means: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and figure of each pair; the figure is positive where the model prefers the chosen answer.

        Args:
            means: mean log-probability of the tokens of each pair's answers; float64 (rows, 2).
            tokens: token counts of the answers; float64 (rows, 2).
        """

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.contribute_once(self._valid_values(batch)[0].sum())

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.contribute_once(torch.stack([values.double().sum() for values in self._valid_values(batch)]))

    def _valid_values(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Loss, preference, loss of the chosen answer and figure of each pair, (rows,); 0 where none counts."""
        log_probabilities, tokens = self.answers(batch)
        counts = batch["pair"] != NOTHING
        # An answer without tokens has infinite odds, whose gradient would be NaN times zero.
        means = (log_probabilities / tokens.clamp_min(1.0)).where(counts.unsqueeze(1), -1.0)
        losses, figures = self.pair_values(means, tokens)
        values = losses, figures > 0, -means[:, CHOSEN], figures
        return tuple(value.where(counts, 0) for value in values)


def random_answers(generator: torch.Generator, step: int, ids: torch.Tensor) -> Batch:
    """Pairs of uneven answers within ``ids``, (samples, seq_len), whose prompts are made equal."""
    samples, seq_len = ids.shape
    labels = torch.full_like(ids, IGNORE_INDEX)
    positions, rejected = torch.zeros_like(ids), torch.zeros_like(ids)
    for row in range(samples):
        lengths = torch.randint(3, seq_len // 2 + 1, (2,), generator=generator).tolist()
        prompt = int(torch.randint(1, min(lengths) - 1, (), generator=generator))
        ids[row, lengths[0] : lengths[0] + prompt] = ids[row, :prompt]
        start = 0
        for side, length in enumerate([*lengths, seq_len - sum(lengths)]):
            stop = start + length
            positions[row, start:stop] = torch.arange(length)
            if side <= REJECTED:
                labels[row, start + prompt - 1 : stop - 1] = ids[row, start + prompt : stop]
                rejected[row, start:stop] = side
            start = stop
    pair = torch.arange(samples)
    if skips_last(step, samples):
        pair[-1] = NOTHING
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "rejected": rejected, "pair": pair}


def documents_of_pairs(batch: Batch) -> Iterator[tuple[int, list[slice]]]:
    """Rows of the pairs that count, each with the places of its two documents."""
    for row in range(len(batch["pair"])):
        if int(batch["pair"][row]) != NOTHING:
            first, second = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()[:2]
            yield row, [slice(first, second), slice(second, second + int(batch["rejected"][row].sum()))]


class CPOObjective(ReferenceFreePairs):
    """Preference by whole answers' log-probabilities, and cross-entropy of chosen answers, under a Hugging Face causal
    language model."""

    description = CPO
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


LEAST = 1e-12
"""Least distance of a mean log-probability from 0, where the odds are infinite."""


class ORPOObjective(ReferenceFreePairs):
    """Cross-entropy of chosen answers, and the odds ratio of both, under a Hugging Face causal language model."""

    description = ORPO
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


class SimPOObjective(ReferenceFreePairs):
    """Margin of the answers' mean log-probabilities, under a Hugging Face causal language model."""

    description = SIMPO
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
