"""Speech recognition by connectionist temporal classification (Graves et al. 2006): characters without their times.

A recording's loss does not depend on the rest of its micro-batch: padding is masked, and the first norm of a waveform's
encoder uses only the recording's samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Reference, step_generator
from mgpu_pipe.objectives.packed_text import skips_last
from mgpu_pipe.objectives.sound_inputs import VERIFY_MAX_FRAMES, SoundObjective, WaveInputs
from mgpu_pipe.objectives.transcript_keys import CTC, count_errors, transcribe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CTCObjective(SoundObjective):
    """Negative log-likelihood of transcripts under a Hugging Face model ``...ForCTC``, a mean over characters."""

    description = CTC
    num_sums = 5

    def __init__(self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._inputs, self._blank = WaveInputs(model), int(cast(Any, model.config).pad_token_id)

    @property
    def batch_spec(self) -> BatchSpec:
        """The fields of :class:`WaveInputs`; ``between_words``, the label between words, int64, (rows,); ``labels``,
        int64, (rows, characters)."""
        labels = Field(padding=IGNORE_INDEX, target=True)
        return BatchSpec({**self._inputs.fields, "between_words": Field(sequence_dim=None), "labels": labels})

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return self._inputs.model_inputs(batch)

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss(batch, self._log_probabilities(batch))

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        log_probabilities = self._log_probabilities(batch)
        frames = self._inputs.num_frames(batch).tolist()
        between = batch["between_words"].tolist()
        written = [
            transcribe(best[:count], space, self._blank)
            for best, count, space in zip(log_probabilities.argmax(-1).tolist(), frames, between, strict=True)
        ]
        references = [
            transcribe([label for label in row if label != IGNORE_INDEX], space)
            for row, space in zip(batch["labels"].tolist(), between, strict=True)
        ]
        pairs = [(said, wrote) for said, wrote in zip(references, written, strict=True) if said]
        sums = torch.tensor(count_errors(pairs), dtype=torch.float64, device=log_probabilities.device)
        return torch.cat([self._loss(batch, log_probabilities).double().reshape(1), sums])

    def _log_probabilities(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Log-probabilities of each frame, (rows, frames, characters); float64, as the gradient subtracts large
        logarithms."""
        return cast(torch.Tensor, self.model(**self.model_inputs(batch)).logits.double().log_softmax(-1))

    def _loss(self, batch: Mapping[str, torch.Tensor], log_probabilities: torch.Tensor) -> torch.Tensor:
        labels = batch["labels"]
        characters = (labels != IGNORE_INDEX).sum(1)
        # Its gradient on GPUs is not deterministic, so torch refuses it in deterministic mode.
        where = torch.device("cpu") if torch.are_deterministic_algorithms_enabled() else log_probabilities.device
        losses = F.ctc_loss(
            log_probabilities.transpose(0, 1).to(where),
            labels.clamp_min(0).to(where),
            self._inputs.num_frames(batch).to(where),
            characters.to(where),
            blank=self._blank,
            reduction="none",
        ).to(log_probabilities.device)
        return torch.where(characters > 0, losses, 0.0).sum(dtype=torch.float64)

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Noise of uneven lengths. In every third step the last recording has no transcript."""
        generator = step_generator(seed, step)
        sounds = self._inputs.random_batch(generator, seed, step, samples)
        vocabulary = int(cast(Any, self.model.config).vocab_size)
        labels = torch.randint(0, vocabulary - 1, (samples, VERIFY_MAX_FRAMES // 4), generator=generator)
        labels += labels >= self._blank
        written = torch.randint(1, labels.shape[1] + 1, (samples, 1), generator=generator)
        if skips_last(step, samples):
            written[-1] = 0
        return {
            **sounds,
            "between_words": torch.ones(samples, dtype=torch.int64),
            "labels": labels.masked_fill(torch.arange(labels.shape[1]) >= written, IGNORE_INDEX),
        }

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One recording at a time, without padding and masks."""
        losses = []
        for row, labels in enumerate(batch["labels"]):
            labels = labels[labels != IGNORE_INDEX]
            if not len(labels):
                continue
            shares = self._inputs.logits_alone(forward, model, batch, row)[0].double().log_softmax(-1)
            counts = (torch.tensor(len(shares)), torch.tensor(len(labels)))
            losses.append(F.ctc_loss(shares, labels, *counts, blank=self._blank, reduction="sum"))
        return Reference(torch.stack(losses).sum())
