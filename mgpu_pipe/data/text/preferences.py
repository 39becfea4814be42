"""Preferences: pairs of two answers to one prompt, and single answers labelled desirable or not (``objective=kto``).

In the token file a pair is a document: the conversation with the chosen answer, then that with the rejected one, each
with the end-of-sequence token at its end. The loss mask's first bit marks the answers' tokens, its second bit the
second conversation. The prompt decides the held-out split. Pairs of equal conversations teach nothing, and a
cut would change pairs longer than ``data.seq_len``: both are counted and left out, unless ``data.on_too_long=refuse``.
Objectives with margins read a column ``margin``: by how much the chosen answer is better.

An unpaired sample is a conversation with the end-of-sequence token at its end; the loss mask's second bit marks
conversations with an undesirable answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.bad_samples import LengthLimit
from mgpu_pipe.data.cache import Progress, build_once
from mgpu_pipe.data.files import FIX
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.document_encoder import REJECTED, TRAINED
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.notes import Notes
from mgpu_pipe.data.text.prepared_rows import PreparedRows, RowSamples, open_values, prepare_rows, prepare_values
from mgpu_pipe.data.text.token_store import TokenStore, load_array, save_array
from mgpu_pipe.errors import DataError

_LENGTHS, _EQUAL = "chosen_lengths.npy", "equal.npy"
MARGIN, MARGINS = "margin", "margins"
"""Column of a pair's margin; name of the margins next to a token store."""
SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen_rating", "rejected_rating"))
"""Columns of both answers' scores in published sets."""


class PreferenceSamples(RowSamples):
    """Preference pairs of one split.

    Attributes:
        chosen: tokens of each chosen conversation, (pairs,); the rejected one follows it.
        margins: by how much the chosen answer of each pair is better, (pairs,); None where no objective reads it.
    """

    def __init__(self, prepared: PreparedPreferences, split: Split, reopen: Any) -> None:
        super().__init__(prepared, split, reopen)
        self.chosen = load_array(_halves(self.folder) / _LENGTHS)[self.documents]
        self.margins = open_values(self.folder, MARGINS)[self.documents] if prepared.with_margins else None

    def arrays(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """int64 arrays in the form of :mod:`mgpu_pipe.objectives.dpo`."""
        place = np.arange(self.seq_len + 1)
        chosen, length = self.chosen[indices][:, None], self.length[indices][:, None]
        positions, inside = self.start[indices][:, None] + place, place < length
        ids = np.where(inside, self.tokens_at(positions), self.padding_token_id)
        trained = inside & self.is_trained(positions) & (place != chosen)
        document_start = np.where(place < chosen, 0, np.where(inside, chosen, length))
        return {
            "input_ids": ids[:, :-1],
            "labels": np.where(trained, ids, IGNORE_INDEX)[:, 1:],
            "position_ids": (place - document_start)[:, :-1],
            "rejected": (inside & (place >= chosen)).astype(np.int64)[:, :-1],
            "pair": indices.copy(),
        }


@dataclass(frozen=True, kw_only=True)
class PreparedPreferences(PreparedRows):
    """Everything a worker needs to load preference pairs; :func:`prepare_preferences` makes it."""

    kind: ClassVar[str] = "preferences"
    what: ClassVar[str] = "pairs"
    samples_class = PreferenceSamples

    num_pairs: int = 0
    """Used pairs of both splits."""
    num_tokens: int = 0
    """Tokens of all pairs of both splits."""
    equal_pairs: int = 0
    """Pairs left out because their conversations are equal."""
    with_margins: bool = False
    """Whether the pairs' margins are prepared."""

    @classmethod
    def write_facts(cls, folder: Path) -> None:
        build_once(_halves(folder), partial(_find_halves, TokenStore.open(folder)))

    def documents(self, split: Split) -> NDArray[np.int64]:
        documents = super().documents(split)
        return documents[~are_equal(self.folder_of(split))[documents]]

    def limits(self, folder: Path) -> list[tuple[LengthLimit, NDArray[np.int64]]]:
        return [(limit, np.where(are_equal(folder), 0, lengths)) for limit, lengths in super().limits(folder)]

    def amounts(self) -> list[tuple[int, str]]:
        left = [(self.equal_pairs, "equal pairs left out")] if self.equal_pairs else []
        return [(self.num_pairs, "pairs"), (self.num_tokens, "tokens"), *left, *self.left_out()]


def are_equal(folder: Path) -> NDArray[np.bool_]:
    """Which pairs of a token store have equal conversations, (pairs,)."""
    equal: NDArray[np.bool_] = load_array(_halves(folder) / _EQUAL)
    return equal


def prepare_preferences(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, progress: Progress | None = None
) -> PreparedPreferences:
    """Prepares the pairs of ``data`` (:func:`mgpu_pipe.data.text.prepare_text.prepare`); DataError if none is left."""
    with_margins = description(objective.name).reads_margins
    summarize = summarize_margins if with_margins else Notes.summary
    known = prepare_rows(PreparedPreferences, model, data, objective, progress, summarize, with_margins=with_margins)
    if with_margins:
        prepare_values(data, known, MARGINS, margins_of, progress)
    equal = sum(int(are_equal(folder).sum()) for folder in known.folders)
    pairs, tokens = known.count()
    return known.with_samples(
        data,
        [known.seq_len],
        also=f"{equal} pairs are equal, ",
        num_pairs=pairs - equal - known.count_long(),
        num_tokens=tokens,
        equal_pairs=equal,
    )


def _halves(folder: Path) -> Path:
    """Folder next to a token store with facts about its pairs."""
    return folder.with_name(f"{folder.name}.halves")


def summarize_margins(notes: Notes) -> str:
    """Summary of the notes for an objective that reads margins: how scores, which it does not read, become some."""
    unused = {name: origin for name, origin in notes.unused.items() if name != MARGIN}
    said = replace(notes, unused=unused).summary()
    for chosen, rejected in SCORES:
        if unused.keys() >= {chosen, rejected} and len(unused) == len(notes.unused):
            return f"{said}; to train by these scores, add a column '{MARGIN}', {chosen} less {rejected}"
    return said


def margins_of(documents: Iterable[Document]) -> list[float]:
    """Margin of each pair, all 0 if no row has one; DataError if only some have, or one is not finite."""
    margins, first = list[float](), None
    for document in documents:
        value = json.loads(document.text).get(MARGIN)
        first = value if not margins else first
        if (value is None) is not (first is None):
            raise DataError(f"{document.origin}: only some rows have a column '{MARGIN}'; {FIX}")
        try:
            margins.append(0.0 if value is None else float(value))
        except (TypeError, ValueError):
            margins.append(math.nan)
        if not math.isfinite(margins[-1]):
            raise DataError(f"{document.origin}: column '{MARGIN}' holds {value!r}, not a number; {FIX}")
    return margins


def _find_halves(store: TokenStore, out: Path) -> dict[str, Any]:
    """Writes the lengths of the chosen conversations, and which pairs are equal."""
    assert store.loss_mask is not None
    start, end = store.offsets[:-1], store.offsets[1:]
    rejected = np.add.reduceat(store.loss_mask & REJECTED != 0, start, dtype=np.int64)
    chosen = end - start - rejected
    equal = chosen == rejected
    for pair in np.flatnonzero(equal):
        first, second = np.split(store.tokens[start[pair] : end[pair]], 2)
        equal[pair] = np.array_equal(first, second)
    save_array(out / _LENGTHS, chosen)
    save_array(out / _EQUAL, equal)
    return {"pairs": len(chosen), "equal": int(equal.sum())}


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
        """int64 arrays of :mod:`mgpu_pipe.objectives.kto`; ``unrelated_...`` have another sample's answer, cut at
        ``data.seq_len``."""
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
        trained = inside & (place >= prompt) & self.is_trained(positions)
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
    """Prepares the samples (:func:`mgpu_pipe.data.text.prepare_text.prepare`); DataError unless both labels are
    there."""
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
    """Sample whose answer replaces each one's: the last before it (in a circle) with another of ``prompts``,
    (samples,), like TRL."""
    places = np.arange(len(prompts))
    begins = prompts != np.roll(prompts, 1)
    if not begins.any():
        return np.roll(places, 1)
    latest = np.maximum.accumulate(np.where(begins, places, -1))
    latest[latest < 0] = latest[-1]
    return (latest - 1) % len(prompts)
