"""Sums of an evaluation of classes: right answers, likely answers, and how often each class is taken for which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_pipe.data.step_batch import IGNORE_INDEX

TOP_K = 5
"""Number of likeliest classes that may contain the label."""
MAX_CONFUSION_CLASSES = 50
"""Most classes of a confusion matrix; with more there is none."""


class ClassSums:
    """Sums of samples with one of ``classes`` classes."""

    def __init__(self, classes: int) -> None:
        self._confusion_classes = classes if classes <= MAX_CONFUSION_CLASSES else 0
        self.num_sums = 3 + self._confusion_classes**2

    def sums(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The summed loss, then the right answers, the labels among the :data:`TOP_K` likeliest classes, and the
        confusion matrix, float64, (num_sums,).

        Args:
            logits: (rows, classes).
            labels: (rows,).
        """
        likeliest = logits.topk(min(TOP_K, logits.shape[-1])).indices == labels[:, None]
        sums = torch.stack([loss, likeliest[:, 0].sum().double(), likeliest.sum().double()])
        if not self._confusion_classes:
            return sums
        valid = labels != IGNORE_INDEX
        places = labels[valid] * self._confusion_classes + logits.argmax(-1)[valid]
        return torch.cat([sums, torch.bincount(places, minlength=self._confusion_classes**2).double()])

    def findings(self, sums: Sequence[float]) -> dict[str, Any]:
        """``confusion``: for each class, how many of its samples were classified as each class."""
        classes = self._confusion_classes
        counts = [int(count) for count in sums[3:-1]]
        return {"confusion": [counts[row * classes : (row + 1) * classes] for row in range(classes)]} if classes else {}
