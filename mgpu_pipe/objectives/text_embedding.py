"""Text embeddings: a query is to find its positive among all texts of the step.

The loss is that of sentence-transformers' ``MultipleNegativesRankingLoss`` (Henderson et al. 2017, arXiv:1705.00652),
over the global batch however it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.data.step_batch import BatchSpec, Field
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Reference
from mgpu_pipe.objectives.global_batch import Features, GlobalBatchObjective, at_least_fp32
from mgpu_pipe.objectives.losses.softmax_pairing import softmax_pairing
from mgpu_pipe.objectives.sample_group import SampleGroup
from mgpu_pipe.objectives.text_embedding_keys import DESCRIPTION, METRICS, TextEmbeddingConfig
from mgpu_pipe.objectives.text_search import search_sums
from mgpu_pipe.parallel.random_streams import step_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAIR = 2
"""Texts of a sample without negatives."""


class TextEmbeddingObjective(GlobalBatchObjective):
    """Cross-entropy of each query's positive among the positives and negatives of all samples, a mean over samples.

    Args:
        keys: ``objective.*``.
    """

    description = DESCRIPTION
    num_sums = 2 + len(METRICS)

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: TextEmbeddingConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._keys, self._texts = keys, PAIR
        self._config = cast(Any, model.config)
        self._held_out: list[tuple[Features, slice]] = []

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        return cls(model, optimizer_factory, learning_rate, cast(TextEmbeddingConfig, config.objective))

    def of_data(self, prepared: Prepared) -> None:
        self._texts = int(getattr(prepared, "texts", PAIR))

    @property
    def batch_spec(self) -> BatchSpec:
        """``input_ids``, (rows, texts, seq_len): query, positive, negatives. ``lengths``, tokens of each text, and
        ``text_numbers``, equal for equal texts: (rows, texts), 0 for a text that a sample does not have. All int64."""
        return BatchSpec(
            {
                "input_ids": Field(sequence_dim=2, shape=(self._texts,)),
                "lengths": Field(sequence_dim=None, shape=(self._texts,)),
                "text_numbers": Field(sequence_dim=None, shape=(self._texts,)),
            }
        )

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Each text that is there a row, and at least one row, so that every process runs the model."""
        there = _is_there(batch)
        ids, lengths = batch["input_ids"].flatten(0, 1)[there], batch["lengths"].flatten()[there].clamp_min(1)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
        return {"input_ids": ids, "attention_mask": mask.long()}

    def encode(self, batch: Mapping[str, torch.Tensor]) -> Features:
        inputs = self.model_inputs(batch)
        hidden = self.model(**inputs).last_hidden_state
        vectors = pool(hidden, inputs["attention_mask"], self._keys.pooling)
        features = {"numbers": batch["text_numbers"]}
        for size in self._sizes:
            features |= self._sides(batch, vectors[:, :size], _suffix(size))
        return features

    @property
    def _sizes(self) -> list[int | None]:
        """Numbers of first entries whose losses are added; None is all of them."""
        return [None, *self._keys.matryoshka_sizes]

    def _sides(self, batch: Mapping[str, torch.Tensor], vectors: torch.Tensor, suffix: str) -> Features:
        """Queries, (rows, size), and documents, (rows, texts - 1, size), from the vectors of the present texts."""
        if self._keys.normalize:
            vectors = F.normalize(vectors, dim=-1)
        there = _is_there(batch)
        every = vectors.new_zeros(len(there), vectors.shape[1]).index_put((there,), vectors)
        queries, *documents = every.unflatten(0, batch["lengths"].shape).unbind(1)
        return {f"queries{suffix}": queries * self._keys.scale, f"documents{suffix}": torch.stack(documents, 1)}

    def losses(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        total = torch.zeros((), device=features["queries"].device)
        for size in self._sizes:
            of_size = None if gradients is None else _of_size(gradients, size)
            total = total + self._losses_of_size({**features, **_of_size(features, size)}, rows, of_size)
        return total

    def _losses_of_size(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        """Losses of some samples, (rows,), from vectors of one size."""
        to_document = self._losses_of_queries(features, rows, gradients)
        if not self._keys.symmetric:
            return to_document
        to_query = self._losses_of_positives(features, rows, gradients)
        for gradient in (gradients or {}).values():
            gradient.div_(2)
        return (to_document + to_query) / 2

    def _losses_of_queries(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        """Losses of finding each query's positive among all documents."""
        queries, documents, numbers = features["queries"], features["documents"], features["numbers"]
        each, keys, names = documents.shape[1], documents.flatten(0, 1), numbers[:, 1:]
        losses = [queries.new_zeros(0)]
        for some, indices in _chunks(rows, queries):
            hidden = (names == 0).expand(len(indices), -1, -1)
            if self._keys.mask_equal:
                hidden = hidden | (names == names[some, :1, None])
                hidden[:, :, 0] |= numbers[:, 0] == numbers[some, :1]
            right = indices * each
            hidden = hidden.flatten(1).scatter(1, right, False)
            logits = (queries[some] @ keys.T).masked_fill_(hidden, -torch.inf)
            losses.append(softmax_pairing(logits, right))
            if gradients:
                gradients["queries"][some].addmm_(logits, keys)
                gradients["documents"].flatten(0, 1).addmm_(logits.T, queries[some])
            del logits, hidden  # frees memory before the next ones
        return torch.cat(losses)

    def _losses_of_positives(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        """Losses of finding the query of each positive among all queries."""
        queries, positives, numbers = features["queries"], features["documents"][:, 0], features["numbers"]
        losses = [queries.new_zeros(0)]
        for some, indices in _chunks(rows, queries):
            logits = positives[some] @ queries.T
            if self._keys.mask_equal:
                equal = (numbers[:, :PAIR] == numbers[some, None, :PAIR]).any(-1)
                logits.masked_fill_(equal.scatter(1, indices, False), -torch.inf)
            losses.append(softmax_pairing(logits, indices))
            if gradients:
                gradients["documents"][some, 0].addmm_(logits, queries)
                gradients["queries"].addmm_(logits.T, positives[some])
            del logits  # frees memory before the next ones
        return torch.cat(losses)

    def collect_heldout(self, features: Features, rows: slice) -> None:
        self._held_out.append(({**_of_size(features, None), "numbers": features["numbers"]}, rows))

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = self.micro_batch_loss(batch).double()
        return F.pad(loss.reshape(1), (0, self.num_sums - 1))

    def last_sums(self, world: SampleGroup) -> torch.Tensor | float:
        """Sums of the held-out metrics over the queries of this process, in the order of ``measured``."""
        if not self._held_out:
            return 0.0
        held_out, self._held_out = self._held_out, []
        return world.sum_over_samples(F.pad(search_sums(held_out), (1, 0)))

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Random texts of random lengths. Some samples have no negative; some texts have equal numbers."""
        generator = torch.Generator().manual_seed(step_seed(seed, step, -1))

        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        ids = draw(0, int(self._config.vocab_size), samples, PAIR + 1, seq_len)
        lengths, numbers = draw(2, seq_len + 1, samples, PAIR + 1), draw(1, 4 * samples, samples, PAIR + 1)
        numbers[:, 2] += 4 * samples  # no negative is a positive
        missing = draw(0, 3, samples) == 0
        lengths[missing, 2], numbers[missing, 2] = 0, 0
        ids[torch.arange(seq_len) >= lengths.unsqueeze(-1)] = int(self._config.pad_token_id or 0)
        return {"input_ids": ids, "lengths": lengths, "text_numbers": numbers}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One text at a time, without padding; one pair at a time."""
        keys = self._keys

        def pooled(ids: torch.Tensor, length: int) -> torch.Tensor:
            states = forward(input_ids=ids[None, :length]).last_hidden_state[0].float()
            return {"mean": states.mean(0), "cls": states[0], "last_token": states[-1]}[keys.pooling]

        vectors = [
            [pooled(ids, length) for ids, length in zip(*texts, strict=True) if length]
            for texts in zip(batch["input_ids"], batch["lengths"].tolist(), strict=True)
        ]
        sums = []
        for size in self._sizes:
            cut = [[vector[:size] for vector in row] for row in vectors]
            if keys.normalize:
                cut = [[vector / vector.norm() for vector in row] for row in cut]
            sums.append(self._plain_losses(cut, batch["text_numbers"].tolist()))
        return Reference(torch.stack(sums).sum())

    def _plain_losses(self, vectors: list[list[torch.Tensor]], numbers: list[list[int]]) -> torch.Tensor:
        """Sum of the losses of all samples, from the vectors of each one's texts."""
        keys, losses = self._keys, []
        for row, (query, positive, *_) in enumerate(vectors):
            others, queries = [], []
            for other, (other_query, *documents) in enumerate(vectors):
                same_query = numbers[other][0] == numbers[row][0]
                for at, document in enumerate(documents, 1):
                    is_equal = numbers[other][at] == numbers[row][1] or (at == 1 and same_query)
                    if not (keys.mask_equal and is_equal):
                        others.append(keys.scale * (query @ document))
                if not (keys.mask_equal and (same_query or numbers[other][1] == numbers[row][1])):
                    queries.append(keys.scale * (other_query @ positive))
            right = keys.scale * (query @ positive)
            sides = [others, queries] if keys.symmetric else [others]
            if keys.mask_equal:
                sides = [[right, *side] for side in sides]
            losses.append(sum(torch.stack(side).logsumexp(0) - right for side in sides) / len(sides))
        return torch.stack(cast("list[torch.Tensor]", losses)).sum()


def pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Vectors of texts, (texts, width), from the states of their tokens, (texts, seq_len, width).

    Args:
        mask: 1 for a token and 0 for padding, which follows the tokens, (texts, seq_len).
        pooling: as of ``objective.pooling``.
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


def _of_size(features: Features, size: int | None) -> Features:
    """Queries and documents of one size, under their plain names."""
    return {name: features[name + _suffix(size)] for name in ("queries", "documents")}


def _is_there(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Whether each text is encoded, (rows * texts,): all that samples have, and the first."""
    there = batch["lengths"].flatten() > 0
    there[:1] = True
    return there


def _chunks(rows: slice, vectors: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Parts of ``rows`` whose scores take at most a quarter of the memory of ``vectors``, and their indices."""
    at_once = max(1, min(vectors.shape[1], rows.stop - rows.start) // 4)
    for begin in range(rows.start, rows.stop, at_once):
        some = slice(begin, min(begin + at_once, rows.stop))
        yield some, torch.arange(some.start, some.stop, device=vectors.device)[:, None]


OBJECTIVE = TextEmbeddingObjective
