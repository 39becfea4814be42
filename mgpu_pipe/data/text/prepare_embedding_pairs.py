"""Prepares pairs of a query and a text to find, with texts not to find; each pair is a sample.

In the token file a pair is a document: its texts one after another, as the tokenizer gives them alone. The loss mask
marks the first token of each text. A folder next to the token store has the ranges of the texts and a hash of each,
equal for equal texts. A longer text is cut before its last special tokens, as the tokenizers library does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import DataConfig, ObjectiveConfig, RunConfig
from mgpu_pipe.data.bad_samples import LengthLimit, refuse_too_long
from mgpu_pipe.data.cache import Progress, build_once, digest_of, read_manifest
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.notes import notes_of
from mgpu_pipe.data.text.pair_template import pair_template
from mgpu_pipe.data.text.pieces import special_ends
from mgpu_pipe.data.text.prepared_rows import PreparedRows, RowFolders, prepare_rows
from mgpu_pipe.data.text.row_values import open_values, prepare_values
from mgpu_pipe.data.text.token_store import TokenStore, load_array, save_array
from mgpu_pipe.errors import ConfigError, DataError

TEACHER_SCORES = "teacher_scores"
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

    @property
    def most(self) -> int:
        """Texts of the document with most."""
        return int(np.diff(self.first).max())

    def longest_rows(self, more_tokens: int | None) -> NDArray[np.int64]:
        """Tokens of each document's longest row, (documents,).

        Args:
            more_tokens: see :class:`PreparedTextGroups`.
        """
        queries, lengths = self.first[:-1], self.length
        if more_tokens is not None:
            lengths = lengths + np.repeat(lengths[queries], np.diff(self.first)) + more_tokens
            lengths[queries] = 0  # they are no rows
        longest: NDArray[np.int64] = np.maximum.reduceat(lengths, queries)
        return longest


@dataclass(frozen=True, kw_only=True)
class PreparedTextGroups(PreparedRows):
    """Everything a worker needs to load groups of texts; :func:`prepare_groups` makes it."""

    texts: int
    """Texts of a sample: query, positive, and as many negatives as the row with most has."""
    last_tokens: int
    """Special tokens at the end of a text, which a cut leaves there."""
    num_pairs: int
    num_texts: int
    num_tokens: int
    on_too_long: str = "truncate"
    more_tokens: int | None = None
    """Tokens of a row of two texts less those of both alone, for a model that reads a query and a document together;
    None where each text is a row."""

    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> SampleSet:
        from mgpu_pipe.data.text.row_tensors import TextGroups

        folder = self.folder_of(split)
        return TextGroups(TokenStore.open(folder), open_texts(folder), self, self.documents(split), reopen)

    def long_documents(self, folder: Path) -> NDArray[np.bool_]:
        return open_texts(folder).longest_rows(self.more_tokens) > self.seq_len

    def amounts(self) -> list[tuple[int, str]]:
        return [(self.num_pairs, "pairs"), (self.num_tokens, "tokens"), *self.left_out()]


@dataclass(frozen=True, kw_only=True)
class PreparedEmbeddingPairs(PreparedTextGroups):
    """Everything a worker needs to load pairs for embeddings; :func:`prepare_embedding_pairs` makes it."""

    kind: ClassVar[str] = "embedding_pairs"
    has_scores: bool = False
    """Whether rows have a teacher's scores."""

    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> SampleSet:
        if not self.has_scores:
            return super().samples(config, split, reopen)
        from mgpu_pipe.data.text.row_tensors import TaughtGroups

        folder, documents = self.folder_of(split), self.documents(split)
        scores = open_values(folder, TEACHER_SCORES)
        return TaughtGroups(TokenStore.open(folder), open_texts(folder), self, documents, reopen, scores)


Groups = TypeVar("Groups", bound=PreparedTextGroups)


def open_texts(folder: Path) -> Texts:
    """Maps the ranges of a token store's texts into memory."""
    return Texts(*(load_array(_texts(folder) / name) for name in (_FIRST_TEXTS, _STARTS, _LENGTHS, _HASHES)))


def prepare_embedding_pairs(config: RunConfig, progress: Progress | None = None) -> PreparedEmbeddingPairs:
    """Prepares the pairs of ``config``, or finds them cached; see :func:`mgpu_pipe.data.text.prepare_text.prepare`.

    Raises:
        ConfigError, DataError: see there; or no pair is left, or nothing to compare a positive with.
    """
    known, rows = prepare_groups(PreparedEmbeddingPairs, config, progress)
    data, train = config.data, known.train_samples
    if getattr(data, "scores_column", None) is not None:
        prepare_values(config, rows, TEACHER_SCORES, _teacher_scores, progress)
        known = replace(known, has_scores=True)
    if known.more_tokens is not None:
        _require_negatives(known, config.data, config.objective)
        return known
    if known.texts == 2 and 1 in (data.global_batch_size, train):
        reason = "a pair has no text to tell from its positive, so its loss is always 0"
        if train == 1:
            raise DataError(
                f"data.source={data.source}: there is 1 pair to train on: {reason}; give more, or negatives"
            )
        raise ConfigError("data.global_batch_size", 1, "use at least 2, or pairs with negatives", reason)
    return known


def _teacher_scores(documents: Iterable[Document]) -> list[float]:
    """A number for each text of all documents: 0 for a query, the teacher's score for the others."""
    scores: list[float] = []
    for document in documents:
        if not document.scores:
            raise DataError(f"{document.origin}: has no teacher's scores; leave out data.scores_column")
        scores += (0.0, *document.scores)
    return scores


def _require_negatives(known: PreparedEmbeddingPairs, data: DataConfig, objective: ObjectiveConfig) -> None:
    splits: dict[Split, str] = {"train": "to train on", "validation": "held out"}
    for split, which in splits.items():
        pairs = known.documents(split)
        if split == "validation":
            pairs = pairs[known.evaluated_samples()]
        if len(pairs) and np.diff(open_texts(known.folder_of(split)).first)[pairs].max() == 2:
            reason = f"no row {which} has a negative, which objective={objective.name} ranks below the positive"
            fix = "give column 'negative', or add it by mgpu-pipe mine"
            raise DataError(f"data.source={data.source}: {reason}; {fix}")


def prepare_groups(
    kind: type[Groups], config: RunConfig, progress: Progress | None = None
) -> tuple[Groups, RowFolders]:
    """Prepares the groups of ``config``, or finds them cached; returns also their token stores.

    Raises:
        ConfigError, DataError: see :func:`mgpu_pipe.data.text.prepare_text.prepare`; or no group is left.
    """
    data, rows = config.data, prepare_rows(config, progress)
    for folder in rows.names:
        build_once(_texts(folder), partial(_find_texts, TokenStore.open(folder)))
    rule = "truncate" if data.on_too_long == "auto" else data.on_too_long
    every = [open_texts(folder) for folder in rows.names]
    joins = description(config.objective.name).joins_texts
    template = pair_template(rows.tokenizer_folder) if joins else None
    more_tokens = None if template is None else template.more_tokens
    if rule == "refuse":
        for texts in every:
            lengths = texts.length if more_tokens is None else texts.longest_rows(more_tokens)
            refuse_too_long(LengthLimit("data.seq_len", data.seq_len, "rows" if joins else "texts"), lengths)
    padding = model_field(config.model, "pad_token_id")
    last_tokens = _last_tokens(rows.tokenizer_folder)
    least = last_tokens + 2 if template is None else template.specials + 2
    if data.seq_len < least:
        raise ConfigError("data.seq_len", data.seq_len, f"use at least {least}", "a text has special tokens")
    known = kind(
        **{**vars(rows), "padding_token_id": padding if isinstance(padding, int) else rows.padding_token_id},
        seq_len=data.seq_len,
        texts=max(texts.most for texts in every),
        last_tokens=last_tokens,
        num_pairs=sum(len(texts.first) - 1 for texts in every),
        num_texts=sum(len(texts.start) for texts in every),
        num_tokens=sum(int(texts.length.sum()) for texts in every),
        bad_samples=notes_of(map(read_manifest, rows.names)).bad,
        on_too_long=rule,
        more_tokens=more_tokens,
    )
    long = known.count_long()
    train, held_out = (len(known.documents(split)) for split in ("train", "validation"))
    identity = (data.seq_len, known.padding_token_id, *([rule] if long else []), *(["joined"] if joins else []))
    prepared = known.with_counts(
        config.data,
        train,
        held_out,
        f"{long:,} of {known.num_pairs:,} pairs do not fit (data.seq_len={data.seq_len}), {held_out:,} held out",
        too_long_samples=long,
        digest=digest_of(kind.kind, rows.folder.name, rows.fraction, *identity),
        validation_digest=digest_of(rows.held_out_folder.name, *identity) if data.validation_paths else "",
    )
    return prepared, rows


def _last_tokens(tokenizer_folder: Path) -> int:
    """Number of special tokens that the tokenizer adds after a text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ends = special_ends(tokenizer)
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
