"""Encodes conversations as token ids, cut where their answers begin."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
        """Encodes ``text``; its answers begin at the sorted characters ``starts``."""
        ids, firsts, crossed, begin = list[int](), list[int](), False, 0
        piece = self._encoded(text)
        for start in starts:
            cut = self._cut(text, start, begin, piece)
            if cut is not None:
                crossed = crossed or any(first < start < end for first, end in piece[1])
                ids += cut[0]
                firsts += [max(first, begin) for first, _ in cut[1]]
                begin, piece = start, self._encoded(text, start)
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
        prompt = self._prompt(text[first:start]) if prefix or not begin else self._encoded(text[:start], begin)
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
            known = self._encoded(text)
            if len(text) <= _CACHED_CHARACTERS and len(self._prompts) < _CACHED:
                self._prompts[text] = known
        return known

    def _encoded(self, text: str, begin: int = 0) -> _Piece:
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
