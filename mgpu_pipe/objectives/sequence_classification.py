"""Sequence classification: one of several classes for each text, or pair of texts.

A sample is one row with masked padding at its end; samples are not packed. The model decides where it reads the class:
BERT's kind at the first token, a causal model at the last one that is not ``pad_token_id``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field
from mgpu_pipe.objectives.base import (
    Batch,
    Forward,
    KeyedObjective,
    LearningRate,
    Reference,
    draw_integers,
    step_generator,
)
from mgpu_pipe.objectives.class_keys import SEQUENCE_CLASSIFICATION
from mgpu_pipe.objectives.class_sums import ClassObjective
from mgpu_pipe.objectives.packed_text import skips_last
from mgpu_pipe.objectives.text_keys import OneOutputConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORTEST = 2
"""Fewest tokens of a random sample."""


class OneOutputObjective(KeyedObjective):
    """Base of objectives over the one output of a Hugging Face model ``...ForSequenceClassification``."""

    keys: OneOutputConfig

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: OneOutputConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate, keys)
        self._config = cast(Any, model.config)
        self._config.use_cache = False


class SequenceClassificationObjective(ClassObjective):
    """Cross-entropy of classes under a Hugging Face model ``...ForSequenceClassification``, a mean over samples."""

    description = SEQUENCE_CLASSIFICATION
    num_sums = 3

    def __init__(self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._config.use_cache = False

    @property
    def batch_spec(self) -> BatchSpec:
        """``input_ids`` and ``token_type_ids``, which separate the two texts of a row: int64, (rows, seq_len).
        ``lengths``, the tokens of a row, and ``labels``, its class: int64, (rows,)."""
        return BatchSpec(
            {
                "input_ids": Field(),
                "token_type_ids": Field(),
                "lengths": Field(sequence_dim=None, padding=1),
                "labels": Field(sequence_dim=None, padding=IGNORE_INDEX, target=True, stages="last"),
            }
        )

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        ids, lengths = batch["input_ids"], batch["lengths"]
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
        return {"input_ids": ids, "attention_mask": mask.long(), **token_types(self._config, batch["token_type_ids"])}

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Random texts of random lengths, half of them pairs. In every third step the last one has no label."""
        draw = partial(draw_integers, step_generator(seed, step))
        ids = draw(0, int(self._config.get_text_config().vocab_size), samples, seq_len)
        lengths, labels = draw(SHORTEST, seq_len + 1, samples), draw(0, self._classes, samples)
        second = torch.where(draw(0, 2, samples) == 1, lengths // 2, seq_len)
        place = torch.arange(seq_len)
        ids[place >= lengths.unsqueeze(1)] = int(self._config.get_text_config().pad_token_id or 0)
        if skips_last(step, samples):
            labels[-1] = IGNORE_INDEX
        kinds = (place >= second.unsqueeze(1)) & (place < lengths.unsqueeze(1))
        return {"input_ids": ids, "token_type_ids": kinds.long(), "lengths": lengths, "labels": labels}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One sample at a time, without padding."""
        losses = []
        for ids, kinds, length, label in zip(*(batch[name] for name in self.batch_spec.fields), strict=True):
            if int(label) != IGNORE_INDEX:
                end = int(length)
                logits = forward(
                    input_ids=ids[None, :end], **token_types(self._config, kinds[None, :end])
                ).logits.float()
                losses.append(-logits.log_softmax(-1)[0, int(label)])
        return Reference(torch.stack(losses).sum())


def token_types(config: Any, token_type_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """``token_type_ids`` as an argument, if the model with this configuration has embeddings of them."""
    return {"token_type_ids": token_type_ids} if getattr(config, "type_vocab_size", 0) > 1 else {}
