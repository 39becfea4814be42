"""Groups of texts: a query, a text to find and texts not to find; or two sentences with a score. Each is a sample.

In the token file a group is a document: its texts one after another, each with its special tokens. The loss mask
marks the first token of each text. A folder next to the token store has the ranges of the texts and a hash of each,
equal for equal texts. A longer text is cut before its last special tokens, as the tokenizers library does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.bad_samples import LengthLimit
from mgpu_pipe.data.cache import Progress, build_once
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.data.samples import Split, random_of
from mgpu_pipe.data.text.cut_texts import special_ends
from mgpu_pipe.data.text.pair_template import pair_template
from mgpu_pipe.data.text.prepared_rows import PreparedRows, RowSamples, prepare_rows
from mgpu_pipe.data.text.token_store import TokenStore, load_array, save_array
from mgpu_pipe.data.text.tokenizer_folder import plain_tokenizer
from mgpu_pipe.errors import ConfigError

_FIRST_TEXTS, _STARTS, _HASHES, _LENGTHS = "first_texts.npy", "starts.npy", "hashes.npy", "lengths.npy"


@dataclass(frozen=True)
class Texts:
    """Texts of the documents of a token store.

    Attributes:
        first: number of each document's first text, and the number of texts, (documents + 1,).
        start: position of each text in the token file, (texts,).
        length: tokens of each text, (texts,).
        number: above 0, equal for equal texts, (texts,), int64.
    """

    first: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    number: NDArray[np.int64]

    @classmethod
    def open(cls, folder: Path) -> Texts:
        """Maps the ranges of a token store's texts into memory."""
        return cls(*(load_array(_texts(folder) / name) for name in (_FIRST_TEXTS, _STARTS, _LENGTHS, _HASHES)))

    @property
    def most(self) -> int:
        """Largest number of texts in a document."""
        return int(np.diff(self.first).max())

    def longest_rows(self, more_tokens: int | None) -> NDArray[np.int64]:
        """Tokens of each document's longest row, (documents,); ``more_tokens``: see :class:`PreparedTextGroups`."""
        queries, lengths = self.first[:-1], self.length
        if more_tokens is not None:
            lengths = lengths + np.repeat(lengths[queries], np.diff(self.first)) + more_tokens
            lengths[queries] = 0  # they are no rows
        longest: NDArray[np.int64] = np.maximum.reduceat(lengths, queries)
        return longest


class TextGroups(RowSamples):
    """Groups of texts of one split, each text padded or cut to a row.

    Attributes:
        prepared: sizes of the rows.
    """

    def __init__(self, prepared: PreparedTextGroups, split: Split, reopen: Any) -> None:
        super().__init__(prepared, split, reopen)
        self.prepared, self._texts = prepared, Texts.open(self.folder)
        self._first = self._texts.first[self.documents]
        self._count = self._texts.first[self.documents + 1] - self._first

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * self.prepared.texts * self.seq_len

    def padding(self, indices: NDArray[np.int64]) -> int:
        return self.positions(indices) - int(np.minimum(self.ranges(indices, indices)[1], self.seq_len).sum())

    def arrays(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """int64 arrays: ``input_ids``, (rows, texts, seq_len); ``lengths`` and ``text_numbers``, (rows, texts), 0 for a
        text that a sample does not have."""
        (start, length, number), room = self.ranges(indices, numbers), self.seq_len
        place, lengths = np.arange(room), np.minimum(length, room)
        # The last special tokens of a cut text stay at its end.
        skipped = np.where(place >= room - self.prepared.last_tokens, np.maximum(length - room, 0)[..., None], 0)
        ids = self.tokens_at(start[..., None] + place + skipped)
        return {
            "input_ids": np.where(place < lengths[..., None], ids, self.padding_token_id),
            "lengths": lengths,
            "text_numbers": number,
        }

    def there(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether a sample has each text, (rows, texts)."""
        counts = self._count[indices] + self.prepared.random_negatives
        return np.arange(self.prepared.texts) < counts[:, None]

    def places(
        self, indices: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Whether a sample has each text, and the text's number in the store, (rows, texts); 0 for missing texts."""
        there = self.there(indices)
        return there, np.where(there, self._first[indices][:, None] + np.arange(self.prepared.texts), 0)

    def ranges(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Start, length and number of each text, (rows, texts); length and number are 0 for missing texts."""
        texts, (there, places) = self._texts, self.places(indices, numbers)
        return texts.start[places], np.where(there, texts.length[places], 0), np.where(there, texts.number[places], 0)


class DrawnGroups(TextGroups):
    """Queries with texts drawn at random from all documents of the split, after the texts of the row.

    Draws depend on the seed and the sample's number in the run; those of held-out samples are the same in every run. A
    draw is no text of the row and no positive of a row with the same query.
    """

    def __init__(self, prepared: PreparedTextGroups, split: Split, reopen: Any, seed: int) -> None:
        super().__init__(prepared, split, reopen)
        self._seed, number = seed, self._texts.number
        is_here = np.zeros(len(self._texts.first) - 1, np.bool_)
        is_here[self.documents] = True
        is_document = np.repeat(is_here, np.diff(self._texts.first))
        is_document[self._texts.first[:-1]] = False  # queries
        documents = np.flatnonzero(is_document)
        self._contents, unique = np.unique(number[documents], return_index=True)
        self._corpus = documents[unique]
        pairs = np.unique(np.stack([number[self._first], number[self._first + 1]], 1), axis=0)
        self._queries, self._positives = pairs[:, 0], pairs[:, 1]

    def fewest_others(self) -> int:
        """Number of documents that every query of the split can draw from, at least."""
        queries = self._texts.number[self._first]
        positives = np.searchsorted(self._queries, queries, "right") - np.searchsorted(self._queries, queries)
        return len(self._corpus) - int((positives + self._count - 2).max(initial=0))

    def places(
        self, indices: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        there, places = super().places(indices, numbers)
        for row, (index, number) in enumerate(zip(indices.tolist(), numbers.tolist(), strict=True)):
            end = int(self._count[index])
            places[row, end : end + self.prepared.random_negatives] = self._draw(index, number)
        return there, places

    def _draw(self, index: int, number: int) -> NDArray[np.int64]:
        """Numbers of the drawn texts in the store, (random_negatives,)."""
        first, count = self._first[index], self.prepared.random_negatives
        contents = self._texts.number[first : first + self._count[index]]
        begin, end = (np.searchsorted(self._queries, contents[0], side) for side in ("left", "right"))
        refused = np.concatenate([contents, self._positives[begin:end]])
        candidates = min(count + len(refused), len(self._corpus))
        random = random_of(self._seed if number >= 0 else 0, number)
        choice = random.choice(len(self._corpus), candidates, replace=False)
        return self._corpus[choice[~np.isin(self._contents[choice], refused)][:count]]


@dataclass(frozen=True, kw_only=True)
class PreparedTextGroups(PreparedRows):
    """Everything a worker needs to load groups of texts; :func:`prepare_groups` makes it."""

    what: ClassVar[str] = "pairs"
    auto_rule: ClassVar[str] = "truncate"
    samples_class: ClassVar[type[RowSamples]] = TextGroups

    texts: int = 0
    """Texts of a sample: query, positive, as many negatives as the row with most has, and those drawn at random."""
    random_negatives: int = 0
    last_tokens: int
    """Special tokens at the end of a text, which a cut leaves there."""
    num_pairs: int = 0
    num_texts: int = 0
    num_tokens: int = 0
    on_too_long: str = "truncate"
    more_tokens: int | None = None
    """Tokens of a row of two texts minus those of both texts alone, for a model that reads a query and a document
    together; None where each text is a row."""

    @classmethod
    def write_facts(cls, folder: Path) -> None:
        build_once(_texts(folder), partial(_find_texts, TokenStore.open(folder)))

    def limits(self, folder: Path) -> list[tuple[LengthLimit, NDArray[np.int64]]]:
        texts, joined = Texts.open(folder), self.more_tokens is not None
        lengths = texts.longest_rows(self.more_tokens) if joined else texts.length
        return [(LengthLimit("data.seq_len", self.seq_len, "rows" if joined else "texts"), lengths)]

    def long_documents(self, folder: Path) -> NDArray[np.bool_]:
        return Texts.open(folder).longest_rows(self.more_tokens) > self.seq_len

    def amounts(self) -> list[tuple[int, str]]:
        return [(self.num_pairs, "pairs"), (self.num_tokens, "tokens"), *self.left_out()]


Groups = TypeVar("Groups", bound=PreparedTextGroups)


def prepare_groups(
    kind: type[Groups],
    model: ModelConfig,
    data: DataConfig,
    objective: ObjectiveConfig,
    progress: Progress | None = None,
) -> Groups:
    """Prepares the groups (:func:`mgpu_pipe.data.text.prepare_text.prepare`); DataError if none is left."""
    padding = model_field(model, "pad_token_id")
    own_padding: dict[str, Any] = {"padding_token_id": padding} if isinstance(padding, int) else {}
    known = prepare_rows(kind, model, data, objective, progress, last_tokens=0, **own_padding)
    is_joined, last_tokens = description(objective.name).joins_texts, _last_tokens(known.tokenizer_folder)
    template = pair_template(known.tokenizer_folder) if is_joined else None
    least = last_tokens + 2 if template is None else template.specials + 2
    if known.seq_len < least:
        raise ConfigError("data.seq_len", known.seq_len, f"use at least {least}", "a text has special tokens")
    every, negatives = [Texts.open(folder) for folder in known.folders], getattr(data, "random_negatives", 0)
    pairs, tokens = known.count()
    known = replace(
        known,
        texts=max(texts.most for texts in every) + negatives,
        random_negatives=negatives,
        last_tokens=last_tokens,
        num_pairs=pairs,
        num_texts=sum(len(texts.start) for texts in every),
        num_tokens=tokens,
        more_tokens=None if template is None else template.more_tokens,
    )
    rule, joined = [known.on_too_long] if known.count_long() else [], ["joined"] if is_joined else []
    random = ["random_negatives", negatives] if negatives else []
    return known.with_samples(data, (known.seq_len, known.padding_token_id, *rule, *joined, *random))


def _last_tokens(tokenizer_folder: Path) -> int:
    """Number of special tokens that the tokenizer adds after a text."""
    ends = special_ends(plain_tokenizer(tokenizer_folder))
    return len(ends[1]) if ends else 0


def _texts(folder: Path) -> Path:
    """Folder next to a token store with the ranges of its texts."""
    return folder.with_name(f"{folder.name}.texts")


def _find_texts(store: TokenStore, out: Path) -> dict[str, Any]:
    """Writes where each text begins, its length, and a hash of its tokens."""
    assert store.loss_mask is not None
    start = np.flatnonzero(store.loss_mask)
    ends = np.append(start[1:], len(store.tokens))
    content = (store.tokens[first:end].tobytes() for first, end in zip(start, ends, strict=True))
    hashes = np.fromiter((_number_of(tokens) for tokens in content), np.int64, len(start))
    save_array(out / _FIRST_TEXTS, np.searchsorted(start, store.offsets))
    save_array(out / _STARTS, start)
    save_array(out / _LENGTHS, ends - start)
    save_array(out / _HASHES, hashes)
    return {"texts": len(start)}


def _number_of(content: bytes) -> int:
    """63-bit hash above 0."""
    return max(1, int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1)
