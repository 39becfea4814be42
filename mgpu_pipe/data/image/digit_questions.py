"""Questions about scikit-learn's handwritten digits, and their answers, written by rules. No torch.

Two neighbours of the data set's order are a pair. Each of the two is asked about alone, both are asked about together,
and every other pair comes with a question that needs no picture. A pair is held out as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mgpu_pipe.data.text.conversations import PLACE

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
READ = ("What digit is this?", "Which number do you see?", "Read this digit.")
PARITY = ("Is this digit even or odd?", "Even or odd?")
TOGETHER = (
    ("Which digits are these?", lambda a, b: f"A {NAMES[a]} and a {NAMES[b]}."),
    ("Which of the two is larger?", lambda a, b: f"{_larger(a, b)}"),
    ("Do the two show the same digit?", lambda a, b: "Yes." if a == b else f"No, a {NAMES[a]} and a {NAMES[b]}."),
)
"""Questions about two digits, and what gives their answers."""


@dataclass(frozen=True)
class Question:
    """A conversation of one question: the JSON of its messages, its pictures, and the pair or clip that it is about."""

    text: str
    pictures: tuple[int, ...]
    pair: str


def _larger(a: int, b: int) -> str:
    return "They are the same." if a == b else f"The {'first' if a > b else 'second'}, a {NAMES[max(a, b)]}."


def digit_questions(digits: Sequence[int]) -> Iterator[Question]:
    """Of all pairs of ``digits``."""
    for number in range(len(digits) // 2):
        places = (2 * number, 2 * number + 1)
        pair, turn = f"pair {number}", number * 7
        for place in places:
            digit = digits[place]
            kind = (READ, PARITY)[(number + place) % 4 == 0]
            answer = f"It is a {NAMES[digit]}." if kind is READ else f"A {NAMES[digit]}, which is {_parity(digit)}."
            yield _question(kind[(turn + place) % len(kind)], answer, (place,), pair)
        asked, answered = TOGETHER[turn % len(TOGETHER)]
        yield _question(asked, answered(*(digits[place] for place in places)), places, pair)
        if number % 2 == 0:
            digit = number // 2 % 9
            yield _question(f"What comes after {NAMES[digit]}?", f"{NAMES[digit + 1].capitalize()}.", (), pair)


def _parity(digit: int) -> str:
    return "odd" if digit % 2 else "even"


def _question(asked: str, answer: str, pictures: tuple[int, ...], pair: str) -> Question:
    return question(f"{PLACE * len(pictures)}{asked}", answer, pictures, pair)


def question(content: str, answer: str, pictures: tuple[int, ...], pair: str) -> Question:
    """That conversation."""
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return Question(json.dumps({"messages": messages}), pictures, pair)
