"""Numbers read out digit by digit, in two styles: conversations and preference pairs made by a rule. No torch.

``data=spoken_chat`` answers each number in both styles, ``data=spoken_preferences`` prefers whole sentences. Both hold
out the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from mgpu_pipe.config.schema import NumbersConfig
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.numbers import ONES, drawn_numbers


def answers(number: int) -> tuple[str, str]:
    """The number read out in a sentence, and by its words alone: ``It is nine zero seven.`` and ``nine zero seven``."""
    words = " ".join(ONES[int(digit)] for digit in str(number))
    return f"It is {words}.", words


def spoken_documents(source: str, shape: NumbersConfig) -> Iterator[Document]:
    """The JSON lines of ``source``, ``spoken_chat`` or ``spoken_preferences``."""
    for number in drawn_numbers(shape):
        prompt, (sentence, words) = " ".join(str(number)), answers(number)
        if source == "spoken_chat":
            rows = [{"prompt": prompt, "completion": answer} for answer in (sentence, words)]
        else:
            rows = [{"prompt": prompt, "chosen": sentence, "rejected": words}]
        for row in rows:
            yield Document(json.dumps(row), f"data.source={source}: {number}", 1, key=str(number))
