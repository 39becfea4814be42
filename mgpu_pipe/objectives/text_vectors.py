"""Vectors of texts: what objectives over them share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import BatchSpec, Field
from mgpu_pipe.objectives.base import Batch, Forward, KeyedObjective, LearningRate, Reference, step_generator
from mgpu_pipe.objectives.global_batch import Features, GlobalBatchObjective, at_least_fp32
from mgpu_pipe.objectives.losses.vectors import cosent, ranks, shares_of_correlation
from mgpu_pipe.objectives.sample_group import SampleGroup
from mgpu_pipe.objectives.vector_keys import TEXT_SIMILARITY, TextSimilarityConfig, VectorConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PAIR = 2
"""Texts of a sample without negatives."""
SIDES = ("queries", "documents")


class TextVectorObjective(KeyedObjective, GlobalBatchObjective):
    """Base of objectives over vectors of texts. A batch has ``input_ids``, (rows, texts, seq_len), and ``lengths``,
    tokens of each text, (rows, texts), 0 for a text that a sample does not have.
    """

    keys: VectorConfig

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: VectorConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate, keys)
        self._config = cast(Any, model.config)
        self._config.use_cache = False
        self._held_out: list[tuple[Features, slice]] = []

    @abstractmethod
    def labels(self, batch: Mapping[str, torch.Tensor]) -> Features:
        """Features of a micro-batch that are no vectors, (rows, ...)."""

    @abstractmethod
    def losses_of_size(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        """:meth:`losses` from vectors of one size: ``queries``, (rows, size), the first texts times ``scale``, and
        ``documents``, (rows, texts - 1, size), the others."""

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return present_rows(batch)[1]

    def encode(self, batch: Mapping[str, torch.Tensor]) -> Features:
        inputs = self.model_inputs(batch)
        hidden = self.model(**inputs).last_hidden_state
        vectors = pool(hidden, inputs["attention_mask"], self.keys.pooling)
        features = self.labels(batch)
        for size in self._sizes:
            features |= self._sides(batch, vectors[:, :size], _suffix(size))
        return features

    @property
    def _sizes(self) -> list[int | None]:
        """Numbers of first entries whose losses are added; None is all of them."""
        return [None, *self.keys.matryoshka_sizes]

    def _sides(self, batch: Mapping[str, torch.Tensor], vectors: torch.Tensor, suffix: str) -> Features:
        """Queries, (rows, size), and documents, (rows, texts - 1, size), from the vectors of the present texts."""
        if self.keys.normalize:
            vectors = F.normalize(vectors, dim=-1)
        there, _ = present_rows(batch)
        every = vectors.new_zeros(len(there), vectors.shape[1]).index_put((there,), vectors)
        queries, *documents = every.unflatten(0, batch["lengths"].shape).unbind(1)
        return {f"queries{suffix}": queries * self.keys.scale, f"documents{suffix}": torch.stack(documents, 1)}

    def losses(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        total = torch.zeros((), device=features["queries"].device)
        for size in self._sizes:
            of_size = None if gradients is None else _sides_of_size(gradients, size)
            total = total + self.losses_of_size({**features, **_sides_of_size(features, size)}, rows, of_size)
        return total

    def collect_heldout(self, features: Features, rows: slice) -> None:
        shortened = {side + _suffix(size) for size in self.keys.matryoshka_sizes for side in SIDES}
        self._held_out.append(({name: features[name] for name in features.keys() - shortened}, rows))

    def plain_vectors(self, forward: Forward, batch: Batch) -> Iterator[list[list[torch.Tensor]]]:
        """Vectors of each sample's texts, for each size; one text at a time, without padding."""
        keys = self.keys

        def pool(ids: torch.Tensor, length: int) -> torch.Tensor:
            states = forward(input_ids=ids[None, :length]).last_hidden_state[0].float()
            return {"mean": states.mean(0), "cls": states[0], "last_token": states[-1]}[keys.pooling]

        vectors = [
            [pool(ids, length) for ids, length in zip(*texts, strict=True) if length]
            for texts in zip(batch["input_ids"], batch["lengths"].tolist(), strict=True)
        ]
        for size in self._sizes:
            rows = [[vector[:size] for vector in row] for row in vectors]
            yield [[vector / vector.norm() for vector in row] for row in rows] if keys.normalize else rows


def pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Vectors of texts, (texts, width), from the states of their tokens, (texts, seq_len, width).

    Args:
        mask: 1 for a token and 0 for padding, which follows the tokens, (texts, seq_len).
        pooling: see ``objective.pooling``.
    """
    states = at_least_fp32(hidden)
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last_token":
        return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
    weights = mask.unsqueeze(-1).to(states)
    return (states * weights).sum(1) / weights.sum(1)


def _suffix(size: int | None) -> str:
    """Ends the names of features of this size; empty for whole vectors."""
    return "" if size is None else f"_{size}"


def _sides_of_size(features: Features, size: int | None) -> Features:
    """Queries and documents of one size, under their plain names."""
    return {name: features[name + _suffix(size)] for name in SIDES}


def present_rows(batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Which texts are encoded, (rows * texts,): all that samples have, and the first, so that every process runs the
    model; and the model's inputs, a row for each of them."""
    there = batch["lengths"].flatten() > 0
    there[:1] = True
    ids, lengths = batch["input_ids"].flatten(0, 1)[there], batch["lengths"].flatten()[there].clamp_min(1)
    mask = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
    return there, {"input_ids": ids, "attention_mask": mask.long()}


class TextSimilarityObjective(TextVectorObjective):
    """CoSENT's loss of all pairs of the step, or the mean over pairs of the squared error of the cosine."""

    description = TEXT_SIMILARITY
    keys: TextSimilarityConfig
    num_sums = 3

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
        if self.keys.loss == "cosent":
            loss, slopes = cosent(similarities, scores)
            losses, slopes = loss.expand(rows.stop - rows.start), slopes * len(scores)
        else:
            errors = similarities / self.keys.scale - scores
            losses, slopes = errors[rows].square(), 2 * errors / self.keys.scale
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
        generator = step_generator(seed, step)
        ids = torch.randint(0, int(self._config.vocab_size), (samples, PAIR, seq_len), generator=generator)
        lengths = torch.randint(2, seq_len + 1, (samples, PAIR), generator=generator)
        ids[torch.arange(seq_len) >= lengths.unsqueeze(-1)] = max(0, int(self._config.pad_token_id or 0))
        scores = torch.randint(-3, 6, (samples,), generator=generator) / 5
        return {"input_ids": ids, "lengths": lengths, "scores": scores}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One sentence at a time, without padding; one comparison at a time."""
        scores, sums = batch["scores"].tolist(), []
        for vectors in self.plain_vectors(forward, batch):
            values = [first @ second for first, second in vectors]
            if self.keys.loss == "cosine":
                sums.append(torch.stack([(v - s) ** 2 for v, s in zip(values, scores, strict=True)]).sum())
                continue
            pairs = [
                (low, high) for low in range(len(scores)) for high in range(len(scores)) if scores[low] < scores[high]
            ]
            differences = [self.keys.scale * (values[low] - values[high]) for low, high in pairs]
            loss = torch.stack([torch.zeros(()), *differences]).logsumexp(0)
            sums.append(loss * len(scores))
        return Reference(torch.stack(sums).sum())
