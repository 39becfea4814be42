"""Metrics of finding: how high held-out queries rank the texts that they are to find among all held-out texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_pipe.objectives.global_batch import Features
from mgpu_pipe.objectives.text_embedding_keys import MOST_RANK

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
