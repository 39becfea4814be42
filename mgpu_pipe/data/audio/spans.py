"""Spans of frames and of features that a training sample is learnt without (SpecAugment: Park et al. 2019). No torch.

How many and how long is the model's own configuration, as transformers reads it (``mask_time_prob`` and so on); where
is drawn by the run's seed and the sample's number in the run, so that it does not depend on how the batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KEY = 0x5BEC
"""Told apart from the random numbers that change the recording itself."""


@dataclass(frozen=True)
class Spans:
    """Attributes:
    share: of the places that begin a span, times its length.
    length: of a span.
    fewest: spans of a sample.
    """

    share: float
    length: int
    fewest: int

    @classmethod
    def of(cls, fields: Mapping[str, Any], which: str) -> Spans:
        """Those of a model, ``which`` being time or feature."""
        if not fields.get("apply_spec_augment", True):
            return cls(0.0, 1, 0)
        share, length, fewest = (fields.get(f"mask_{which}_{name}", 0) for name in ("prob", "length", "min_masks"))
        return cls(float(share), int(length), int(fewest))

    def drawn(self, places: int, random: np.random.Generator) -> NDArray[np.bool_]:
        """Which of so many places lie in a span."""
        hidden = np.zeros(places, np.bool_)
        starts = places - self.length + 1
        if not self.share or starts < 1:
            return hidden
        number = max(int(self.share * places / self.length + random.random()), self.fewest)
        for start in random.permutation(starts)[: min(number, places // self.length)]:
            hidden[start : start + self.length] = True
        return hidden


def random_of_spans(seed: int, number: int) -> np.random.Generator:
    """Of the sample that counts as ``number``."""
    mask = 0xFFFFFFFFFFFFFFFF
    return np.random.Generator(np.random.Philox(key=np.array([(seed ^ _KEY << 32) & mask, number & mask], np.uint64)))
