"""Facts about the labelled answers in a token store."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.text.document_encoder import REJECTED, TRAINED
from mgpu_pipe.data.text.token_store import TokenStore


def is_desirable(store: TokenStore, documents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the answers of ``documents`` are desirable, (documents,)."""
    assert store.loss_mask is not None
    desirable: NDArray[np.bool_] = store.loss_mask[store.offsets[documents]] & REJECTED == 0
    return desirable


def answer_starts(store: TokenStore, documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Position in the token file of each document's first trained token, (documents,)."""
    assert store.loss_mask is not None
    trained = np.flatnonzero(store.loss_mask & TRAINED)
    return trained[np.searchsorted(trained, store.offsets[documents])]


def unrelated_samples(prompts: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The sample whose answer stands in for each sample's: the last one before it with another prompt, in a circle.

    Where prompts differ it is the previous sample, as in TRL, which rotates the completions of a batch by one.

    Args:
        prompts: a number for each sample's prompt, (samples,).
    """
    places = np.arange(len(prompts))
    begins = prompts != np.roll(prompts, 1)
    if not begins.any():
        return np.roll(places, 1)
    latest = np.maximum.accumulate(np.where(begins, places, -1))
    latest[latest < 0] = latest[-1]
    return (latest - 1) % len(prompts)
