"""A long text in the memory of its UTF-8: a str with one emoji takes four bytes for each of its characters."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

_BYTE_ORDER_MARK = "\ufeff".encode()


class LongText:
    """A text that decodes the slice that is asked for.

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
