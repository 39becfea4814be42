"""Size, perplexity and error of a model in each type that a GGUF file can have."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.inference.accuracy import Accuracy, held_out_batch, relative_difference
from mgpu_pipe.inference.gguf.write import GgufDtype, GgufLayout, file_bytes, rounded_reader
from mgpu_pipe.inference.open import ReadTensor, StoredModel
from mgpu_pipe.inference.streamed_weights import Inputs, probe, streamed_logits


def measure_accuracies(stored: StoredModel, layout: GgufLayout, dtypes: tuple[GgufDtype, ...]) -> Iterator[Accuracy]:
    """The figures of each type; holds one block of the model in memory.

    Each type reads all weights once, or twice with held-out tokens.
    """
    inputs, batch = probe(stored.model), held_out_batch(stored)
    exact = streamed_logits(stored.model, stored.read, inputs, torch.float32)
    for dtype in dtypes:
        read = rounded_reader(layout, stored.read, dtype)
        logits = streamed_logits(stored.model, read, inputs, torch.float32)
        perplexity = None if batch is None else _perplexity(stored, read, batch)
        yield Accuracy(dtype, file_bytes(layout, dtype), perplexity, relative_difference(logits, exact))


def _perplexity(stored: StoredModel, read: ReadTensor, batch: Inputs) -> float:
    """Exponential of the mean loss of the batch's valid tokens."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits, labels = streamed_logits(stored.model, read, inputs, torch.float32), batch["labels"]
    return math.exp(float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)))
