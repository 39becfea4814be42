"""Evaluation of classes: sums of right and likely answers, figures of each class, and zero-shot prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.base import LearningRate, Objective

TOP_K = 5
"""Number of likeliest classes that may contain the label."""
MAX_CONFUSION_CLASSES = 50
"""Most classes of a confusion matrix; with more there is none."""
BINS = 15
"""Bins of confidence, of equal width (Guo et al. 2017, arXiv:1706.04599)."""
_TOTALS_BEFORE = 3
"""Sums before those of the classes: loss, right answers, labels among the likeliest."""


class ClassSums:
    """Sums of samples with one of ``classes`` classes, which add up over micro-batches and processes."""

    def __init__(self, classes: int) -> None:
        self._classes, self._has_confusion = classes, classes <= MAX_CONFUSION_CLASSES
        self.num_sums = _TOTALS_BEFORE + classes * (classes if self._has_confusion else 3) + 3 * BINS

    def sums(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sums, float64, (num_sums,): of the losses, of right answers, of labels among the :data:`TOP_K` likeliest
        classes, then the counts of the classes and of the bins of confidence.

        Args:
            logits: (rows, classes).
            labels: (rows,); ``IGNORE_INDEX`` counts nothing.
        """
        likeliest = logits.topk(min(TOP_K, logits.shape[-1])).indices == labels[:, None]
        first = torch.stack([loss.double(), likeliest[:, 0].sum().double(), likeliest.sum().double()])
        valid = labels != IGNORE_INDEX
        known, chosen = labels[valid], logits.argmax(-1)[valid]
        if self._has_confusion:
            counts = torch.bincount(known * self._classes + chosen, minlength=self._classes**2)
        else:
            by_class = (known, known[known == chosen], chosen)
            counts = torch.cat([torch.bincount(numbers, minlength=self._classes) for numbers in by_class])
        confidence = logits[valid].double().softmax(-1).amax(-1)
        bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
        amounts = torch.stack([torch.ones_like(confidence), confidence, (known == chosen).double()])
        by_bin = amounts @ F.one_hot(bins, BINS).double()  # bincount with weights is not deterministic on GPUs
        return torch.cat([first, counts.double(), by_bin.flatten()])

    def findings(self, sums: Sequence[float]) -> dict[str, Any]:
        """Figures for the summary, as JSON.

        ``confusion``: for each class, how many of its samples were taken for each class; up to 50 classes.
        ``classes``: for each class its ``samples``, the ``right`` among them, and the samples ``predicted`` to be it.
        ``calibration``: ``expected_error``, the mean distance between confidence and accuracy of a bin, weighted by its
        samples (ECE over :data:`BINS` bins); ``bins``, each bin with samples.

        Args:
            sums: those of all samples, and the loss denominator last.
        """
        values = np.array(sums[_TOTALS_BEFORE : self.num_sums])
        table, by_bin = values[: -3 * BINS].reshape(-1, self._classes), values[-3 * BINS :].reshape(3, BINS)
        by_class = (table.sum(1), table.diagonal(), table.sum(0)) if self._has_confusion else tuple(table)
        names = ("samples", "right", "predicted")
        classes = {name: counts.astype(int).tolist() for name, counts in zip(names, by_class, strict=True)}
        samples, confidence, right = by_bin[:, by_bin[0] > 0]
        calibration = {
            "expected_error": float(np.abs(confidence - right).sum() / max(1.0, samples.sum())),
            "bins": [
                {"samples": int(number), "confidence": float(sure / number), "accuracy": float(hits / number)}
                for number, sure, hits in zip(samples, confidence, right, strict=True)
            ],
        }
        confusion = {"confusion": table.astype(int).tolist()} if self._has_confusion else {}
        return {**confusion, "classes": classes, "calibration": calibration}


class ClassObjective(Objective):
    """Base of objectives whose model gives logits of classes with a single right class: their cross-entropy.

    Args:
        label_smoothing: share of each label spread over all classes, only in training.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, label_smoothing: float = 0.0
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._config, self._smoothing = cast(Any, model.config), label_smoothing
        self._classes = int(self._config.num_labels)
        self._class_sums = ClassSums(self._classes)
        self.num_sums = self._class_sums.num_sums  # type: ignore[misc]  # the classes of this model are known only now

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._losses(self._logits(batch), batch, self._smoothing).sum(dtype=torch.float64)

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = self._logits(batch)
        loss = self._losses(logits, batch, 0.0).sum(dtype=torch.float64)
        return self._class_sums.sums(loss, logits, batch["labels"])

    def findings(self, sums: Sequence[float]) -> dict[str, Any]:
        return self._class_sums.findings(sums)

    def _logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cast(torch.Tensor, self.model(**self.model_inputs(batch)).logits.float())

    def _losses(self, logits: torch.Tensor, batch: Mapping[str, torch.Tensor], smoothing: float) -> torch.Tensor:
        """Loss of each sample, (rows,); 0 where none counts."""
        return class_losses(logits, batch["labels"], smoothing)


def class_losses(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Cross-entropy of each label, (rows,); 0 where it is ``IGNORE_INDEX``."""
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=smoothing)


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
