"""One document, and a repeatable stream of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Document(NamedTuple):
    """One document: a text, a pair of texts, or token ids.

    Attributes:
        text: of conversations the JSON line, of pairs the source; empty where there are token ids.
        origin: where it stands, for errors.
        size: its share of the progress.
        target: of pairs.
        key: what the held-out split goes by; None: the content.
        tokens: their ids.
        loss_mask: 1 where a token counts as a label, of the length of ``tokens``; None where all do.
    """

    text: str
    origin: str
    size: int
    target: str | None = None
    key: str | None = None
    tokens: NDArray[np.int64] | None = None
    loss_mask: NDArray[np.uint8] | None = None

    @property
    def content(self) -> bytes:
        """What makes two documents equal."""
        if self.tokens is None:
            return (self.text if self.target is None else f"{self.text}\0{self.target}").encode()
        return self.tokens.tobytes() + (b"" if self.loss_mask is None else self.loss_mask.tobytes())

    @property
    def split_key(self) -> str | bytes:
        if self.key is not None:
            return self.key
        return self.text if self.tokens is None else self.content

    @property
    def length(self) -> int:
        """Characters, of a pair's source, or tokens."""
        return len(self.text) if self.tokens is None else len(self.tokens)


@dataclass(frozen=True)
class Source:
    """A repeatable stream of documents."""

    name: str
    identity: str
    """Hash of the content of all documents and of their order."""
    size: int
    """Sum of the documents' ``size``; 0 where it is not known beforehand."""
    documents: Callable[[], Iterator[Document]]
    kind: Literal["text", "chat", "preferences", "pairs", "tokens"] = "text"
