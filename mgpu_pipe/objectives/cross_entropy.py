"""Cross-entropy of a linear head over a large vocabulary without the whole logits.

Where the head's vocabulary is cut over ranks, each computes the logits of its rows of it, and they are never gathered.
What the softmax needs of the other ranks is two numbers a token: the log of their sums of exponentials, and the
target's logit from the one that holds it (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.kernels.softmax import fuses, gradient_, normaliser_and_target
from mgpu_pipe.objectives.head_chunks import over_chunks, rows_of, summed
from mgpu_pipe.parallel.tensor_collectives import all_gather_parts
from mgpu_pipe.parallel.vocabulary import VocabularyShard


class Labels:
    """The cross-entropies of labels, ``(tokens,)`` int64, from chunks of their logits.

    Args:
        shard: which rows of the vocabulary the logits are of; None for all.
        fused: whether the compiled kernels are used, which take logits of any type.
    """

    def __init__(self, labels: torch.Tensor, shard: VocabularyShard | None, fused: bool = False) -> None:
        self._labels, self._shard, self._fused = labels, shard, fused

    def losses(self, rows: slice, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of ``rows``, each (rows, 1): the losses, 0 where a label is ``IGNORE_INDEX``; the softmax's normalisers."""
        index, held, valid = self._located(rows)
        normaliser, of_target = normaliser_and_target(logits, index, self._fused)
        if self._shard is not None:
            normaliser, of_target = over_shards(normaliser, of_target.masked_fill(~held, 0.0), self._shard)
        return torch.where(valid, normaliser - of_target, 0.0), normaliser

    def gradient_(self, rows: slice, logits: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
        """The gradient of the sum of the losses for ``logits``, in their memory."""
        return gradient_(logits, normaliser, *self._located(rows), self._fused)

    def _located(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each (rows, 1): the labels' columns of the logits, which of them are there, and which count."""
        labels = self._labels[rows].unsqueeze(1)
        valid = labels != IGNORE_INDEX
        index, held = (labels.clamp_min(0), valid) if self._shard is None else self._shard.locate(labels)
        return index, held, valid


class _CrossEntropy:
    def __init__(self, labels: torch.Tensor, shard: VocabularyShard | None, fused: bool) -> None:
        self._labels = Labels(labels, shard, fused)
        self._sum = torch.zeros((), dtype=torch.float64, device=labels.device)

    def __call__(self, rows: slice, logits: torch.Tensor, wants_gradient: bool) -> torch.Tensor | None:
        losses, normaliser = self._labels.losses(rows, logits)
        self._sum += losses.sum(dtype=torch.float64)
        return self._labels.gradient_(rows, logits, normaliser) if wants_gradient else None

    def total(self) -> torch.Tensor:
        return self._sum


def over_shards(
    normaliser: torch.Tensor, of_target: torch.Tensor, shard: VocabularyShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """The softmax's normaliser and the target's logit over the whole vocabulary, from those of the ranks' rows."""
    of_all = all_gather_parts(torch.stack([normaliser, of_target]), shard.group)
    return torch.logsumexp(of_all[:, 0], dim=0), of_all[:, 1].sum(0)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk_tokens: int | str = "auto",
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """Sum of the cross-entropies of ``hidden @ weight.T + bias`` against ``labels``.

    With a ``shard`` this is a collective call of its group, one all-gather of ``2 * rows`` floats a rank for every
    chunk; the loss is the same on every rank, and the gradient of ``hidden`` is this rank's part of a sum over them.

    Args:
        hidden: ``(..., width)``.
        weight: ``(vocabulary, width)``, or this rank's rows of it; bias of that length, or None.
        labels: ``(...)`` int64 in the whole vocabulary; ``IGNORE_INDEX`` rows count nothing.
        chunk_tokens: rows of logits at once; see :func:`mgpu_pipe.objectives.head_chunks.chunk_rows`.
        shard: which rows of the vocabulary ``weight`` holds; None for all.

    Returns:
        A float64 scalar.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows = rows_of(chunk_tokens, weight, len(flat), shard)
    fused = bias is None and fuses(rows, weight)
    return summed(flat, weight, bias, rows, _CrossEntropy(labels.reshape(-1), shard, fused), as_they_are=fused)


def logits_token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of every label from whole ``logits`` ``(..., vocabulary)``; fp32 of shape (labels,)."""
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), ignore_index=IGNORE_INDEX, reduction="none"
    )


def logits_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Their sum, a float64 scalar."""
    return logits_token_losses(logits, labels).sum(dtype=torch.float64)


@torch.no_grad()
def correct_predictions(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk_tokens: int | str = "auto",
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """Which labels have the largest logit, of their shape; arguments, and what is collective, as in
    :func:`linear_cross_entropy`."""
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    right = torch.zeros_like(wanted, dtype=torch.bool)

    def compare(rows: slice, logits: torch.Tensor, wants_gradient: bool) -> None:
        value, token = logits.max(1)
        if shard is not None:
            of_all = all_gather_parts(torch.stack([value.double(), (token + shard.start).double()]), shard.group)
            token = of_all[:, 1].gather(0, of_all[:, 0].argmax(0, keepdim=True))[0].long()
        right[rows] = (token == wanted[rows]) & (wanted[rows] != IGNORE_INDEX)

    over_chunks(flat, weight, bias, rows_of(chunk_tokens, weight, len(flat), shard), compare)
    return right.view(labels.shape)
