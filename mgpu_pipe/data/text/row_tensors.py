"""Rows of text as tensors: preference pairs, pairs of source and target, groups of texts, and labelled texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.document_encoder import TRAINED
from mgpu_pipe.data.text.token_store import TokenStore, load_array

if TYPE_CHECKING:
    from mgpu_pipe.data.text.labels import PreparedLabelled
    from mgpu_pipe.data.text.pairs import Pairs
    from mgpu_pipe.data.text.prepare_embedding_pairs import PreparedTextGroups, Texts


@dataclass(frozen=True)
class PreferenceSamples:
    """Preference pairs of one split, a :class:`mgpu_pipe.data.samples.SampleSet`."""

    store: TokenStore
    start: NDArray[np.int64]
    """Position of each pair in the token file, (pairs,)."""
    chosen: NDArray[np.int64]
    """Tokens of each chosen conversation; the rejected one follows it."""
    length: NDArray[np.int64]
    """Tokens of both conversations."""
    seq_len: int
    padding_token_id: int
    reopen: Callable[[], SampleSet]
    """Opens the pairs in another process, which maps the files itself."""
    margins: NDArray[np.float64] | None = None
    """By how much the chosen answer of each pair is better, (pairs,); None where no objective reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reopen, ()

    def __len__(self) -> int:
        return len(self.start)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return len(indices)

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * self.seq_len

    def padding(self, indices: NDArray[np.int64]) -> int:
        return self.positions(indices) - int(self.length[indices].sum())

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Batch of the pairs ``indices`` as int64 tensors, in the form of :mod:`mgpu_pipe.objectives.dpo`."""
        assert self.store.loss_mask is not None
        place = np.arange(self.seq_len + 1)
        chosen, length = self.chosen[indices][:, None], self.length[indices][:, None]
        positions = self.start[indices][:, None] + place
        inside = place < length
        ids = np.where(inside, self.store.tokens.take(positions, mode="clip").astype(np.int64), self.padding_token_id)
        trained = inside & (self.store.loss_mask.take(positions, mode="clip") & TRAINED != 0) & (place != chosen)
        document_start = np.where(place < chosen, 0, np.where(inside, chosen, length))
        arrays = {
            "input_ids": ids[:, :-1],
            "labels": np.where(trained, ids, IGNORE_INDEX)[:, 1:],
            "position_ids": (place - document_start)[:, :-1],
            "rejected": (inside & (place >= chosen)).astype(np.int64)[:, :-1],
        }
        tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}
        return {**tensors, "pair": torch.from_numpy(indices.copy())}


@dataclass(frozen=True)
class PairSamples:
    """Pairs of one split, padded to the same lengths, a :class:`mgpu_pipe.data.samples.SampleSet`.

    A longer text is cut; the end-of-sequence token replaces its last token.
    """

    store: TokenStore
    pairs: Pairs
    lengths: tuple[int, int]
    """Lengths of padded sources and targets."""
    padding_token_id: int
    """Padding of sources: the end-of-sequence token."""
    reopen: Callable[[], SampleSet]
    """Opens the pairs in another process, which maps the files itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reopen, ()

    def __len__(self) -> int:
        return len(self.pairs)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        """Tokens of the targets, the end-of-sequence tokens included."""
        return int(np.minimum(self.pairs.target_tokens[indices], self.lengths[1]).sum())

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * sum(self.lengths)

    def padding(self, indices: NDArray[np.int64]) -> int:
        sources = np.minimum(self.pairs.source_tokens[indices], self.lengths[0])
        return self.positions(indices) - int(sources.sum()) - self.valid_units(indices, indices)

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Batch of the pairs ``indices`` as int64 tensors, in the form of :mod:`mgpu_pipe.objectives.seq2seq`."""
        start, (source_room, target_room) = self.pairs.start[indices], self.lengths
        sources, targets = self.pairs.source_tokens[indices], self.pairs.target_tokens[indices]
        ids = self._padded(start, sources, source_room, self.padding_token_id)
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy((np.arange(source_room) < sources[:, None]).astype(np.int64)),
            "labels": torch.from_numpy(self._padded(start + sources, targets, target_room, IGNORE_INDEX)),
        }

    def _padded(
        self, start: NDArray[np.int64], length: NDArray[np.int64], room: int, padding: int
    ) -> NDArray[np.int64]:
        """Pads runs of tokens to rows of ``room`` tokens."""
        place = np.arange(room)
        # Tokens after a run are overwritten; indices after the file's end are clipped.
        rows = self.store.tokens.take(start[:, None] + place, mode="clip").astype(np.int64)
        rows[place >= length[:, None]] = padding
        rows[length > room, -1] = self.padding_token_id
        return rows


class LabelledSamples:
    """One split of labelled texts, a :class:`mgpu_pipe.data.samples.SampleSet`.

    Args:
        reopen: opens the same samples in another process; picklable.
    """

    def __init__(self, prepared: PreparedLabelled, split: Split, reopen: Callable[[], LabelledSamples]) -> None:
        self._reopen, self._seq_len, self._padding = reopen, prepared.seq_len, prepared.padding_token_id
        folder, documents = prepared.folder_of(split), prepared.documents(split)
        store = TokenStore.open(folder)
        self._tokens, self._start = store.tokens, store.offsets[documents]
        self._length = store.offsets[documents + 1] - self._start
        self._second = load_array(folder / "seconds.npy")[documents]
        self._labels = prepared.labels(split)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as ``reopen``: another process maps the files itself."""
        return self._reopen, ()

    def __len__(self) -> int:
        return len(self._labels)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return len(indices)

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * self._seq_len

    def padding(self, indices: NDArray[np.int64]) -> int:
        return self.positions(indices) - int(self._length[indices].sum())

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Batch: ``input_ids`` and ``token_type_ids``, (rows, seq_len); ``lengths`` and ``labels``, (rows,)."""
        place, lengths = np.arange(self._seq_len), self._length[indices]
        inside = place < lengths[:, None]
        ids = self._tokens.take(self._start[indices][:, None] + place, mode="clip").astype(np.int64)
        arrays = {
            "input_ids": np.where(inside, ids, self._padding),
            "token_type_ids": (inside & (place >= self._second[indices][:, None])).astype(np.int64),
            "lengths": lengths,
            "labels": self._labels[indices],
        }
        return {name: torch.from_numpy(value) for name, value in arrays.items()}


class TextGroups:
    """Groups of texts of one split, each text padded or cut to a row, a :class:`mgpu_pipe.data.samples.SampleSet`.

    Args:
        documents: of the split.
        reopen: opens the same samples in another process; picklable.

    Attributes:
        tokens: all texts' tokens, one text after another.
        prepared: sizes of the rows.
    """

    def __init__(
        self,
        store: TokenStore,
        texts: Texts,
        prepared: PreparedTextGroups,
        documents: NDArray[np.int64],
        reopen: Callable[[], SampleSet],
    ) -> None:
        self.tokens, self.prepared, self._texts, self._reopen = store.tokens, prepared, texts, reopen
        self._first = texts.first[documents]
        self._count = texts.first[documents + 1] - self._first

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as ``reopen``: another process maps the files itself."""
        return self._reopen, ()

    def __len__(self) -> int:
        return len(self._first)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return len(indices)

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * self.prepared.texts * self.prepared.seq_len

    def padding(self, indices: NDArray[np.int64]) -> int:
        return self.positions(indices) - int(np.minimum(self.ranges(indices)[1], self.prepared.seq_len).sum())

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Batch of the groups ``indices`` as int64 tensors: ``input_ids``, (rows, texts, seq_len); ``lengths`` and
        ``text_numbers``, (rows, texts), 0 for a text that a sample does not have."""
        (start, length, number), room = self.ranges(indices), self.prepared.seq_len
        place, lengths = np.arange(room), np.minimum(length, room)
        # The last special tokens of a cut text stay at its end.
        skipped = np.where(place >= room - self.prepared.last_tokens, np.maximum(length - room, 0)[..., None], 0)
        ids = self.tokens.take(start[..., None] + place + skipped, mode="clip").astype(np.int64)
        arrays = {
            "input_ids": np.where(place < lengths[..., None], ids, self.prepared.padding_token_id),
            "lengths": lengths,
            "text_numbers": number,
        }
        return {name: torch.from_numpy(value) for name, value in arrays.items()}

    def _positions(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Whether a sample has each text, and the text's number in the store, (rows, texts); 0 for missing texts."""
        place = np.arange(self.prepared.texts)
        there = place < self._count[indices][:, None]
        return there, np.where(there, self._first[indices][:, None] + place, 0)

    def ranges(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Start, length and number of each text, (rows, texts); length and number are 0 for missing texts."""
        texts, (there, positions) = self._texts, self._positions(indices)
        return (
            texts.start[positions],
            np.where(there, texts.length[positions], 0),
            np.where(there, texts.number[positions], 0),
        )


class GroupsWithScores(TextGroups):
    """Groups of texts with scores.

    Args:
        scores: of texts or of samples, as the subclass says.
    """

    def __init__(
        self,
        store: TokenStore,
        texts: Texts,
        prepared: PreparedTextGroups,
        documents: NDArray[np.int64],
        reopen: Callable[[], SampleSet],
        scores: NDArray[np.float64],
    ) -> None:
        super().__init__(store, texts, prepared, documents, reopen)
        self._scores = scores


class TaughtGroups(GroupsWithScores):
    """Queries with documents that a teacher scored; scores of all texts of the token store, those of queries unused."""

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """The batch of :class:`TextGroups`, and ``scores``, float32 (rows, texts - 1), 0 for a text that a sample does
        not have."""
        there, positions = self._positions(indices)
        scores = np.where(there, self._scores[positions], 0.0)[:, 1:].astype(np.float32)
        return {**super().batch(indices, numbers), "scores": torch.from_numpy(np.ascontiguousarray(scores))}


class ScoredGroups(GroupsWithScores):
    """Pairs of sentences with a score for each sample."""

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``lengths`` of the texts, and ``scores``, float32 (rows,)."""
        batch = super().batch(indices, numbers)
        del batch["text_numbers"]
        return {**batch, "scores": torch.from_numpy(self._scores[indices].astype(np.float32))}
