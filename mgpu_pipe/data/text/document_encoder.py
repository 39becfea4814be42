"""Encodes documents as token ids."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.bad_samples import OR_SKIP, Fault
from mgpu_pipe.data.files import FIX
from mgpu_pipe.data.text.cut_texts import EncodedPiece, Piece, PieceSize, TurnEncoder, encode_piece, special_ends
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.heldout_split import document_hash
from mgpu_pipe.data.text.notes import Notes
from mgpu_pipe.data.text.tokenizer_folder import refuse_library_errors
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    from mgpu_pipe.data.text.answer_finder import Rendered, Span
    from mgpu_pipe.data.text.render_chat import ChatTemplate


PIECES = PieceSize()
TRAINED, REJECTED = 1, 2
"""Bits of the loss mask: the token counts; the token is of a preference pair's second conversation, or of a
conversation whose answer is undesirable."""
PARALLELISM = "TOKENIZERS_PARALLELISM"


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Narrowest of uint16 and uint32 for token ids below ``vocab_size``."""
    if vocab_size <= 1 << 16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


class EncodedBatch(NamedTuple):
    """Tokens of consecutive documents, each with the end-of-sequence token at its end.

    A long document spans several batches; the last one has its length and hash.
    """

    tokens: NDArray[np.unsignedinteger]
    lengths: NDArray[np.int64]
    """Tokens of each document that ends here."""
    hashes: NDArray[np.uint64]
    """:func:`mgpu_pipe.data.text.heldout_split.document_hash` of each document."""
    loss_mask: NDArray[np.uint8] | None
    """1 where a token counts as a label (for preferences and labelled answers also :data:`REJECTED`); None where all
    do."""
    size: int
    """Sum of the documents' sizes, for the progress."""
    notes: Notes | None = None
    """Notes about its documents."""
    usable: NDArray[np.bool_] | None = None
    """Which of the input documents are here; None for all."""


@dataclass(frozen=True)
class EncoderSpec:
    """Settings of an encoding process."""

    tokenizer_file: str
    eos_token_id: int
    vocab_size: int
    chat_template: str | None = None
    """If set, the documents are conversations: JSON lines with a column of messages."""
    messages_column: str = "messages"
    chat_format: str = "auto"
    special_tokens: dict[str, str] = field(default_factory=dict)
    stop_tokens: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    placeholders: tuple[str, ...] = ()
    pairs: bool = False
    """The documents are pairs of source and target; only targets count as labels."""
    preferences: bool = False
    """The conversations are pairs, one with the chosen and one with the rejected answer."""
    unpaired: bool = False
    """The conversations end with an answer that is desirable or not."""
    groups: bool = False
    """The documents are groups of texts; the loss mask marks the first token of each text, and no token is added."""
    skips_bad: bool = False
    """Leave out an unusable document, and count it in the notes."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of a stored token."""
        return token_dtype(self.vocab_size)

    def template(self) -> ChatTemplate | None:
        if self.chat_template is None:
            return None
        from mgpu_pipe.data.text.render_chat import ChatTemplate

        names = (self.special_tokens, self.stop_tokens, self.places, self.placeholders)
        return ChatTemplate(self.chat_template, *names)


class Encoder:
    """Encodes batches of documents as :class:`EncodedBatch`.

    Text gets the special tokens that the tokenizer adds (a BOS, where it has one); a rendered conversation contains its
    own. The end-of-sequence token is appended unless it is already there.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        from tokenizers import Tokenizer

        self._spec = spec
        self._tokenizer = Tokenizer.from_file(spec.tokenizer_file)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = spec.template()
        self._turns: TurnEncoder | None = None
        self._notes = Notes()
        if self._template is not None:
            self._tokenizer.post_processor = None  # it may trim spaces from the tokens' spans
            self._turns = TurnEncoder(self._tokenizer)

    def encode(self, work: list[Document] | Piece) -> EncodedBatch | EncodedPiece:
        """Encodes whole documents or a piece; DataError if one is broken, ModelFolderError if the tokenizer fails on a
        text."""
        return self.encode_piece(work) if isinstance(work, Piece) else self.encode_documents(work)

    def encode_piece(self, piece: Piece) -> EncodedPiece:
        with self._refusing():
            return encode_piece(self._tokenizer, piece, PIECES)

    def special_ends(self) -> tuple[list[int], list[int]] | None:
        """Calls :func:`mgpu_pipe.data.text.cut_texts.special_ends`."""
        return special_ends(self._tokenizer)

    def encode_documents(self, documents: list[Document]) -> EncodedBatch:
        """Encodes usable documents; DataError for others unless :attr:`EncoderSpec.skips_bad`."""
        eos = self._spec.eos_token_id
        usable, pieces, masks = self._pieces(self._whole(documents))
        for index, ids in enumerate(pieces):
            if not self._spec.groups and (not ids or ids[-1] != eos):
                pieces[index] = [*ids, eos]
                if masks:
                    masks[index] = np.append(masks[index], masks[index][-1:] if len(masks[index]) else np.uint8(0))
        lengths = np.array([len(ids) for ids in pieces], dtype=np.int64)
        whole, here = {id(document) for document in usable}, None
        if len(whole) < len(documents):
            here = np.array([id(document) in whole for document in documents], np.bool_)
        return EncodedBatch(
            tokens=np.fromiter(chain.from_iterable(pieces), self._spec.dtype, int(lengths.sum())),
            lengths=lengths,
            hashes=np.array([document_hash(document.split_key) for document in usable], dtype=np.uint64),
            loss_mask=np.concatenate(masks) if masks else None,
            size=sum(document.size for document in documents),
            notes=self._taken_notes(),
            usable=here,
        )

    def _pieces(self, documents: list[Document]) -> tuple[list[Document], list[list[int]], list[NDArray[np.uint8]]]:
        """Encodes usable documents: returns them, their tokens, and their loss masks if they have some."""
        if documents and documents[0].tokens is not None:
            return self._each(documents, self._token_ids)
        if self._spec.pairs:
            eos, pieces, masks = self._spec.eos_token_id, list[list[int]](), list[NDArray[np.uint8]]()
            targets = self._encode_texts([document.target or "" for document in documents])
            for source, target in zip(
                self._encode_texts([document.text for document in documents]), targets, strict=True
            ):
                source, target = _end(source, eos), _end(target, eos)
                pieces.append([*source, *target])
                masks.append((np.arange(len(pieces[-1])) >= len(source)).astype(np.uint8))
            return documents, pieces, masks
        if self._spec.groups:
            return self._each(documents, self._group)
        if self._template is None:
            return documents, self._encode_texts([document.text for document in documents]), []
        if self._spec.unpaired:
            return self._each(documents, self._encode_unpaired)
        return self._each(documents, self._preference if self._spec.preferences else self._conversation)

    def _whole(self, documents: list[Document]) -> list[Document]:
        """Leaves out documents with a fault."""
        for document in documents:
            if document.fault is not None:
                self._leave_out(document.fault)
        return [document for document in documents if document.fault is None]

    def _each(
        self, documents: list[Document], encode: Callable[[Document], tuple[list[int], NDArray[np.uint8] | None]]
    ) -> tuple[list[Document], list[list[int]], list[NDArray[np.uint8]]]:
        usable, pieces, masks = list[Document](), list[list[int]](), list[NDArray[np.uint8]]()
        for document in documents:
            try:
                ids, mask = encode(document)
            except DataError as error:
                self._leave_out(Fault(str(error), document.origin, document.size))
                continue
            usable.append(document)
            pieces.append(ids)
            if mask is not None:
                masks.append(mask)
        return usable, pieces, masks

    def _leave_out(self, fault: Fault) -> None:
        if not self._spec.skips_bad:
            raise DataError(f"{fault.message}{OR_SKIP}")
        self._notes.add_bad(fault)

    def _group(self, document: Document) -> tuple[list[int], NDArray[np.uint8]]:
        texts = self._encode_texts(json.loads(document.text))
        if not all(texts):
            raise DataError(f"{document.origin}: a text has no tokens; {FIX}")
        starts = [np.arange(len(ids)) == 0 for ids in texts]
        return list(chain.from_iterable(texts)), np.concatenate(starts).astype(np.uint8)

    def _preference(self, document: Document) -> tuple[list[int], NDArray[np.uint8]]:
        assert self._template is not None
        both = self._template.preference(document.text, document.origin, self._spec.messages_column)
        halves = [self._ended_conversation(conversation, document.origin) for conversation in both]
        masks = [mask | bit for (_, mask), bit in zip(halves, (0, REJECTED), strict=True)]
        return [token for ids, _ in halves for token in ids], np.concatenate(masks)

    def _encode_unpaired(self, document: Document) -> tuple[list[int], NDArray[np.uint8]]:
        assert self._template is not None
        rendered, desirable = self._template.with_label(document.text, document.origin, self._spec.messages_column)
        ids, mask = self._ended_conversation(rendered, document.origin)
        return ids, mask | np.uint8(0 if desirable else REJECTED)

    def _conversation(self, document: Document) -> tuple[list[int], NDArray[np.uint8]]:
        assert self._template is not None
        column, form = self._spec.messages_column, self._spec.chat_format
        rendered = self._template.conversation(document.text, document.origin, column, form)
        return self._ended_conversation(rendered, document.origin)

    def _taken_notes(self) -> Notes:
        """Takes the notes since the last batch."""
        notes, self._notes = self._notes, Notes()
        if self._template is not None:
            notes.add(self._template.notes)
            self._template.notes = Notes()
        return notes

    def _ended_conversation(self, rendered: Rendered, origin: str) -> tuple[list[int], NDArray[np.uint8]]:
        """Encodes a conversation with its end; returns also which tokens count."""
        assert self._turns is not None
        assert self._template is not None
        with self._refusing():
            ids, firsts, crossed = self._turns.encode(rendered.text, rendered.starts)
        if crossed:
            self._template.notes.add_crossed(origin)
        mask, eos = _span_mask(firsts, rendered.spans), self._spec.eos_token_id
        if ids[-1:] == [eos]:
            return ids, mask
        # Without a token that ends the assistant's last turn, the end of the text ends it.
        ends = len(mask) > 0 and bool(mask[-1]) and not rendered.ended
        return [*ids, eos], np.append(mask, np.uint8(ends))

    def _token_ids(self, document: Document) -> tuple[list[int], NDArray[np.uint8] | None]:
        """Token ids and mask of a document; DataError for an id that the tokenizer lacks."""
        tokens, size = document.tokens, self._spec.vocab_size
        assert tokens is not None
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < size:
            wrong = next(int(token) for token in tokens if not 0 <= token < size)
            raise DataError(f"{document.origin} holds the token id {wrong}; data.tokenizer has ids 0 to {size - 1}")
        return tokens.tolist(), document.loss_mask

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        with self._refusing():
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=True)]

    def _refusing(self) -> AbstractContextManager[None]:
        return refuse_library_errors(f"{self._spec.tokenizer_file}: cannot encode a text")


def _end(ids: list[int], eos: int) -> list[int]:
    return ids if ids and ids[-1] == eos else [*ids, eos]


def _span_mask(firsts: Sequence[int], spans: list[Span]) -> NDArray[np.uint8]:
    """Mask of tokens whose first character is in one of the (sorted, disjoint) spans."""
    if not spans or not firsts:
        return np.zeros(len(firsts), np.uint8)
    first = np.array(firsts, dtype=np.int64)
    starts, ends = np.array(spans, dtype=np.int64).T
    indices = np.searchsorted(starts, first, side="right") - 1
    return ((indices >= 0) & (first < ends[indices])).astype(np.uint8)


@contextmanager
def library_threads(use: bool) -> Iterator[None]:
    """Sets the tokenizers library's threads explicitly, or it warns in every process that is forked later."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "true" if use else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARALLELISM]
        else:
            os.environ[PARALLELISM] = before
