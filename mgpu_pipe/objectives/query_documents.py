"""Rows of a reranker: a query with each of its documents, from texts that are tokenised one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.data.samples import ChangedSamples
from mgpu_pipe.data.text.pair_template import PairTemplate, kept_tokens
from mgpu_pipe.data.text.row_tensors import TextGroups
from mgpu_pipe.objectives.reranker_keys import Loss


@dataclass(frozen=True)
class QueryDocuments(ChangedSamples):
    """Samples of a query, its positive and its negatives: a row of tokens for each document, padded to the longest of
    the batch. ``read`` are :class:`TextGroups`."""

    template: PairTemplate
    loss: Loss

    @property
    def _texts(self) -> TextGroups:
        return cast(TextGroups, self.read)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return int(loss_terms(self._texts.ranges(indices)[1][:, 1:] > 0, self.loss).sum())

    def positions(self, indices: NDArray[np.int64]) -> int:
        prepared = self._texts.prepared
        return len(indices) * (prepared.texts - 1) * prepared.seq_len

    def padding(self, indices: NDArray[np.int64]) -> int:
        lengths = self._texts.ranges(indices)[1]
        rows = np.minimum(lengths[:, :1] + lengths[:, 1:] + self.template.more_tokens, self._texts.prepared.seq_len)
        return self.positions(indices) - int(rows[lengths[:, 1:] > 0].sum())

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Batch of the samples ``indices`` in the form of :mod:`mgpu_pipe.objectives.reranker`."""
        start, length, _ = self._texts.ranges(indices)
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
        template = self.template
        before, after = template.alone
        room = self._texts.prepared.seq_len - template.specials
        query_length, document_length = (length - before - after).tolist()
        first, second = kept_tokens(query_length, document_length, room)
        query, document = (
            self._texts.tokens[begin : begin + tokens]
            for begin, tokens in zip((start + before).tolist(), (first, second), strict=True)
        )
        ids = np.concatenate([template.before, query, template.between, document, template.after]).astype(np.int64)
        kind = template.first_kind
        return ids, len(ids) if kind is None else len(template.before) + first + kind


def loss_terms(there: NDArray[np.bool_], loss: Loss) -> NDArray[np.bool_]:
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
