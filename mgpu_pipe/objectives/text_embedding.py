"""Text embeddings: a query is to find its positive among all texts of the step.

The loss is that of sentence-transformers' ``MultipleNegativesRankingLoss`` (Henderson et al. 2017, arXiv:1705.00652),
over the global batch however it is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F

from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.data.step_batch import BatchSpec, Field
from mgpu_pipe.objectives.base import Batch, Forward, Reference, draw_integers, step_generator
from mgpu_pipe.objectives.global_batch import Features
from mgpu_pipe.objectives.losses.vectors import divergence, margin_errors, pairing_losses
from mgpu_pipe.objectives.sample_group import SampleGroup
from mgpu_pipe.objectives.text_vectors import PAIR, TextVectorObjective
from mgpu_pipe.objectives.vector_keys import MOST_RANK, SEARCH_METRICS, TEXT_EMBEDDING, TextEmbeddingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TextEmbeddingObjective(TextVectorObjective):
    """Cross-entropy of each query's positive among the positives and negatives of all samples, a mean over samples."""

    description = TEXT_EMBEDDING
    keys: TextEmbeddingConfig
    _texts = PAIR
    num_sums = 2 + len(SEARCH_METRICS)

    def of_data(self, prepared: Prepared) -> None:
        self._texts = int(getattr(prepared, "texts", PAIR))

    @property
    def batch_spec(self) -> BatchSpec:
        """``input_ids``, (rows, texts, seq_len): query, positive, negatives. ``lengths``, tokens of each text, and
        ``text_numbers``, equal for equal texts: (rows, texts), 0 for a text that a sample does not have. All int64.
        ``scores``, float32 (rows, texts - 1), where a teacher scored the documents."""
        fields = {
            "input_ids": Field(sequence_dim=2, shape=(self._texts,)),
            "lengths": Field(sequence_dim=None, shape=(self._texts,)),
            "text_numbers": Field(sequence_dim=None, shape=(self._texts,)),
        }
        if self.keys.is_taught:
            fields["scores"] = Field(sequence_dim=None, dtype="float32", shape=(self._texts - 1,))
        return BatchSpec(fields)

    def labels(self, batch: Mapping[str, torch.Tensor]) -> Features:
        scores = {"scores": batch["scores"]} if self.keys.is_taught else {}
        return {"numbers": batch["text_numbers"], **scores}

    def losses_of_size(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        """Losses of some samples, (rows,), from vectors of one size."""
        if self.keys.is_taught:
            return self._losses_by_teacher(features, rows, gradients)
        to_document = self._losses_of_queries(features, rows, gradients)
        if not self.keys.symmetric:
            return to_document
        to_query = self._losses_of_positives(features, rows, gradients)
        for gradient in (gradients or {}).values():
            gradient.div_(2)
        return (to_document + to_query) / 2

    def _losses_by_teacher(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        """Losses of giving each query's own documents the teacher's scores."""
        queries, documents, scale = features["queries"][rows], features["documents"][rows], self.keys.scale
        there = features["numbers"][rows, 1:] > 0
        logits = (queries.unsqueeze(1) * documents).sum(-1)
        wanted = self.keys.teacher_scale * features["scores"][rows].to(logits)
        if self.keys.loss == "margin_mse":
            losses, slopes = margin_errors(logits / scale, wanted, there)
            slopes = slopes / scale
        else:
            losses, slopes = divergence(logits, wanted, there)
            losses, slopes = losses / scale**2, slopes / scale**2
        if gradients:
            gradients["queries"][rows].add_((slopes.unsqueeze(-1) * documents).sum(1))
            gradients["documents"][rows].add_(slopes.unsqueeze(-1) * queries.unsqueeze(1))
        return losses

    def _losses_of_queries(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        """Losses of finding each query's positive among all documents."""
        documents, numbers = features["documents"], features["numbers"]
        names = numbers[:, 1:]

        def hide(some: slice, logits: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            hidden = (names == 0).expand(len(logits), -1, -1)
            if self.keys.mask_equal:
                hidden = hidden | (names == names[some, :1, None])
                hidden[:, :, 0] |= numbers[:, 0] == numbers[some, :1]
            return self._without_near(hidden.flatten(1), logits, right)

        buffers = (gradients["queries"], gradients["documents"].flatten(0, 1)) if gradients else None
        keys = documents.flatten(0, 1)
        return pairing_losses(features["queries"], keys, rows, buffers, stride=documents.shape[1], hide=hide)

    def _losses_of_positives(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        """Losses of finding the query of each positive among all queries."""
        numbers = features["numbers"][:, :PAIR]

        def hide(some: slice, logits: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            hidden = torch.zeros_like(logits, dtype=torch.bool)
            if self.keys.mask_equal:
                hidden = (numbers == numbers[some, None]).any(-1)
            return self._without_near(hidden, logits, right)

        buffers = (gradients["documents"][:, 0], gradients["queries"]) if gradients else None
        return pairing_losses(features["documents"][:, 0], features["queries"], rows, buffers, hide=hide)

    def _without_near(self, hidden: torch.Tensor, logits: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """``hidden``, and the columns whose scores ``objective.mask_margin`` takes for those of right ones."""
        if self.keys.mask_margin is None:
            return hidden
        return hidden | (logits > logits.gather(1, right) - self.keys.scale * self.keys.mask_margin)

    def last_sums(self, world: SampleGroup) -> torch.Tensor | float:
        """Sums of the held-out metrics over the queries of this process, in the order of ``measured``."""
        if not self._held_out:
            return 0.0
        held_out, self._held_out = self._held_out, []
        return world.sum_over_samples(F.pad(search_sums(held_out), (1, 0)))

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Random texts of random lengths. Some samples have no negative; some texts have equal numbers."""
        generator = step_generator(seed, step)

        draw = partial(draw_integers, generator)
        ids = draw(0, int(self._config.vocab_size), samples, PAIR + 1, seq_len)
        lengths, numbers = draw(2, seq_len + 1, samples, PAIR + 1), draw(1, 4 * samples, samples, PAIR + 1)
        numbers[:, 2] += 4 * samples  # no negative is a positive
        missing = draw(0, 3, samples) == 0
        lengths[missing, 2], numbers[missing, 2] = 0, 0
        ids[torch.arange(seq_len) >= lengths.unsqueeze(-1)] = max(0, int(self._config.pad_token_id or 0))
        batch = {"input_ids": ids, "lengths": lengths, "text_numbers": numbers}
        if self.keys.is_taught:
            batch["scores"] = torch.randn(samples, PAIR, generator=generator)
        return batch

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One text at a time, without padding; one pair at a time."""
        numbers = batch["text_numbers"].tolist()
        if self.keys.is_taught:
            taught = [self._plain_losses_by_teacher(v, batch["scores"]) for v in self.plain_vectors(forward, batch)]
            return Reference(torch.stack(taught).sum())
        sums = [self._plain_losses(vectors, numbers) for vectors in self.plain_vectors(forward, batch)]
        return Reference(torch.stack(sums).sum())

    def _plain_losses_by_teacher(self, vectors: list[list[torch.Tensor]], scores: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of all samples, from the vectors of each one's texts."""
        keys, losses = self.keys, []
        for (query, *documents), teacher in zip(vectors, keys.teacher_scale * scores, strict=True):
            student, teacher = torch.stack([query @ document for document in documents]), teacher[: len(documents)]
            if keys.loss == "kl":
                logits = (keys.scale * student).log_softmax(0)
                losses.append(F.kl_div(logits, teacher.softmax(0), reduction="sum") / keys.scale**2)
            elif len(documents) > 1:
                losses.append(F.mse_loss(student[0] - student[1:], teacher[0] - teacher[1:]))
        return torch.stack(losses).sum()

    def _plain_losses(self, vectors: list[list[torch.Tensor]], numbers: list[list[int]]) -> torch.Tensor:
        """Sum of the losses of all samples, from the vectors of each one's texts."""
        keys, losses = self.keys, []
        for row, (query, positive, *_) in enumerate(vectors):
            others, queries = [], []
            for other, (other_query, *documents) in enumerate(vectors):
                same_query = numbers[other][0] == numbers[row][0]
                for index, document in enumerate(documents, 1):
                    is_equal = numbers[other][index] == numbers[row][1] or (index == 1 and same_query)
                    if (other, index) != (row, 1) and not (keys.mask_equal and is_equal):
                        others.append(keys.scale * (query @ document))
                if other != row and not (keys.mask_equal and (same_query or numbers[other][1] == numbers[row][1])):
                    queries.append(keys.scale * (other_query @ positive))
            right = keys.scale * (query @ positive)
            sides = [others, queries] if keys.symmetric else [others]
            if keys.mask_margin is not None:
                most = float(right) - keys.scale * keys.mask_margin
                sides = [[score for score in side if float(score) <= most] for side in sides]
            losses.append(sum(torch.stack([right, *side]).logsumexp(0) - right for side in sides) / len(sides))
        return torch.stack(cast("list[torch.Tensor]", losses)).sum()


SCORES_AT_ONCE = 1 << 22
"""Scores that exist at a time: of some queries with some texts."""


def search_sums(held_out: Sequence[tuple[Features, slice]]) -> torch.Tensor:
    """Number of this process's queries, then the sums of their metrics (``METRICS``), float64.

    Equal texts are one; equal queries are one query with several texts to find. Recall is the share of a query's texts
    that are found; NDCG compares with the best order (Järvelin and Kekäläinen 2002), as sentence-transformers does.

    Args:
        held_out: ``queries``, ``documents`` and ``numbers`` of all processes in every step batch, and the rows of this
            process.
    """
    whole = {name: torch.cat([features[name] for features, _ in held_out]) for name in held_out[0][0]}
    queries, numbers = whole["queries"], whole["numbers"]
    documents, document_numbers = whole["documents"].flatten(0, 1), numbers[:, 1:].flatten()
    corpus, corpus_at, document = _distinct(document_numbers)
    if int(corpus[0]) == 0:  # the number of missing texts
        corpus_at, document = corpus_at[1:], document - 1
    documents = documents[corpus_at]
    _, first_rows, query = _distinct(numbers[:, 0])
    right = torch.stack([query, document.unflatten(0, numbers[:, 1:].shape)[:, 0]], 1).unique(dim=0)
    pairs, wanted = right[:, 0] * len(documents) + right[:, 1], right[:, 0].bincount()
    mine = torch.zeros(len(numbers), dtype=torch.bool, device=numbers.device)
    offset = 0
    for features, rows in held_out:
        mine[offset + rows.start : offset + rows.stop] = True
        offset += len(features["numbers"])
    chosen = torch.arange(len(first_rows), device=numbers.device)[mine[first_rows]]
    sums = torch.zeros(5, dtype=torch.float64, device=queries.device)
    if not len(chosen):  # other processes have the first rows of all queries
        return sums
    gains = 1 / torch.arange(2, MOST_RANK + 2, dtype=torch.float64, device=queries.device).log2()
    for some in chosen.split(max(1, SCORES_AT_ONCE // len(documents))):
        nearest = _nearest(queries[first_rows[some]], documents)
        hits = torch.isin(some[:, None] * len(documents) + nearest, pairs).double()
        ranks, best = torch.arange(hits.shape[1], device=hits.device), wanted[some]
        reciprocal = (hits / (ranks + 1)).amax(1)
        ideal = gains.cumsum(0)[best.clamp_max(MOST_RANK) - 1]
        values = (hits[:, 0] / best, hits.sum(1) / best, reciprocal, (hits @ gains[: hits.shape[1]]) / ideal)
        sums += torch.stack([best.new_tensor(len(some)).double(), *(value.sum() for value in values)])
    return sums


def _nearest(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Indices of the ``MOST_RANK`` documents nearest to each query, nearest first; of parts of the documents."""
    best_scores, best = (
        queries.new_zeros(len(queries), 0),
        torch.zeros(len(queries), 0, dtype=torch.int64, device=queries.device),
    )
    at_once, offset = max(MOST_RANK, SCORES_AT_ONCE // len(queries)), 0
    for part in documents.split(at_once):
        scores = torch.cat([best_scores, queries @ part.T], 1)
        best_scores, indices = scores.topk(min(MOST_RANK, scores.shape[1]))
        places = torch.arange(offset, offset + len(part), device=best.device).expand(len(queries), -1)
        best = torch.cat([best, places], 1).gather(1, indices)
        offset += len(part)
    return best


def _distinct(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distinct values, ascending; the index of the first entry of each; and each entry's place among them."""
    values, place = numbers.unique(return_inverse=True)
    indices = torch.arange(len(numbers), device=numbers.device)
    first = torch.zeros_like(values).scatter_reduce_(0, place, indices, "amin", include_self=False)
    return values, first, place
