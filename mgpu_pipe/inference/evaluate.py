"""Metrics of a model on held-out data, from the objective's sums over all targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.data.text.file_source import Row
from mgpu_pipe.data.text.pair_template import RowEncoder
from mgpu_pipe.data.text.tokenizer import TokenizerInfo
from mgpu_pipe.data.text.tokenizer_folder import CONFIG, TOKENIZER, load_tokenizer_file, special_tokens
from mgpu_pipe.errors import ModelFolderError
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.protocols import FeatureGatherer, StepMeasurer, gather_features
from mgpu_pipe.objectives.sample_group import SingleProcess

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def classify_texts(model: PreTrainedModel, tokenizer_folder: Path, texts: Sequence[str], seq_len: int) -> list[str]:
    """The likeliest class of each text with its probability, as ``name (97%)``; collective for a sharded model.

    Args:
        tokenizer_folder: of a run; it names the special tokens.
        seq_len: most tokens of a row, the same as in training.
    """
    tokenizer = load_tokenizer_file(tokenizer_folder / TOKENIZER)
    end = tokenizer.token_to_id(special_tokens(tokenizer_folder).get("eos_token", ""))
    if end is None:
        raise ModelFolderError(f"{tokenizer_folder}: its tokenizer names no eos_token; set it in its {CONFIG}")
    encoder = RowEncoder(TokenizerInfo(tokenizer_folder, "", tokenizer.get_vocab_size(), end), seq_len)
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    answers, names = [], cast(Any, model.config.id2label)
    try:
        for text in texts:
            ids = encoder.encode([Row((text,), "", "", 0)])[0].tokens.astype("int64")
            with torch.no_grad():
                logits = model(input_ids=torch.from_numpy(ids).to(device)[None]).logits[0].float()
            probability, class_number = logits.softmax(-1).max(-1)
            answers.append(f"{names[int(class_number)]} ({100 * float(probability):.0f}%)")
    finally:
        model.train(was_training)
    return answers


LOGITS_BYTES = 256 << 20
"""Largest fp32 logits of one forward pass; it bounds the rows that go through the model together."""


@dataclass(frozen=True)
class Evaluation:
    metrics: Mapping[str, float]
    """By key, the objective's."""
    num_targets: int
    """Denominator of the mean loss (valid tokens or samples)."""
    samples: int
    details: Mapping[str, Any] = field(default_factory=dict)
    """The objective's findings, as JSON."""

    @property
    def loss(self) -> float:
        return self.metrics.get("val/loss", math.nan)


def evaluate_step_batches(objective: Objective, step_batches: Iterable[StepBatch]) -> Evaluation:
    """The objective's metrics over all step batches; sums in float64.

    Args:
        objective: its model is whole, on one device and in evaluation mode.
    """
    model, spec, single_process = objective.model, objective.batch_spec, SingleProcess()
    device = next(model.parameters()).device
    vocabulary = int(getattr(model.config.get_text_config(), "vocab_size", 1))  # type: ignore[union-attr, operator]
    total, num_targets, samples = torch.zeros(objective.num_sums, dtype=torch.float64), 0, 0
    with torch.no_grad():
        for step_batch in step_batches:
            parts = []
            for batch in step_batch.micro_batches:
                rows_at_once = max(1, LOGITS_BYTES // (4 * max(1, spec.length(batch)) * vocabulary))
                for start in range(0, spec.rows(batch), rows_at_once):
                    parts.append(
                        {name: value[start : start + rows_at_once].to(device) for name, value in batch.items()}
                    )
            if isinstance(objective, StepMeasurer):
                objective.measure_step(replace(step_batch, micro_batches=parts), partial(_sums, objective))
            gather_features(objective, parts, len(parts), single_process)
            for rows in parts:
                total += objective.evaluation_sums(rows).cpu()
                num_targets += spec.valid_targets(rows)
            samples += step_batch.num_samples
        last_sums = objective.last_sums(single_process) if isinstance(objective, FeatureGatherer) else 0.0
        total += last_sums.cpu() if isinstance(last_sums, torch.Tensor) else last_sums
    sums = [*total.tolist(), float(num_targets)]
    if not num_targets:
        return Evaluation({}, num_targets, samples)
    return Evaluation(objective.description.measured(sums), num_targets, samples, objective.findings(sums))


def _sums(objective: Objective, step_batch: StepBatch) -> torch.Tensor:
    """Sums of the objective's evaluation over the micro-batches, float64 (num_sums,)."""
    return torch.stack([objective.evaluation_sums(batch) for batch in step_batch.micro_batches]).sum(0)
