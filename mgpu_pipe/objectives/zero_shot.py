"""Zero-shot classification by prompts of each class, in several templates (Radford et al. 2021, section 3.1.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

PROMPTS_AT_ONCE = 256
"""Prompts that go through the text tower together."""


@dataclass(frozen=True)
class ClassPrompts:
    """Prompts of the classes that a picture may have.

    Attributes:
        names: of the classes, in the order of their labels.
        tokens: int64, (classes, templates, seq_len).
    """

    names: list[str]
    tokens: torch.Tensor

    @classmethod
    def from_arrays(cls, names: list[str], tokens: NDArray[np.int64]) -> ClassPrompts:
        return cls(names, torch.from_numpy(tokens))


def class_vectors(encode: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """One vector of length 1 for each class, (classes, width): the mean of its templates' normalised vectors.

    Args:
        encode: text features, (rows, width), of token rows, (rows, seq_len).
        tokens: (classes, templates, seq_len).
    """
    classes, templates, length = tokens.shape
    rows = tokens.reshape(-1, length).split(PROMPTS_AT_ONCE)
    vectors = F.normalize(torch.cat([encode(part) for part in rows]).float(), dim=1)
    return F.normalize(vectors.reshape(classes, templates, -1).mean(1), dim=1)
