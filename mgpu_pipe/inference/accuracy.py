"""How near an exported model is to its run: size, perplexity of held-out tokens, and error of the logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.open import ReadTensor, StoredModel
from mgpu_pipe.inference.streamed_weights import Inputs, probe, streamed_logits

MAX_LOGITS = 64 << 20
"""Most logits of one forward pass, 256 MB in fp32; it bounds the held-out rows."""
MAX_STEP_BATCHES = 16
Texts = list[tuple[torch.Tensor, torch.Tensor]]
"""Token ids and labels of each text, (tokens,)."""


@dataclass(frozen=True)
class Accuracy:
    """Figures of one type.

    Attributes:
        nbytes: of all tensors.
        perplexity: of held-out tokens; None where the run has none.
        error: largest difference of a probe's logit from the run's, relative to the largest.
    """

    dtype: str
    nbytes: int
    perplexity: float | None
    error: float


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return float((logits - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def held_out_batch(stored: StoredModel) -> Inputs | None:
    """First held-out rows of the run's own data; None for a model folder, another user's run, or data that is gone.

    The batch has ``input_ids``, ``labels`` and where documents are packed ``position_ids``, each (rows, tokens).
    """
    from mgpu_pipe.data.loader import evaluation_step_batches
    from mgpu_pipe.data.prepare_data import prepare
    from mgpu_pipe.objectives.registry import objective_class
    from mgpu_pipe.topology import BatchPlan

    config = stored.config
    if config is None or not stored.is_trusted or config.objective.name != "causal_lm":
        return None
    tokenizer = None if stored.tokenizer_folder is None else str(stored.tokenizer_folder.absolute())
    data = replace(config.data, tokenizer=tokenizer or config.data.tokenizer)
    config = replace(config, data=data)
    try:
        prepared = prepare(config)
    except BadInputError:
        return None
    samples = objective_class("causal_lm").samples
    step_batches = evaluation_step_batches(config, prepared, BatchPlan.resolve(data, 1), 0, samples)
    if not len(step_batches):
        return None
    first = islice(step_batches, MAX_STEP_BATCHES)
    batches = [batch for step_batch in first for batch in step_batch.micro_batches]
    length = batches[0]["input_ids"].shape[1]
    rows = max(1, MAX_LOGITS // (length * stored.model.config.vocab_size))
    alike = [batch for batch in batches if batch["input_ids"].shape[1] == length][:rows]
    names = [name for name in ("input_ids", "labels", "position_ids") if name in alike[0]]
    return {name: torch.cat([batch[name] for batch in alike])[:rows] for name in names}


def held_out_texts(stored: StoredModel) -> Texts:
    """Texts of :func:`held_out_batch`, one by one; packed documents apart."""
    batch = held_out_batch(stored) or {}
    texts: Texts = []
    for index, (ids, labels) in enumerate(zip(batch.get("input_ids", ()), batch.get("labels", ()), strict=True)):
        positions = batch["position_ids"][index] if "position_ids" in batch else torch.arange(len(ids))
        lengths = torch.diff(torch.nonzero(positions == 0).flatten(), append=torch.tensor([len(ids)])).tolist()
        texts += zip(ids.split(lengths), labels.split(lengths), strict=True)
    return texts


def measure_accuracies(stored: StoredModel, dtypes: Mapping[str, tuple[int, ReadTensor]]) -> Iterator[Accuracy]:
    """The figures of each type; holds one block of the model in memory.

    Each type reads all weights once, or twice with held-out tokens.

    Args:
        dtypes: by name, bytes of all tensors, and a reader of the rounded weights.
    """
    inputs, batch = probe(stored.model), held_out_batch(stored)
    exact = streamed_logits(stored.model, stored.read, inputs, torch.float32)
    for dtype, (nbytes, read) in dtypes.items():
        logits = streamed_logits(stored.model, read, inputs, torch.float32)
        perplexity = None if batch is None else _perplexity(stored, read, batch)
        yield Accuracy(dtype, nbytes, perplexity, relative_difference(logits, exact))


def _perplexity(stored: StoredModel, read: ReadTensor, batch: Inputs) -> float:
    """Exponential of the mean loss of the batch's valid tokens."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits, labels = streamed_logits(stored.model, read, inputs, torch.float32), batch["labels"]
    return math.exp(float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)))
