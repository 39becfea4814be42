"""The unigram baseline: how surprising the held-out tokens are to one who knows only token frequencies."""

from __future__ import annotations

from math import exp

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.text.packing import Packs, ranges
from mgpu_pipe.data.text.token_store import TokenStore

# Labels in memory at once.
_CHUNK_TOKENS = 1 << 22


def label_counts(
    store: TokenStore, packs: Packs, vocab_size: int, samples: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """How often each token is a valid label in ``samples`` (all where None); shape ``(vocab_size,)``."""
    if samples is None:
        pieces = np.arange(len(packs.pieces.start))
    else:
        first = packs.offsets[samples]
        pieces = ranges(first, packs.offsets[samples + 1] - first)
    counts = np.zeros(vocab_size, np.int64)
    step = max(1, _CHUNK_TOKENS // int(packs.pieces.length.max(initial=1)))
    for begin in range(0, len(pieces), step):
        some = packs.pieces.take(pieces[begin : begin + step])
        at = ranges(some.start + 1, some.length - 1 + some.continues)
        if store.loss_mask is not None:
            at = at[store.loss_mask[at] != 0]
        counts += np.bincount(store.tokens[at], minlength=vocab_size)
    return counts


def perplexity(
    training: NDArray[np.int64], held_out: TokenStore, packs: Packs, samples: NDArray[np.int64]
) -> float | None:
    """The exponential of the mean negative logarithm of the add-one-smoothed training frequency.

    Args:
        training: count of each token as a training label, shape ``(vocab_size,)``.
        held_out, packs, samples: the held-out samples evaluated.

    Returns:
        The perplexity over their valid labels; None where there are none.
    """
    counts = label_counts(held_out, packs, len(training), samples)
    total = int(counts.sum())
    if not total:
        return None
    log_frequency = np.log(training + 1.0) - np.log(float(training.sum() + len(training)))
    return exp(-float(counts @ log_frequency) / total)
