"""Encodes all documents of a source: in this process, or in a pool of processes that end with it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TypeVar

import numpy as np

from mgpu_pipe.data.ordered_work import work_in_order
from mgpu_pipe.data.text.cut_texts import EncodedPiece, Piece, cut, join
from mgpu_pipe.data.text.document_encoder import (
    PARALLELISM,
    PIECES,
    EncodedBatch,
    Encoder,
    EncoderSpec,
    library_threads,
)
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.heldout_split import document_hash

# A batch is large compared to the cost of sending it to a process, and small compared to memory.
_BATCH_CHARACTERS = 1 << 18
_BATCH_DOCUMENTS = 1024
# Below this size a process pool costs more time than it saves.
_POOL_FROM_CHARACTERS = 4 << 20
_BATCHES_IN_FLIGHT = 4
_NO_LENGTHS, _NO_HASHES = np.zeros(0, np.int64), np.zeros(0, np.uint64)
T = TypeVar("T")


@dataclass
class _Work:
    """Work items of encoding: batches of about 256 Ki characters, and pieces of longer documents."""

    spec: EncoderSpec
    documents: Iterable[Document]
    long: deque[Document] = field(default_factory=deque)
    """Documents whose pieces are being encoded."""

    def __iter__(self) -> Iterator[list[Document] | Piece]:
        batch: list[Document] = []
        characters = 0
        for document in self.documents:
            long = self._is_cut(document)
            if batch and (long or characters + document.length > _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS):
                yield batch
                batch, characters = [], 0
            if long:
                self.long.append(document)
                yield from cut(document.body, PIECES)
                continue
            batch.append(document)
            characters += document.length
        if batch:
            yield batch

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder of this process."""
        return Encoder(self.spec)

    @cached_property
    def ends(self) -> tuple[list[int], list[int]] | None:
        return self.encoder.special_ends()

    def _is_cut(self, document: Document) -> bool:
        text_only = (
            document.tokens is None and self.spec.chat_template is None and not (self.spec.pairs or self.spec.groups)
        )
        return text_only and document.length > PIECES.piece + PIECES.overlap and self.ends is not None

    def batches_of(self, encoded: Iterator[EncodedBatch | EncodedPiece]) -> Iterator[EncodedBatch]:
        """Yields the batches, with the tokens of long documents among them."""
        for batch in encoded:
            if isinstance(batch, EncodedBatch):
                yield batch
            else:
                yield from self._long_document(_pieces_of(batch, self.long[0].length, encoded))

    def _long_document(self, pieces: Iterator[EncodedPiece]) -> Iterator[EncodedBatch]:
        document, dtype, eos = self.long[0], self.spec.dtype, self.spec.eos_token_id
        assert self.ends is not None

        def again(start: int, end: int) -> EncodedPiece:
            return self.encoder.encode_piece(Piece(document.body[start:end], start))

        count, last, done, length = 0, -1, 0, document.length
        before, after = (np.array(ids, np.uint32) for ids in self.ends)
        for ids, end in chain([(before, 0)], join(pieces, again, length, PIECES), [(after, length)]):
            count, last = count + len(ids), int(ids[-1]) if len(ids) else last
            share = document.size * end // length - done
            done += share
            yield EncodedBatch(ids.astype(dtype), _NO_LENGTHS, _NO_HASHES, None, share)
        rest = [] if last == eos else [eos]
        hashes = np.array([document_hash(document.split_key)], np.uint64)
        lengths = np.array([count + len(rest)], np.int64)
        self.long.popleft()
        yield EncodedBatch(np.array(rest, dtype), lengths, hashes, None, 0)


def _pieces_of(
    first: EncodedPiece, length: int, encoded: Iterator[EncodedBatch | EncodedPiece]
) -> Iterator[EncodedPiece]:
    """Yields the encoded pieces of one document of ``length`` characters."""
    piece: EncodedBatch | EncodedPiece = first
    while isinstance(piece, EncodedPiece):
        yield piece
        if piece.end == length:
            return
        piece = next(encoded)


def encode_all(spec: EncoderSpec, documents: Iterable[Document], workers: int) -> Iterator[EncodedBatch]:
    """Encodes ``documents`` in order.

    It uses ``workers`` processes (spawned, not forked) if there is enough text; memory holds a few batches a process.

    Raises:
        DataError: a document is broken.
        WorkerError: a process was killed.
    """
    work = _Work(spec, documents)
    waiting = iter(work)
    head: list[list[Document] | Piece] = []
    characters = 0
    if workers > 1:
        for item in waiting:
            head.append(item)
            characters += len(item.text) if isinstance(item, Piece) else sum(document.length for document in item)
            if characters >= _POOL_FROM_CHARACTERS:
                break
    in_pool = characters >= _POOL_FROM_CHARACTERS
    encode = _encode_in_pool if in_pool else _encode_here
    yield from work.batches_of(encode(work, chain(_pop_all(head), waiting), workers))


def _pop_all(items: list[T]) -> Iterator[T]:
    """Yields the items and removes them from the list."""
    items.reverse()
    while items:
        yield items.pop()


def _encode_here(work: _Work, items: Iterable[list[Document] | Piece], _: int) -> Iterator[EncodedBatch | EncodedPiece]:
    for item in items:
        with library_threads(False):
            encoded = work.encoder.encode(item)
        yield encoded


def _encode_in_pool(
    work: _Work, items: Iterable[list[Document] | Piece], workers: int
) -> Iterator[EncodedBatch | EncodedPiece]:
    return work_in_order(
        items,
        workers,
        _batch_encoder,
        (work.spec,),
        ahead=_BATCHES_IN_FLIGHT,
        what="a tokenising process died (killed, or out of memory): use fewer with data.tokenize_workers=1",
    )


def _batch_encoder(spec: EncoderSpec) -> Callable[[list[Document] | Piece], EncodedBatch | EncodedPiece]:
    """Builds the encoder in a pool's process, which uses one core."""
    os.environ[PARALLELISM] = "false"
    return Encoder(spec).encode
