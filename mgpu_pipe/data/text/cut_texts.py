"""Encodes texts that are cut: a long text in overlapping pieces, a conversation where its answers begin.

The tokenizers library takes 150 bytes of memory per byte of text. So a long text is cut into overlapping pieces. Where
two neighbours agree on tokens and positions around a border between two tokens, the first piece's tokens end and the
second's continue. The result is exact:

- Effects of a piece's edge (a space before the first word, spaces trimmed at the end, half a word, half an added token)
  are far from such a border, or the pieces would disagree there.
- Normalizers and pre-tokenizers read from left to right and look a few characters ahead. From a border in both pieces
  they find the same words.
- A model encodes each word separately, so the border has to be between words. Byte pair encoding may also be cut inside
  a word (a tokenizer like Llama's treats the whole text as one word): its result is right if every two neighbouring
  tokens are, and the two at the border are neighbours in both pieces.

A text without such a border within an overlap is encoded in longer pieces, at worst whole.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.text.conversations import LITERAL

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from mgpu_pipe.data.text.documents import Text


@dataclass(frozen=True)
class PieceSize:
    """Characters of a piece, of the overlap with the next, and of the agreement on each side of a border."""

    piece: int = 1 << 18
    overlap: int = 1 << 11
    agreement: int = 1 << 8


class Piece(NamedTuple):
    """A part of a text, from the character ``start`` on."""

    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class PlacedToken(NamedTuple):
    """A token, its characters ``[start, end)`` of the text, and whether it begins a word."""

    id: int
    start: int
    end: int
    first_of_word: bool


class EncodedPiece(NamedTuple):
    """Tokens of a piece without special tokens, and the placed tokens at both ends."""

    start: int
    end: int
    ids: NDArray[np.uint32]
    head: list[PlacedToken]
    """First tokens."""
    tail: list[PlacedToken]
    """Last tokens."""
    borders: bool
    """Whether any border between tokens is safe; else only one between words."""


def cut(text: Text, size: PieceSize) -> Iterator[Piece]:
    """Yields the pieces of a text in order."""
    start, end = 0, 0
    while end < len(text):
        end = min(start + size.piece, len(text))
        if len(text) - end <= size.overlap:
            end = len(text)
        yield Piece(text[start:end], start)
        start = end - size.overlap


def encode_piece(tokenizer: Tokenizer, piece: Piece, size: PieceSize) -> EncodedPiece:
    """Encodes one piece."""
    encoding = tokenizer.encode(piece.text, add_special_tokens=False)
    ids, offsets, words = encoding.ids, encoding.offsets, encoding.word_ids
    length = len(piece.text)
    count = next((index for index, (start, _) in enumerate(offsets) if start >= size.overlap), len(ids))
    first = next((index for index in range(len(ids), 0, -1) if offsets[index - 1][1] < length - size.overlap), 0)

    def place(begin: int, end: int) -> list[PlacedToken]:
        return [
            PlacedToken(
                ids[index],
                offsets[index][0] + piece.start,
                offsets[index][1] + piece.start,
                index == 0 or words[index] is None or words[index] != words[index - 1],
            )
            for index in range(begin, end)
        ]

    return EncodedPiece(
        piece.start,
        piece.end,
        np.array(ids, np.uint32),
        place(0, count),
        place(first, len(ids)),
        type(tokenizer.model).__name__ == "BPE",
    )


def seam(left: EncodedPiece, right: EncodedPiece, size: PieceSize) -> tuple[int, int] | None:
    """Tokens to take of ``left``, and the first of ``right``, which share characters; None without a safe border."""
    places = {
        (before.end, token.start): index
        for index, (before, token) in enumerate(zip(right.head, right.head[1:], strict=False), 1)
    }
    offset, middle = len(left.ids) - len(left.tail), (right.start + left.end) // 2
    candidates = [
        (not token.first_of_word, abs(token.start - middle), index, places[(before.end, token.start)])
        for index, (before, token) in enumerate(zip(left.tail, left.tail[1:], strict=False), 1)
        if (before.end, token.start) in places and (left.borders or token.first_of_word)
    ]
    for _, _, index, other in sorted(candidates):
        if _agree(left.tail, right.head, index, other, size.agreement):
            return offset + index, other
    return None


def _agree(mine: list[PlacedToken], other: list[PlacedToken], index: int, other_index: int, reach: int) -> bool:
    """Whether two lists have the same tokens for ``reach`` characters before and after a border."""
    border = mine[index].start
    for step in (-1, 1):
        a, b = (index - 1, other_index - 1) if step < 0 else (index, other_index)
        while True:
            if not (0 <= a < len(mine) and 0 <= b < len(other)) or mine[a] != other[b]:
                return False
            if (mine[a].start <= border - reach) if step < 0 else (mine[a].end >= border + reach):
                break
            a, b = a + step, b + step
    return True


def join(
    pieces: Iterable[EncodedPiece], again: Callable[[int, int], EncodedPiece], length: int, size: PieceSize
) -> Iterator[tuple[NDArray[np.uint32], int]]:
    """Yields the tokens of the whole text in parts, each with the approximate character that it reaches.

    Args:
        pieces: of the text, in order.
        again: encodes the characters from a start to an end as one piece.
        length: characters of the text.
    """
    left: EncodedPiece | None = None
    begin, wanted = 0, 0
    for right in pieces:
        if left is None:
            left = right
            continue
        place = None if wanted else seam(left, right, size)
        if place is None:
            # At least twice as long, so that a text without any border costs a few times its length.
            wanted = wanted or 2 * (left.end - left.start)
            if right.end - left.start >= wanted or right.end == length:
                left, wanted = again(left.start, right.end), 0
            continue
        yield left.ids[begin : place[0]], right.start
        left, begin = right, place[1]
    if left is not None:
        yield left.ids[begin:], length


def special_ends(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Special tokens that a tokenizer adds before and after a text; None where they are indistinguishable from it."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    if not plain:
        return None
    for before in range(len(whole) - len(plain) + 1):
        if whole[before : before + len(plain)] == plain:
            return whole[:before], whole[before + len(plain) :]
    return None


_CACHED_CHARACTERS, _CACHED = 200, 1000


class TurnTokens(NamedTuple):
    """Tokens of a conversation.

    Attributes:
        ids: token ids.
        firsts: first character of each token.
        crossed: a token of the whole text would have held the end of a prompt and the beginning of an answer.
    """

    ids: list[int]
    firsts: list[int]
    crossed: bool


_Piece = tuple[list[int], list[tuple[int, int]]]
"""Token ids, and the span of characters of each."""


class TurnEncoder:
    """Encodes whole conversations with one tokenizer, without adding special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()  # sentence-transformers' tokenizer.json cuts and pads to 128 tokens
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._prompts: dict[str, _Piece] = {}
        self._anchor = self._find_anchor()

    def encode(self, text: str, starts: Sequence[int]) -> TurnTokens:
        """Encodes ``text``; its answers begin at the sorted characters ``starts``. No token spans a mark of
        :data:`LITERAL`, which is left out."""
        ids, firsts, crossed, begin = list[int](), list[int](), False, 0
        for end in [*(mark.start() for mark in re.finditer(LITERAL, text)), len(text)]:
            part = self._part(text[:end], [start for start in starts if begin <= start <= end], begin)
            ids, firsts, crossed, begin = ids + part.ids, firsts + part.firsts, crossed or part.crossed, end + 1
        return TurnTokens(ids, firsts, crossed)

    def _part(self, text: str, starts: Sequence[int], begin: int) -> TurnTokens:
        """Encodes ``text`` from the character ``begin`` on."""
        ids, firsts, crossed = list[int](), list[int](), False
        piece = self._encode(text, begin)
        for start in starts:
            cut = self._cut(text, start, begin, piece)
            if cut is not None:
                crossed = crossed or any(first < start < end for first, end in piece[1])
                ids += cut[0]
                firsts += [max(first, begin) for first, _ in cut[1]]
                begin, piece = start, self._encode(text, start)
        return TurnTokens([*ids, *piece[0]], [*firsts, *(max(first, begin) for first, _ in piece[1])], crossed)

    def _cut(self, text: str, start: int, begin: int, piece: _Piece) -> _Piece | None:
        """Tokens of a piece up to ``start``, encoded like the prompt alone; None where the piece has the same."""
        ids, places = piece
        # Text before a special token does not influence the tokens after it.
        prefix, first, last = 0, begin, bisect_right(places, start, key=lambda place: place[1])
        for number in range(last - 1, -1, -1):
            if ids[number] in self._added:
                prefix, first = number, places[number][0]
                break
        prompt = self._prompt(text[first:start]) if prefix or not begin else self._encode(text[:start], begin)
        if ids[prefix : prefix + len(prompt[0])] == prompt[0]:
            return None
        shift = first if prefix or not begin else 0
        return [*ids[:prefix], *prompt[0]], [
            *places[:prefix],
            *((first + shift, end + shift) for first, end in prompt[1]),
        ]

    def _prompt(self, text: str) -> _Piece:
        """Encodes a prompt's end, with a cache: the same end recurs."""
        known = self._prompts.get(text)
        if known is None:
            known = self._encode(text)
            if len(text) <= _CACHED_CHARACTERS and len(self._prompts) < _CACHED:
                self._prompts[text] = known
        return known

    def _encode(self, text: str, begin: int = 0) -> _Piece:
        """Encodes the text from ``begin`` on, as a continuation; spans count in the whole text."""
        anchor = self._anchor if begin else ""
        encoding = self._tokenizer.encode(anchor + text[begin:], add_special_tokens=False)
        shift, skipped = begin - len(anchor), 1 if anchor else 0
        return encoding.ids[skipped:], [(first + shift, end + shift) for first, end in encoding.offsets[skipped:]]

    def _find_anchor(self) -> str:
        """Finds a token after which text is encoded like a continuation; empty if no token is."""
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            if token.special and not (token.lstrip or token.rstrip or token.single_word):
                encoding = self._tokenizer.encode(f"{token.content}a", add_special_tokens=False)
                if encoding.ids[:1] == [number] and encoding.offsets[0] == (0, len(token.content)):
                    return str(token.content)
        return ""
