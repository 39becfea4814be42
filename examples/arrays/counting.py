"""A data source of arrays: sequences that count up by their own step, modulo the vocabulary.

mgpu-pipe data.source=counting data.longest_step=5 model=llama_tiny model.config.vocab_size=64 trainer.max_steps=50
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from counting_keys import CountingConfig
from numpy.typing import NDArray

from mgpu_pipe.data.arrays import ArrayData

SAMPLES = 512
VOCABULARY = 64


class Counting(ArrayData):
    """Sample ``i`` begins at ``i`` and counts by ``1 + i % data.longest_step``; every tenth sample is held out."""

    @property
    def _longest_step(self) -> int:
        return cast(CountingConfig, self.config.data).longest_step

    @property
    def _numbers(self) -> NDArray[np.int64]:
        numbers = np.arange(SAMPLES)
        return numbers[(numbers % 10 == 0) == (self.split == "validation")]

    @property
    def digest(self) -> str:
        told = f"counting 1 {self.split} {SAMPLES} {VOCABULARY} {self.config.data.seq_len} {self._longest_step}"
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    @property
    def valid_units(self) -> NDArray[np.int64]:
        return np.full(len(self._numbers), self.config.data.seq_len, np.int64)

    def positions(self, index: int) -> int:
        return self.config.data.seq_len

    def sample(self, index: int, random: np.random.Generator) -> Mapping[str, NDArray[Any]]:
        number, length = int(self._numbers[index]), self.config.data.seq_len
        tokens = (number + (1 + number % self._longest_step) * np.arange(length + 1)) % VOCABULARY
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "position_ids": np.arange(length)}
