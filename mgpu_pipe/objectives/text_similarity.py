"""Similarity of sentences: the more similar two are, the nearer their vectors.

The losses are sentence-transformers' ``CoSENTLoss`` and ``CosineSimilarityLoss``, over the global batch however it is
cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import BatchSpec, Field
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Reference
from mgpu_pipe.objectives.global_batch import Features
from mgpu_pipe.objectives.losses.ranked_pairs import cosent, ranks, shares_of_correlation
from mgpu_pipe.objectives.sample_group import SampleGroup
from mgpu_pipe.objectives.text_similarity_keys import DESCRIPTION, TextSimilarityConfig
from mgpu_pipe.objectives.text_vectors import PAIR, TextVectorObjective
from mgpu_pipe.parallel.random_streams import step_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TextSimilarityObjective(TextVectorObjective):
    """CoSENT's loss of all pairs of the step, or the mean over pairs of the squared error of the cosine.

    Args:
        keys: ``objective.*``.
    """

    description = DESCRIPTION
    num_sums = 3

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: TextSimilarityConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate, keys)
        self._keys = keys

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        return cls(model, optimizer_factory, learning_rate, cast(TextSimilarityConfig, config.objective))

    @property
    def batch_spec(self) -> BatchSpec:
        """``input_ids``, (rows, 2, seq_len), and ``lengths``, tokens of each sentence, (rows, 2): int64. ``scores``,
        float32 (rows,)."""
        return BatchSpec(
            {
                "input_ids": Field(sequence_dim=2, shape=(PAIR,)),
                "lengths": Field(sequence_dim=None, shape=(PAIR,)),
                "scores": Field(sequence_dim=None, dtype="float32"),
            }
        )

    def labels(self, batch: Mapping[str, torch.Tensor]) -> Features:
        return {"scores": batch["scores"]}

    def losses_of_size(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        """CoSENT's loss is that of every sample, so that their mean is the loss."""
        queries, documents, scores = features["queries"], features["documents"][:, 0], features["scores"]
        similarities = (queries * documents).sum(1)
        if self._keys.loss == "cosent":
            loss, slopes = cosent(similarities, scores)
            losses, slopes = loss.expand(rows.stop - rows.start), slopes * len(scores)
        else:
            errors = similarities / self._keys.scale - scores
            losses, slopes = errors[rows].square(), 2 * errors / self._keys.scale
        if gradients:
            gradients["queries"][rows].addcmul_(slopes[rows, None], documents[rows])
            gradients["documents"][rows, 0].addcmul_(slopes[rows, None], queries[rows])
        return losses

    def last_sums(self, world: SampleGroup) -> torch.Tensor | float:
        """This process's parts of the correlations over all held-out pairs, in the order of ``measured``."""
        if not self._held_out:
            return 0.0
        held_out, self._held_out = self._held_out, []
        similarities, scores, mine = [], [], []
        for features, rows in held_out:
            similarities.append((features["queries"] * features["documents"][:, 0]).sum(1))
            scores.append(features["scores"])
            is_mine = torch.zeros_like(scores[-1], dtype=torch.bool)
            is_mine[rows] = True
            mine.append(is_mine)
        nearness, wanted = torch.cat(similarities), torch.cat(scores)
        shares = [shares_of_correlation(ranks(nearness), ranks(wanted)), shares_of_correlation(nearness, wanted)]
        sums = [share[torch.cat(mine)].sum() for share in shares]
        return world.sum_over_samples(torch.stack([torch.zeros_like(sums[0]), *sums]))

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Random sentences of random lengths; some have equal scores."""
        generator = torch.Generator().manual_seed(step_seed(seed, step, -1))
        ids = torch.randint(0, int(self._config.vocab_size), (samples, PAIR, seq_len), generator=generator)
        lengths = torch.randint(2, seq_len + 1, (samples, PAIR), generator=generator)
        ids[torch.arange(seq_len) >= lengths.unsqueeze(-1)] = int(self._config.pad_token_id or 0)
        scores = torch.randint(-3, 6, (samples,), generator=generator) / 5
        return {"input_ids": ids, "lengths": lengths, "scores": scores}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One sentence at a time, without padding; one comparison at a time."""
        scores, sums = batch["scores"].tolist(), []
        for vectors in self.plain_vectors(forward, batch):
            values = [first @ second for first, second in vectors]
            if self._keys.loss == "cosine":
                sums.append(torch.stack([(v - s) ** 2 for v, s in zip(values, scores, strict=True)]).sum())
                continue
            pairs = [
                (low, high) for low in range(len(scores)) for high in range(len(scores)) if scores[low] < scores[high]
            ]
            differences = [self._keys.scale * (values[low] - values[high]) for low, high in pairs]
            loss = torch.stack([torch.zeros(()), *differences]).logsumexp(0)
            sums.append(loss * len(scores))
        return Reference(torch.stack(sums).sum())


OBJECTIVE = TextSimilarityObjective
