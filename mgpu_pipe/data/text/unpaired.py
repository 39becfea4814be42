"""Conversations whose last answer is labelled desirable or not; each is a sample (for ``objective=kto``).

In the token file a sample is a conversation with the end-of-sequence token at its end. The loss mask's first bit marks
the answer's tokens, its second bit conversations with an undesirable answer. The prompt decides the held-out split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.document_encoder import REJECTED, TRAINED
from mgpu_pipe.data.text.prepared_rows import PreparedRows, RowSamples, prepare_rows
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.errors import DataError

UNRELATED = "unrelated_"
"""Prefix of the fields with the answer of another sample."""


class UnpairedSamples(RowSamples):
    """Labelled answers of one split."""

    def __init__(self, prepared: PreparedUnpaired, split: Split, reopen: Any) -> None:
        super().__init__(prepared, split, reopen)
        self._prompt = answer_starts(self.store, self.documents) - self.start
        self._desirable = is_desirable(self.store, self.documents).astype(np.int64)
        self._unrelated = unrelated_samples(self.store.hashes[self.documents])

    def arrays(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """int64 arrays in the form of :mod:`mgpu_pipe.objectives.kto`.

        The fields ``unrelated_...`` hold the prompt with the answer of another sample, cut at ``data.seq_len``.
        """
        return {
            **self._rows(indices, indices, ""),
            **self._rows(indices, self._unrelated[indices], UNRELATED),
            "desirable": self._desirable[indices],
            "sample": indices.copy(),
        }

    def _rows(
        self, prompts: NDArray[np.int64], answers: NDArray[np.int64], prefix: str
    ) -> dict[str, NDArray[np.int64]]:
        """Rows of a prompt and an answer each, padded by a separate document."""
        place = np.arange(self.seq_len + 1)
        start, prompt = self.start[prompts][:, None], self._prompt[prompts][:, None]
        answer = (self.start + self._prompt)[answers][:, None]
        length = np.minimum(prompt + (self.length - self._prompt)[answers][:, None], self.seq_len)
        inside = place < length
        positions = np.where(place < prompt, start + place, answer + place - prompt)
        ids = np.where(inside, self.tokens_at(positions), self.padding_token_id)
        trained = inside & (place >= prompt) & self.mask_at(positions, TRAINED)
        arrays = {
            "input_ids": ids[:, :-1],
            "labels": np.where(trained, ids, IGNORE_INDEX)[:, 1:],
            "position_ids": (place - np.where(inside, 0, length))[:, :-1],
        }
        return {prefix + name: value for name, value in arrays.items()}


@dataclass(frozen=True, kw_only=True)
class PreparedUnpaired(PreparedRows):
    """Everything a worker needs to load labelled answers; :func:`prepare_unpaired` makes it."""

    kind: ClassVar[str] = "unpaired"
    what: ClassVar[str] = "conversations"
    samples_class = UnpairedSamples

    num_samples: int = 0
    """Used samples of both splits."""
    num_tokens: int = 0
    """Tokens of all samples of both splits."""
    desirable: int = 0
    """Desirable samples of the training split."""

    def amounts(self) -> list[tuple[int, str]]:
        undesirable = self.train_samples - self.desirable
        parts = [(self.desirable, "desirable to train on"), (undesirable, "undesirable to train on")]
        return [(self.num_samples, "answers"), *parts, (self.num_tokens, "tokens"), *self.left_out()]


def prepare_unpaired(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, progress: Progress | None = None
) -> PreparedUnpaired:
    """Prepares the samples of ``data``, or finds them cached; see :func:`mgpu_pipe.data.text.prepare_text.prepare`.

    Raises:
        ConfigError, DataError: see there; or the training samples are not of both labels.
    """
    known = prepare_rows(PreparedUnpaired, model, data, objective, progress)
    documents, (conversations, tokens) = known.documents("train"), known.count()
    desirable = int(is_desirable(TokenStore.open(known.folder), documents).sum()) if len(documents) else 0
    known = known.with_samples(
        data, [known.seq_len], num_samples=conversations - known.count_long(), num_tokens=tokens, desirable=desirable
    )
    if desirable in (0, len(documents)):
        label = "every training sample is desirable" if desirable else "no training sample is desirable"
        raise DataError(f"data.source={data.source}: {label}; give answers of both labels")
    return known


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
    """Sample whose answer replaces each sample's: the last sample before it with another prompt, in a circle.

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
