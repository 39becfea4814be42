"""Reward models: a number for a conversation, larger for the chosen answer of a pair than for the rejected one.

The loss is that of Bradley and Terry 1952, as in Ouyang et al. 2022 (arXiv:2203.02155), with margins as in
Touvron et al. 2023 (arXiv:2307.09288). The model's head has one
output, which is read at the last token that is not ``pad_token_id``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.samples import ChangedSamples, SampleSet
from mgpu_pipe.data.step_batch import BatchSpec, Field
from mgpu_pipe.data.text.preferences import PreferenceSamples
from mgpu_pipe.objectives.answers import NOTHING
from mgpu_pipe.objectives.base import Batch, Forward, Reference, step_generator
from mgpu_pipe.objectives.packed_text import skips_last
from mgpu_pipe.objectives.preference_keys import REWARD, RewardConfig
from mgpu_pipe.objectives.preference_pairs import CHOSEN, REJECTED
from mgpu_pipe.objectives.sequence_classification import OneOutputObjective

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORTEST = 2
"""Fewest tokens of a random conversation."""


@dataclass(frozen=True)
class SeparateConversations(ChangedSamples):
    """Preference pairs: each conversation is a row, padded to the longest of the batch."""

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        pairs = cast(PreferenceSamples, self.read)
        packed, chosen = pairs.batch(indices, numbers)["input_ids"].numpy(), pairs.chosen[indices]
        lengths = np.stack([chosen, pairs.length[indices] - chosen], 1)
        starts = np.stack([np.zeros_like(chosen), chosen], 1)[..., None]
        place = np.arange(lengths.max())
        positions = np.minimum(starts + place, packed.shape[1] - 1)
        ids = np.take_along_axis(packed[:, None].repeat(2, 1), positions, 2)
        arrays = {
            "input_ids": np.where(place < lengths[..., None], ids, pairs.padding_token_id),
            "lengths": lengths,
            "margin": np.zeros(len(indices)) if pairs.margins is None else pairs.margins[indices],
            "pair": indices.copy(),
        }
        return {name: torch.from_numpy(value) for name, value in arrays.items()}


class RewardObjective(OneOutputObjective):
    """Preference of chosen over rejected answers by the one output of a model ``...ForSequenceClassification``."""

    description = REWARD
    keys: RewardConfig
    num_sums = 4

    @classmethod
    def samples(cls, config: RunConfig, samples: SampleSet) -> SampleSet:
        return SeparateConversations(samples)

    @property
    def batch_spec(self) -> BatchSpec:
        """``input_ids``, (rows, 2, seq_len): the conversations with the chosen and the rejected answer. ``lengths``,
        their tokens, (rows, 2). ``pair``, the pair's number in its set, (rows,). All int64. ``margin``, by how much the
        chosen answer is better, float64 (rows,)."""
        return BatchSpec(
            {
                "input_ids": Field(sequence_dim=2, shape=(2,)),
                "lengths": Field(sequence_dim=None, shape=(2,), padding=1),
                "margin": Field(sequence_dim=None, dtype="float64"),
                "pair": Field(sequence_dim=None, padding=NOTHING, target=True),
            }
        )

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        ids, lengths = batch["input_ids"].flatten(0, 1), batch["lengths"].flatten()
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
        return {"input_ids": ids, "attention_mask": mask.long()}

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._losses(batch)[0].sum()

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        losses, rewards = self._losses(batch)
        right = rewards[:, CHOSEN] > rewards[:, REJECTED]
        return torch.stack([losses.sum(), right.double().sum(), *rewards.sum(0)])

    def _losses(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of each pair, (rows,), and rewards of its conversations, (rows, 2), float64; 0 where none counts."""
        rewards = self.model(**self.model_inputs(batch)).logits.float().double().view(-1, 2)
        losses = -F.logsigmoid(rewards[:, CHOSEN] - rewards[:, REJECTED] - batch["margin"])
        losses = losses + self.keys.center_weight * rewards.sum(1).square()
        counts = batch["pair"] != NOTHING
        return losses.where(counts, 0.0), rewards.detach().where(counts.unsqueeze(1), 0.0)

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Conversations of random lengths. In every third step the last pair counts nothing."""
        generator = step_generator(seed, step)
        text = self._config.get_text_config()
        ids = torch.randint(0, int(text.vocab_size), (samples, 2, seq_len), generator=generator)
        lengths = torch.randint(SHORTEST, seq_len + 1, (samples, 2), generator=generator)
        ids[torch.arange(seq_len) >= lengths.unsqueeze(2)] = int(text.pad_token_id or 0)
        pair = torch.arange(samples)
        if skips_last(step, samples):
            pair[-1] = NOTHING
        margin = torch.rand(samples, generator=generator, dtype=torch.float64)
        return {"input_ids": ids, "lengths": lengths, "margin": margin, "pair": pair}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One conversation at a time, without padding."""
        losses = []
        for ids, lengths, margin, pair in zip(*(batch[name] for name in self.batch_spec.fields), strict=True):
            if int(pair) != NOTHING:
                chosen, rejected = (
                    forward(input_ids=tokens[None, :length]).logits.double()[0, 0]
                    for tokens, length in zip(ids, lengths.tolist(), strict=True)
                )
                centered = self.keys.center_weight * (chosen + rejected) ** 2
                losses.append((1 + (rejected - chosen + margin).exp()).log() + centered)
        return Reference(torch.stack(losses).sum())
