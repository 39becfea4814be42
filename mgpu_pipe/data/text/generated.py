"""Generated documents: numbers in digits and in English words, and random tokens.

Random tokens serve tests, benchmarks and dry runs of large topologies. Document lengths are log-normal; tokens are
skewed towards small ids (the cube of a uniform number), so that a model has a unigram distribution to learn. Philox
generators keyed by (seed, block of documents) draw everything. The matching tokenizer knows the decimal numbers: token
``i`` reads ``i``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import log

import numpy as np

from mgpu_pipe.config.schema import NumbersConfig, SyntheticConfig
from mgpu_pipe.data.order import GlobalOrder
from mgpu_pipe.data.text.document_encoder import EncodedBatch
from mgpu_pipe.data.text.documents import Document

WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
ONES, TENS = WORDS.split(" ")[:20], WORDS.split(" ")[20:]
_KEY = 0x0DD5
"""Key of the choice of numbers. It is not the run's seed, so evaluations of different runs are comparable."""


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


def draw_numbers(shape: NumbersConfig) -> Iterator[int]:
    """Distinct numbers of 1 to ``shape.digits`` digits: an equal share of each length, or all where there are fewer."""
    left = shape.count
    for digits in range(1, shape.digits + 1):
        first = 10 ** (digits - 1) if digits > 1 else 0
        there = 10**digits - first
        taken = min(there, left // (shape.digits - digits + 1))
        yield from (first + GlobalOrder(_KEY, there).indices(0, taken)).tolist()
        left -= taken


def number_pairs(shape: NumbersConfig) -> Iterator[tuple[str, str, str]]:
    """Yields (digits, source, target) for each number: digits to words, then words to digits."""
    for number in draw_numbers(shape):
        digits, words = str(number), in_words(number)
        yield digits, digits, words
        yield digits, words, digits


def answers(number: int) -> tuple[str, str]:
    """The number in a sentence and in words only: ``It is nine zero seven.`` and ``nine zero seven``."""
    words = " ".join(ONES[int(digit)] for digit in str(number))
    return f"It is {words}.", words


def spoken_documents(source: str, shape: NumbersConfig) -> Iterator[Document]:
    """Yields the JSON lines of ``source``: ``spoken_chat``, ``spoken_preferences`` or ``spoken_unpaired``."""
    for number in draw_numbers(shape):
        prompt, (sentence, words) = " ".join(str(number)), answers(number)
        rows: list[dict[str, object]]
        if source == "spoken_chat":
            rows = [{"prompt": prompt, "completion": answer} for answer in (sentence, words)]
        elif source == "spoken_unpaired":
            labelled = ((sentence, True), (words, False))
            rows = [{"prompt": prompt, "completion": answer, "label": label} for answer, label in labelled]
        else:
            rows = [{"prompt": prompt, "chosen": sentence, "rejected": words}]
        for row in rows:
            yield Document(json.dumps(row), f"data.source={source}: {number}", 1, key=str(number))


_BLOCK = 1024


def synthetic_batches(
    shape: SyntheticConfig, seed: int, vocab_size: int, eos_token_id: int, dtype: np.dtype[np.unsignedinteger]
) -> Iterator[EncodedBatch]:
    """Yields blocks of random documents; a document's length includes its end-of-sequence token and is at least 2."""
    for first in range(0, shape.num_documents, _BLOCK):
        number = min(_BLOCK, shape.num_documents - first)
        random = np.random.Generator(np.random.Philox(key=[seed & 0xFFFFFFFFFFFFFFFF, first]))
        centre = log(shape.mean_length) - shape.sigma**2 / 2
        sampled = np.exp(centre + shape.sigma * random.standard_normal(number))
        lengths = np.maximum(np.rint(sampled).astype(np.int64), 2)
        total = int(lengths.sum())
        tokens = (random.random(total) ** 3 * (vocab_size - 1)).astype(np.int64)
        tokens += tokens >= eos_token_id
        tokens[np.cumsum(lengths) - 1] = eos_token_id
        hashes = random.integers(0, 2**64, number, dtype=np.uint64)
        yield EncodedBatch(tokens.astype(dtype), lengths, hashes, None, number)
