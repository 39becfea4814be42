"""Documents, a repeatable stream of them, and long texts in the memory of their UTF-8."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from mgpu_pipe.data.bad_samples import OR_SKIP, Fault
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_BYTE_ORDER_MARK = "\ufeff".encode()


class LongText:
    """A text that decodes only the requested slice: a str with an emoji takes four bytes for each of its characters.

    Like a str it is measured and sliced in characters; ``str()`` decodes the whole.
    """

    def __init__(self, raw: Iterable[bytes]) -> None:
        """Keeps a file's content without a byte order mark at its beginning.

        Args:
            raw: UTF-8 in parts of any size; a slice decodes a few parts.

        Raises:
            UndecodableError: not UTF-8.
        """
        self._blocks: list[bytes] = []
        self._starts = [0]
        """First character of each block, then the number of all."""
        offset = 0
        for block in _whole_characters(raw):
            try:
                characters = len(block.decode())
            except UnicodeDecodeError as error:
                raise UndecodableError(error, offset) from error
            is_marked = not offset and block.startswith(_BYTE_ORDER_MARK)
            self._blocks.append(block[len(_BYTE_ORDER_MARK) :] if is_marked else block)
            self._starts.append(self._starts[-1] + characters - is_marked)
            offset += len(block)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, part: slice) -> str:
        start, stop, _ = part.indices(len(self))
        first, end = bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)
        before = self._starts[first]
        return b"".join(self._blocks[first:end]).decode()[start - before : max(stop - before, 0)]

    def __str__(self) -> str:
        return self[:]


class UndecodableError(Exception):
    """A part of a text that is not UTF-8.

    Attributes:
        error: of the part.
        offset: of the part, in bytes of the text.
    """

    def __init__(self, error: UnicodeDecodeError, offset: int) -> None:
        super().__init__(str(error))
        self.error, self.offset = error, offset


def _whole_characters(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Moves the borders of the parts to where a character begins."""
    rest = b""
    for part in parts:
        block = rest + part
        last = range(len(block) - 1, max(len(block) - 5, -1), -1)
        # Without a first byte among four, the block is not UTF-8.
        end = next((offset for offset in last if block[offset] & 0xC0 != 0x80), len(block))
        rest = block[end:]
        if end:
            yield block[:end]
    if rest:
        yield rest


Text = str | LongText


class Document(NamedTuple):
    """One document: a text, a pair of texts, or token ids.

    Attributes:
        body: the text, the JSON line of a conversation, the source of a pair, the JSON list of a group of texts; empty
            for token ids.
        origin: its location, for errors.
        size: its share of the progress.
        target: of a pair.
        key: decides the held-out split; None for the content.
        tokens: token ids.
        loss_mask: 1 where a token counts as a label, of the length of ``tokens``; None where all do.
        fault: why it cannot be used; it then has no content. None for a usable document.
        score: similarity of the texts of a group; None where it is unknown.
        scores: a teacher's scores of the texts of a group after the first; empty without a teacher.
    """

    body: Text
    origin: str
    size: int
    target: str | None = None
    key: str | None = None
    tokens: NDArray[np.int64] | None = None
    loss_mask: NDArray[np.uint8] | None = None
    fault: Fault | None = None
    score: float | None = None
    scores: tuple[float, ...] = ()

    @property
    def text(self) -> str:
        """The body as a str, which takes up to four times the memory of a long one."""
        return str(self.body)

    @property
    def content(self) -> bytes:
        """Content that decides whether two documents are equal."""
        if self.tokens is None:
            return (self.text if self.target is None else f"{self.text}\0{self.target}").encode()
        return self.tokens.tobytes() + (b"" if self.loss_mask is None else self.loss_mask.tobytes())

    @property
    def split_key(self) -> Text | bytes:
        if self.key is not None:
            return self.key
        return self.body if self.tokens is None else self.content

    @property
    def length(self) -> int:
        """Length in characters (of a pair, the source's) or tokens."""
        return len(self.body) if self.tokens is None else len(self.tokens)

    @classmethod
    def from_fault(cls, fault: Fault) -> Document:
        return cls("", fault.origin, fault.size, fault=fault)


@dataclass(frozen=True)
class Source:
    """A repeatable stream of documents."""

    name: str
    identity: str
    """Hash of the content of all documents and of their order."""
    size: int
    """Sum of the documents' ``size``; 0 where it is not known beforehand."""
    documents: Callable[[], Iterator[Document]]
    """Yields the documents, unusable ones included (``fault``)."""
    kind: Literal["text", "chat", "preferences", "unpaired", "pairs", "text_groups", "tokens"] = "text"


def refuse_bad(source: Source) -> Source:
    """Wraps ``source`` to raise a DataError at the first unusable document."""

    def documents() -> Iterator[Document]:
        for document in source.documents():
            if document.fault is not None:
                raise DataError(f"{document.fault.message}{OR_SKIP}")
            yield document

    return replace(source, documents=documents)
