"""Random documents: tokens without text, for tests, benchmarks and dry runs of large topologies.

Document lengths are log-normal; tokens are skewed towards small ids (the cube of a uniform number), so that a model
has a unigram distribution to learn. Everything is drawn from Philox generators keyed by (seed, block of documents).
The tokenizer that goes with it knows the decimal numbers: token ``i`` reads ``i``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log

import numpy as np

from mgpu_pipe.config.schema import SyntheticConfig
from mgpu_pipe.data.text.document_encoder import EncodedBatch

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
