"""Numbers in words. Oracle: examples by hand."""

from __future__ import annotations

import pytest

from mgpu_pipe.config.schema import NumbersConfig
from mgpu_pipe.data.text.generated import drawn_numbers, in_words, number_pairs


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (99, "ninety-nine"),
        (100, "one hundred"),
        (805, "eight hundred five"),
        (1000, "one thousand"),
        (20_017, "twenty thousand seventeen"),
        (999_999, "nine hundred ninety-nine thousand nine hundred ninety-nine"),
        (3_000_100, "three million one hundred"),
    ],
)
def test_numbers_have_their_words(number: int, words: str) -> None:
    assert in_words(number) == words


def test_every_number_has_words_of_its_own() -> None:
    assert len({in_words(number) for number in range(10_000)}) == 10_000


def test_numbers_are_drawn_once_in_every_length() -> None:
    drawn = list(drawn_numbers(NumbersConfig(count=2000, digits=4)))
    assert len(drawn) == len(set(drawn)) == 2000
    lengths = [sum(len(str(number)) == digits for number in drawn) for digits in range(1, 5)]
    assert lengths == [10, 90, 900, 1000], "short numbers are all there"
    assert drawn == list(drawn_numbers(NumbersConfig(count=2000, digits=4)))


def test_a_number_gives_a_pair_each_way() -> None:
    pairs = list(number_pairs(NumbersConfig(count=3, digits=1)))
    for there, back in zip(pairs[::2], pairs[1::2], strict=True):
        assert there[0] == back[0] == there[1] == back[2] and there[2] == back[1] == in_words(int(there[0]))
