"""Masked language modelling: predicts hidden tokens from those on both sides.

A share of each sample's tokens is drawn: 80% become the mask token, 10% another token, 10% stay as they are (Devlin et
al. 2019, "BERT", arXiv:1810.04805, section 3.1). The run's seed and the sample's number in the run decide the draw: it
differs in each epoch, and no cut of the batch changes it. Attention stays inside the documents of a packed sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.architectures.formulas.flops import SLIDING
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.samples import ChangedSamples, SampleSet, random_of, require_costs
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.models.field_sizes import first_position
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.models.kernels.packed_attention import takes_document_starts
from mgpu_pipe.objectives.base import Batch, Forward, KeyedObjective, LearningRate, Reference, step_generator
from mgpu_pipe.objectives.losses.loss_head import TokenLoss
from mgpu_pipe.objectives.packed_text import (
    block_diagonal_mask,
    is_first_document,
    random_packed_text,
    skips_last,
    starts_of,
)
from mgpu_pipe.objectives.text_keys import MASKED_LM, MaskedLMConfig
from mgpu_pipe.system.compat.transformers_private import attention_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HIDE_BELOW, REPLACE_BELOW = 0.8, 0.9
"""A draw below the first hides a token, from there to the second replaces it, above leaves it."""


@dataclass(frozen=True)
class Masking:
    """Rule that hides tokens.

    Attributes:
        share: share of a sample's tokens to draw.
        token: id of the mask token. Replacements are other ids below ``vocabulary``.
    """

    share: float
    token: int
    vocabulary: int

    @classmethod
    def from_config(cls, keys: MaskedLMConfig, vocabulary: int) -> Masking:
        return cls(keys.mask_share, vocabulary - 1 if keys.mask_token_id == "auto" else keys.mask_token_id, vocabulary)

    def num_drawn(self, tokens: int) -> int:
        """Number of tokens to draw of a sample of ``tokens``; known before the draw."""
        return min(tokens, max(1, round(self.share * tokens)))

    def mask(self, ids: NDArray[np.int64], tokens: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Hides some of the first ``tokens`` of ``ids`` in place and returns the labels."""
        labels = np.full_like(ids, IGNORE_INDEX)
        chosen = random.permutation(tokens)[: self.num_drawn(tokens)]
        labels[chosen] = ids[chosen]
        fate = random.random(len(chosen))
        other = random.integers(0, self.vocabulary - 1, len(chosen))
        other += other >= self.token
        ids[chosen] = np.where(fate < HIDE_BELOW, self.token, np.where(fate < REPLACE_BELOW, other, ids[chosen]))
        return labels


@dataclass(frozen=True)
class MaskedSamples(ChangedSamples):
    """Packed text with tokens hidden as samples are read."""

    masking: Masking
    seed: int

    def _tokens(self, indices: NDArray[np.int64]) -> list[int]:
        samples = (indices[start : start + 1] for start in range(len(indices)))
        return [self.positions(sample) - self.padding(sample) for sample in samples]

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        read = self.read.batch(indices, numbers)
        ids = read["input_ids"].numpy()
        labels = [
            self.masking.mask(row, tokens, random_of(self.seed, number))
            for row, tokens, number in zip(ids, self._tokens(indices), numbers.tolist(), strict=True)
        ]
        return {**read, "labels": torch.from_numpy(np.stack(labels))}

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return sum(map(self.masking.num_drawn, self._tokens(indices)))

    def costs(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return require_costs(self.read).costs(indices)


class MaskedLMObjective(KeyedObjective):
    """Cross-entropy of the hidden tokens under a Hugging Face masked language model."""

    description = MASKED_LM
    num_sums = 2
    keys: MaskedLMConfig

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: MaskedLMConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate, keys)
        self._config = cast(Any, model.config)
        padding = self._config.pad_token_id
        self._first_position = first_position(padding, self._config.model_type)
        self._loss = TokenLoss(model, keys.loss_chunk_tokens)

    @classmethod
    def samples(cls, config: RunConfig, samples: SampleSet) -> SampleSet:
        vocabulary = int(resolved_fields(config.model)["vocab_size"])
        return MaskedSamples(
            samples, Masking.from_config(cast(MaskedLMConfig, config.objective), vocabulary), config.seed
        )

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        positions = batch["position_ids"]
        return {
            "input_ids": batch["input_ids"],
            "position_ids": positions + self._first_position,
            "attention_mask": self._attention_mask(batch, positions),
        }

    def _attention_mask(self, batch: Mapping[str, torch.Tensor], positions: torch.Tensor) -> Any:
        """Mask of the documents of a row; one for each kind of layers if some have a window."""
        if takes_document_starts(self.model):
            return starts_of(batch, positions)
        if not family_of(self._config.model_type).token_mask:
            return is_first_document(positions).long()
        as_bool = attention_of(self._config) == "sdpa"
        kinds = set(getattr(self._config, "layer_types", None) or ())
        if not kinds:
            return block_diagonal_mask(positions, as_bool, causal=False)
        windows = {kind: self._config.sliding_window if kind == SLIDING else None for kind in kinds}
        return {kind: block_diagonal_mask(positions, as_bool, False, window) for kind, window in windows.items()}

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss.sum(self.model_inputs(batch), batch["labels"])

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss.sums(self.model_inputs(batch), batch["labels"])

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        generator = step_generator(seed, step)
        vocabulary = int(self._config.vocab_size)
        batch = random_packed_text(generator, step, samples, seq_len, vocabulary, packed)
        masking = Masking.from_config(self.keys, vocabulary)
        for row in range(samples):
            tokens = seq_len - seq_len // 3 if row % 4 == 1 else seq_len
            tokens = tokens if packed else int(is_first_document(batch["position_ids"][row : row + 1]).sum())
            random = random_of(seed, step * samples + row)
            labels = masking.mask(batch["input_ids"][row].numpy(), tokens, random)
            batch["labels"][row] = torch.from_numpy(labels)
        if skips_last(step, samples):
            batch["labels"][-1] = IGNORE_INDEX
        return batch

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One document at a time, whole, without a mask."""
        losses = []
        for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
            for start, stop in pairwise(starts):
                wanted = labels[start:stop]
                if bool((wanted != IGNORE_INDEX).any()):
                    places = torch.arange(self._first_position, self._first_position + stop - start)
                    inputs = {"input_ids": ids[None, start:stop], "position_ids": places[None]}
                    logits = forward(**inputs).logits[0].float()
                    losses.append(F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum"))
        return Reference(torch.stack(losses).sum())
