"""Documents to token ids: in this process, or in a pool of processes that die with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.ordered_work import work_in_order
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.split import document_hash
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    from mgpu_pipe.data.text.chat import ChatTemplate, Span

# A batch is large against the cost of handing it to a process, and small against memory.
_BATCH_CHARACTERS = 1 << 18
_BATCH_DOCUMENTS = 1024
# Below this much text a process pool costs more time than it saves.
_POOL_FROM_CHARACTERS = 4 << 20
_BATCHES_IN_FLIGHT = 4
TRAINED, REJECTED = 1, 2
"""Bits of the loss mask: of tokens that count, and of those of a preference pair's second conversation."""
_PARALLELISM = "TOKENIZERS_PARALLELISM"


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The narrower of uint16 and uint32 that holds every token id below ``vocab_size``."""
    if vocab_size <= 1 << 16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


class EncodedBatch(NamedTuple):
    """Tokens of consecutive documents, each ended by the end-of-sequence token."""

    tokens: NDArray[np.unsignedinteger]
    lengths: NDArray[np.int64]
    """Tokens of each document."""
    hashes: NDArray[np.uint64]
    """:func:`mgpu_pipe.data.text.split.document_hash` of each document."""
    loss_mask: NDArray[np.uint8] | None
    """1 where a token counts as a label (of preferences: the bits of ``data.text.preferences``); None where all do."""
    size: int
    """Progress: sum of the documents' sizes."""
    odd: int = 0
    """Notes about single conversations, see :class:`~mgpu_pipe.data.text.chat.ChatTemplate`."""
    first_odd: str = ""


@dataclass(frozen=True)
class EncoderSpec:
    """What a process needs to encode."""

    tokenizer_file: str
    eos_token_id: int
    vocab_size: int
    chat_template: str | None = None
    """Makes the documents conversations: JSON lines with a column of messages."""
    messages_column: str = "messages"
    chat_format: str = "auto"
    special_tokens: dict[str, str] = field(default_factory=dict)
    stop_tokens: tuple[str, ...] = ()
    pairs: bool = False
    """The documents are pairs of source and target, whose targets alone count as labels."""
    preferences: bool = False
    """The conversations are pairs, one with the chosen and one with the rejected answer."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Of a stored token."""
        return token_dtype(self.vocab_size)

    def template(self) -> ChatTemplate | None:
        if self.chat_template is None:
            return None
        from mgpu_pipe.data.text.chat import ChatTemplate

        return ChatTemplate(self.chat_template, self.special_tokens, self.stop_tokens)


class Encoder:
    """A tokenizer that turns batches of documents into :class:`EncodedBatch`.

    Text gets the special tokens that the tokenizer itself adds (a BOS, where it has one); a rendered conversation
    holds its own. The end-of-sequence token is appended unless it is there already.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        from tokenizers import Tokenizer

        self._spec = spec
        self._tokenizer = Tokenizer.from_file(spec.tokenizer_file)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = spec.template()

    def encode(self, documents: list[Document]) -> EncodedBatch:
        eos = self._spec.eos_token_id
        odd = 0 if self._template is None else self._template.odd
        pieces: list[list[int]] = []
        masks: list[NDArray[np.uint8]] = []
        if documents[0].tokens is not None:
            for document in documents:
                pieces.append(self._given(document))
                if document.loss_mask is not None:
                    masks.append(document.loss_mask)
        elif self._spec.pairs:
            targets = self._encoded([document.target or "" for document in documents])
            for source, target in zip(self._encoded([document.text for document in documents]), targets, strict=True):
                source, target = _ended(source, eos), _ended(target, eos)
                pieces.append([*source, *target])
                masks.append((np.arange(len(pieces[-1])) >= len(source)).astype(np.uint8))
        elif self._template is None:
            pieces = self._encoded([document.text for document in documents])
        elif self._spec.preferences:
            for document in documents:
                both = self._template.preference(document.text, document.origin, self._spec.messages_column)
                halves = [self._ended_conversation(text, spans) for text, spans in both]
                pieces.append([token for ids, _ in halves for token in ids])
                masks.append(np.concatenate([mask | bit for (_, mask), bit in zip(halves, (0, REJECTED), strict=True)]))
        else:
            for document in documents:
                text, spans = self._template.conversation(
                    document.text, document.origin, self._spec.messages_column, self._spec.chat_format
                )
                ids, mask = self._ended_conversation(text, spans)
                pieces.append(ids)
                masks.append(mask)
        for index, ids in enumerate(pieces):
            if not ids or ids[-1] != eos:
                pieces[index] = [*ids, eos]
                if masks:
                    # Where the assistant spoke last, the end of the text is the end of what it says.
                    ends = bool(len(masks[index])) and bool(masks[index][-1])
                    masks[index] = np.append(masks[index], np.uint8(ends))
        lengths = np.array([len(ids) for ids in pieces], dtype=np.int64)
        return EncodedBatch(
            tokens=np.fromiter(chain.from_iterable(pieces), self._spec.dtype, int(lengths.sum())),
            lengths=lengths,
            hashes=np.array([document_hash(document.split_key) for document in documents], dtype=np.uint64),
            loss_mask=np.concatenate(masks) if masks else None,
            size=sum(document.size for document in documents),
            odd=0 if self._template is None else self._template.odd - odd,
            first_odd="" if self._template is None else self._template.first_odd,
        )

    def _ended_conversation(self, text: str, spans: list[Span]) -> tuple[list[int], NDArray[np.uint8]]:
        """A conversation's tokens with their end, and which of them count."""
        encoding, eos = self._tokenizer.encode(text, add_special_tokens=False), self._spec.eos_token_id
        ids, mask = encoding.ids, _span_mask(encoding.offsets, spans)
        if ids[-1:] == [eos]:
            return ids, mask
        # Where the assistant spoke last, the end of the text is the end of what it says.
        return [*ids, eos], np.append(mask, mask[-1:]) if len(mask) else np.zeros(1, np.uint8)

    def _given(self, document: Document) -> list[int]:
        """Raises:
        DataError: a token id that the tokenizer does not have.
        """
        tokens, size = document.tokens, self._spec.vocab_size
        assert tokens is not None
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < size:
            wrong = next(int(token) for token in tokens if not 0 <= token < size)
            raise DataError(f"{document.origin} holds the token id {wrong}; data.tokenizer has ids 0 to {size - 1}")
        return tokens.tolist()

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=True)]


def _ended(ids: list[int], eos: int) -> list[int]:
    return ids if ids and ids[-1] == eos else [*ids, eos]


def _span_mask(offsets: list[tuple[int, int]], spans: list[Span]) -> NDArray[np.uint8]:
    """1 for every token whose first character lies in one of the (sorted, disjoint) spans."""
    if not spans or not offsets:
        return np.zeros(len(offsets), np.uint8)
    first = np.array(offsets, dtype=np.int64)[:, 0]
    starts, ends = np.array(spans, dtype=np.int64).T
    at = np.searchsorted(starts, first, side="right") - 1
    return ((at >= 0) & (first < ends[at])).astype(np.uint8)


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Consecutive documents in batches of about 256 Ki characters; a longer document is a batch of its own."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        if batch and (characters + document.length > _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS):
            yield batch
            batch, characters = [], 0
        batch.append(document)
        characters += document.length
    if batch:
        yield batch


def encode_all(spec: EncoderSpec, documents: Iterable[Document], workers: int) -> Iterator[EncodedBatch]:
    """Encode ``documents`` in order.

    Uses ``workers`` processes (spawned, not forked) where there is enough text for them; at most a few batches a
    process are in memory.

    Raises:
        DataError: a document is broken.
        WorkerError: a process was killed.
    """
    waiting = batches(documents)
    head: list[list[Document]] = []
    characters = 0
    if workers > 1:
        for batch in waiting:
            head.append(batch)
            characters += sum(document.length for document in batch)
            if characters >= _POOL_FROM_CHARACTERS:
                break
    if characters >= _POOL_FROM_CHARACTERS:
        yield from _encode_in_pool(spec, chain(head, waiting), workers)
        return
    encoder = Encoder(spec)
    for batch in chain(head, waiting):
        with library_threads(False):
            encoded = encoder.encode(batch)
        yield encoded


def _encode_in_pool(spec: EncoderSpec, work: Iterable[list[Document]], workers: int) -> Iterator[EncodedBatch]:
    return work_in_order(
        work,
        workers,
        _batch_encoder,
        (spec,),
        ahead=_BATCHES_IN_FLIGHT,
        what="a tokenising process died (killed, or out of memory): use fewer with data.tokenize_workers=1",
    )


def _batch_encoder(spec: EncoderSpec) -> Callable[[list[Document]], EncodedBatch]:
    """In a pool's process, which takes one core."""
    os.environ[_PARALLELISM] = "false"
    return Encoder(spec).encode


@contextmanager
def library_threads(use: bool) -> Iterator[None]:
    """Let the tokenizers library use its threads, or not.

    Said in so many words, for otherwise it warns in every process that is forked later.
    """
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "true" if use else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before
