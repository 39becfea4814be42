"""Rerankers: a model reads a query and a document together and gives their score (a cross-encoder).

A sample is a query with its positive and its negatives, each document a row of the model, so that no micro-batch parts
them. The losses are those of sentence-transformers: ``binary`` its ``BinaryCrossEntropyLoss``; ``listwise`` its
``MultipleNegativesRankingLoss`` over the query's own documents, unscaled (localized contrastive estimation, Gao et al.
2021, arXiv:2101.08751); ``margin`` its ``RankNetLoss`` (Burges et al. 2005), which needs no teacher's scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.samples import ChangedSamples, SampleSet
from mgpu_pipe.data.step_batch import BatchSpec, Field
from mgpu_pipe.data.text.pair_template import PairTemplate, join_pair, pair_template
from mgpu_pipe.data.text.text_groups import TextGroups
from mgpu_pipe.objectives.base import Batch, Forward, Reference, draw_integers, step_generator
from mgpu_pipe.objectives.global_batch import at_least_fp32
from mgpu_pipe.objectives.packed_text import skips_last
from mgpu_pipe.objectives.sequence_classification import OneOutputObjective, token_types
from mgpu_pipe.objectives.text_vectors import present_rows
from mgpu_pipe.objectives.vector_keys import MOST_RANK, RANKING_METRICS, RERANKER, RerankerConfig, RerankerLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SHORTEST = 3
"""Fewest tokens of a random row."""


class RerankerObjective(OneOutputObjective):
    """Ranking of a query's documents by the one output of a model ``...ForSequenceClassification``."""

    description = RERANKER
    keys: RerankerConfig
    _documents = 1
    num_sums = 2 + len(RANKING_METRICS)

    @classmethod
    def samples(cls, config: RunConfig, samples: SampleSet) -> SampleSet:
        folder = cast(TextGroups, samples).prepared.tokenizer_folder
        return QueryDocuments(samples, pair_template(folder), cast(RerankerConfig, config.objective).loss)

    def of_data(self, prepared: Any) -> None:
        self._documents = int(prepared.texts) - 1

    @property
    def batch_spec(self) -> BatchSpec:
        """``input_ids``, (rows, documents, seq_len): the query with the positive, then with each negative.
        ``token_type_ids`` of the same shape separate the two texts of a row. ``lengths``, the tokens of each row, and
        ``terms``, 1 where a document adds a term to the loss: (rows, documents), 0 for a document that a sample does
        not have. All int64."""
        each = (self._documents,)
        return BatchSpec(
            {
                "input_ids": Field(sequence_dim=2, shape=each),
                "token_type_ids": Field(sequence_dim=2, shape=each),
                "lengths": Field(sequence_dim=None, shape=each),
                "terms": Field(sequence_dim=None, shape=each, target=True),
            }
        )

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        there, inputs = present_rows(batch)
        kinds = batch["token_type_ids"].flatten(0, 1)[there]
        return {**inputs, **token_types(self._config, kinds)}

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._losses(batch, self._scores(batch)).sum()

    def _scores(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Scores of all documents, float64 (rows, documents); minus infinity for those that a sample does not have."""
        scores = at_least_fp32(self.model(**self.model_inputs(batch)).logits[:, 0]).double()
        there, _ = present_rows(batch)
        every = scores.new_zeros(len(there)).index_put((there,), scores).view(batch["lengths"].shape)
        return every.masked_fill(batch["lengths"] == 0, -torch.inf)

    def _losses(self, batch: Mapping[str, torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
        """Each document's term of the loss, (rows, documents); 0 where it adds none."""
        counts = batch["terms"] > 0
        if self.keys.loss == "listwise":
            return (scores.logsumexp(1, keepdim=True) - scores).where(counts, 0.0)
        wanted = scores[:, :1] - scores if self.keys.loss == "margin" else torch.cat([scores[:, :1], -scores[:, 1:]], 1)
        return -F.logsigmoid(wanted.where(counts, 0.0)).where(counts, 0.0)

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scores = self._scores(batch)
        return torch.cat([self._losses(batch, scores).sum().reshape(1), ranking_sums(scores, batch["terms"])])

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Rows of random lengths; some queries have one negative, some two. In every third step the last one has no
        document that counts."""
        text = self._config.get_text_config()

        draw = partial(draw_integers, step_generator(seed, step))
        ids = draw(0, int(text.vocab_size), samples, 3, seq_len)
        lengths = draw(SHORTEST, seq_len + 1, samples, 3)
        lengths[:, 2] *= draw(0, 2, samples)
        place = torch.arange(seq_len)
        padding = place >= lengths.unsqueeze(2)
        ids[padding] = int(text.pad_token_id or 0)
        terms = torch.from_numpy(loss_terms(np.asarray(lengths > 0), self.keys.loss)).long()
        if skips_last(step, samples):
            terms[-1] = 0
        kinds = ((place >= lengths.unsqueeze(2) // 2) & ~padding).long()
        return {"input_ids": ids, "token_type_ids": kinds, "lengths": lengths, "terms": terms}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One row at a time, without padding; one term at a time."""
        losses = []
        for ids, kinds, lengths, terms in zip(*(batch[name] for name in self.batch_spec.fields), strict=True):
            scores = [
                forward(input_ids=tokens[None, :end], **token_types(self._config, kind[None, :end])).logits.double()[
                    0, 0
                ]
                for tokens, kind, end in zip(ids, kinds, lengths.tolist(), strict=True)
                if end
            ]
            positive, *negatives = scores
            for term in terms.nonzero().flatten().tolist():
                if self.keys.loss == "listwise":
                    losses.append(torch.stack([(score - positive).exp() for score in scores]).sum().log())
                elif self.keys.loss == "margin":
                    losses.append((1 + (negatives[term - 1] - positive).exp()).log())
                else:
                    losses.append((1 + (scores[term] if term else -positive).exp()).log())
        return Reference(torch.stack(losses).sum())


def ranking_sums(scores: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """Number of queries with negatives, then the sums of their metrics (``RANKING_METRICS``), float64.

    A negative with the positive's score ranks above it.

    Args:
        scores: of the positive and the negatives, (rows, documents); minus infinity for missing ones.
        terms: of a query without terms nothing counts, (rows, documents).
    """
    counts = (scores[:, 1:].isfinite().any(1) & (terms > 0).any(1)).double()
    ranks = 1 + (scores[:, 1:] >= scores[:, :1]).sum(1)
    is_near = counts * (ranks <= MOST_RANK)
    sums = [counts, counts * (ranks == 1), is_near / ranks, is_near / (ranks + 1).double().log2()]
    return torch.stack([value.sum() for value in sums])


@dataclass(frozen=True)
class QueryDocuments(ChangedSamples):
    """Samples of a query, its positive and its negatives: a row of tokens for each document, padded to the longest of
    the batch. ``read`` are :class:`TextGroups`."""

    template: PairTemplate
    loss: RerankerLoss

    @property
    def _texts(self) -> TextGroups:
        return cast(TextGroups, self.read)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return int(loss_terms(self._texts.there(indices)[:, 1:], self.loss).sum())

    def positions(self, indices: NDArray[np.int64]) -> int:
        prepared = self._texts.prepared
        return len(indices) * (prepared.texts - 1) * prepared.seq_len

    def padding(self, indices: NDArray[np.int64]) -> int:
        lengths = self._texts.ranges(indices, indices)[1]  # of other draws: numbers in the run are not known here
        rows = np.minimum(lengths[:, :1] + lengths[:, 1:] + self.template.more_tokens, self._texts.prepared.seq_len)
        return self.positions(indices) - int(rows[lengths[:, 1:] > 0].sum())

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Batch of the samples ``indices`` in the form of :mod:`mgpu_pipe.objectives.reranker`."""
        start, length, _ = self._texts.ranges(indices, numbers)
        there = length[:, 1:] > 0
        rows = {
            (row, document): self._row(start[row, [0, document + 1]], length[row, [0, document + 1]])
            for row, document in np.argwhere(there).tolist()
        }
        shape = (*there.shape, max(len(ids) for ids, _ in rows.values()))
        ids, kinds = np.full(shape, self._texts.prepared.padding_token_id, np.int64), np.zeros(shape, np.int64)
        lengths = np.zeros(there.shape, np.int64)
        for place, (tokens, second) in rows.items():
            lengths[place] = len(tokens)
            ids[place][: len(tokens)] = tokens
            kinds[place][second : len(tokens)] = 1
        terms = loss_terms(there, self.loss).astype(np.int64)
        arrays = {"input_ids": ids, "token_type_ids": kinds, "lengths": lengths, "terms": terms}
        return {name: torch.from_numpy(value) for name, value in arrays.items()}

    def _row(self, start: NDArray[np.int64], length: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Tokens of a query and a document as one row, and where tokens of type 1 begin: at its end without any."""
        before, after = self.template.alone
        query, document = (
            self._texts.store.tokens[begin + before : begin + size - after].astype(np.int64)
            for begin, size in zip(start.tolist(), length.tolist(), strict=True)
        )
        return join_pair(self.template, query, document, self._texts.prepared.seq_len)


def loss_terms(there: NDArray[np.bool_], loss: RerankerLoss) -> NDArray[np.bool_]:
    """Which documents add a term to the loss, (rows, documents); see :attr:`RerankerConfig.loss`.

    Args:
        there: which documents a sample has; the first one is its positive.
    """
    if loss == "binary":
        return there
    terms = there.copy()
    if loss == "listwise":
        terms[:, 1:], terms[:, 0] = False, there[:, 1:].any(1)
    else:
        terms[:, 0] = False
    return terms
