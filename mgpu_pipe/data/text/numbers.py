"""Numbers in digits and in English words, for ``data=number_words``: pairs made by a rule, both ways. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from mgpu_pipe.config.schema import NumbersConfig
from mgpu_pipe.data.order import GlobalOrder

WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
ONES, TENS = WORDS.split(" ")[:20], WORDS.split(" ")[20:]
_KEY = 0x0DD5
"""Keys the choice of numbers; not the run's seed, so that evaluations of different runs are comparable."""


def in_words(number: int) -> str:
    """English cardinal of ``number``, from 0 to 999,999,999: ``nine hundred ninety-nine``."""
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")
    unit, name = next(
        (unit, name) for unit, name in ((10**6, "million"), (1000, "thousand"), (100, "hundred")) if number >= unit
    )
    leading, rest = divmod(number, unit)
    return f"{in_words(leading)} {name}" + (f" {in_words(rest)}" if rest else "")


def drawn_numbers(shape: NumbersConfig) -> Iterator[int]:
    """Distinct numbers of 1 to ``shape.digits`` digits, as many of each length as there are, at most an equal share."""
    left = shape.count
    for digits in range(1, shape.digits + 1):
        first = 10 ** (digits - 1) if digits > 1 else 0
        there = 10**digits - first
        taken = min(there, left // (shape.digits - digits + 1))
        yield from (first + GlobalOrder(_KEY, there).indices(0, taken)).tolist()
        left -= taken


def number_pairs(shape: NumbersConfig) -> Iterator[tuple[str, str, str]]:
    """For each number its digits, then source and target: digits to words, then words to digits."""
    for number in drawn_numbers(shape):
        digits, words = str(number), in_words(number)
        yield digits, digits, words
        yield digits, words, digits
