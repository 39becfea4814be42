"""Speech recognition by connectionist temporal classification (Graves et al. 2006): characters without their times.

Each recording is learnt from as if it were alone, whatever it shares a micro-batch with: what is padding is masked, the
first norm of a waveform's encoder looks at the recording's own samples, and the frames and features that are hidden
while training (SpecAugment) are drawn by the run's seed and the sample's number in the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mgpu_pipe.compat.transformers_private import hide_by
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.spans import Spans, random_of_spans
from mgpu_pipe.data.batch_spec import BatchSpec, Field
from mgpu_pipe.data.samples import ChangedSamples, SampleSet
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.families.frames import Frames
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.models.hearing import HIDDEN, hear_alone
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Objective, Reference
from mgpu_pipe.objectives.ctc_keys import DESCRIPTION
from mgpu_pipe.objectives.transcripts import errors, spoken
from mgpu_pipe.parallel.randomness import step_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST_OF_VERIFY = 24
"""Frames of a recording that verify makes."""


@dataclass(frozen=True)
class Hiding:
    """What of a recording is hidden while training."""

    frames: Frames
    time: Spans
    features: Spans
    width: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Hiding:
        time, features = (Spans.of(fields, which) for which in ("time", "feature"))
        return cls(Frames.of_fields(fields), time, features, int(fields["hidden_size"]))

    @property
    def hides(self) -> bool:
        return self.time.share > 0 or self.features.share > 0

    def drawn(self, lengths: list[int], numbers: list[int], seed: int) -> dict[str, torch.Tensor]:
        """``hidden_frames`` and ``hidden_features`` of recordings of so many samples; nothing of held-out ones."""
        frames = [max(1, self.frames.of_samples(length)) for length in lengths]
        times = np.zeros((len(lengths), max(frames)), np.bool_)
        features = np.zeros((len(lengths), self.width), np.bool_)
        for row, (count, number) in enumerate(zip(frames, numbers, strict=True)):
            if number >= 0:
                random = random_of_spans(seed, number)
                times[row, :count] = self.time.drawn(count, random)
                features[row] = self.features.drawn(self.width, random)
        return {"hidden_frames": torch.from_numpy(times), "hidden_features": torch.from_numpy(features)}


@dataclass(frozen=True)
class HiddenSamples(ChangedSamples):
    """Recordings of which something is hidden as they are read."""

    hiding: Hiding
    seed: int

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        read = self.read.batch(indices, numbers)
        return {**read, **self.hiding.drawn(read["lengths"].tolist(), numbers.tolist(), self.seed)}


class CTCObjective(Objective):
    """Minus the logarithm of the transcript's probability under a Hugging Face model ``...ForCTC``, a mean over
    characters."""

    description = DESCRIPTION
    num_sums = 5

    def __init__(self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        config = cast(Any, model.config)
        hear_alone(cast(Any, model))
        self._hiding, self._blank = Hiding.of(config.to_dict()), int(config.pad_token_id)
        self._frames = self._hiding.frames

    @classmethod
    def samples(cls, config: RunConfig, samples: SampleSet) -> SampleSet:
        hiding = Hiding.of(resolved_fields(config.model))
        return HiddenSamples(samples, hiding, config.seed) if hiding.hides else samples

    @property
    def batch_spec(self) -> BatchSpec:
        """``input_values``, float32, (rows, samples); ``lengths``, the samples that are no padding, and
        ``between_words``, the label that stands there, int64, (rows,); ``labels``, int64, (rows, characters);
        ``hidden_frames`` and ``hidden_features``, boolean, (rows, frames) and (rows, width)."""
        config = cast(Any, self.model.config)
        fields = {
            "input_values": Field(dtype="float32"),
            "lengths": Field(sequence_dim=None),
            "between_words": Field(sequence_dim=None),
            "labels": Field(padding=IGNORE_INDEX, target=True),
        }
        if self._hiding.hides:
            fields["hidden_frames"] = Field(dtype="bool")
            fields["hidden_features"] = Field(sequence_dim=None, dtype="bool", shape=(int(config.hidden_size),))
        return BatchSpec(fields)

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        values = batch["input_values"]
        inside = torch.arange(values.shape[1], device=values.device) < self._lengths(batch)[:, None]
        hidden = {name: batch[name] for name in HIDDEN if name in batch}
        return {"input_values": values, "attention_mask": inside.long(), **hidden}

    def _lengths(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Samples; a row that counts nothing has enough for a frame, for attention would be over none."""
        return batch["lengths"].clamp_min(self._frames.samples_of(1))

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss(batch, self._log_probabilities(batch))

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found = self._log_probabilities(batch)
        frames = self._frames.of_samples(self._lengths(batch)).tolist()
        between = batch["between_words"].tolist()
        heard = [
            spoken(best[:count], space, self._blank)
            for best, count, space in zip(found.argmax(-1).tolist(), frames, between, strict=True)
        ]
        said = [
            spoken([label for label in row if label != IGNORE_INDEX], space)
            for row, space in zip(batch["labels"].tolist(), between, strict=True)
        ]
        counted = [(one, other) for one, other in zip(said, heard, strict=True) if one]
        sums = torch.tensor(errors(counted), dtype=torch.float64, device=found.device)
        return torch.cat([self._loss(batch, found).double().reshape(1), sums])

    def _log_probabilities(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of each frame, float32, shape (rows, frames, characters)."""
        return cast(torch.Tensor, self.model(**self.model_inputs(batch)).logits.float().log_softmax(-1))

    def _loss(self, batch: Mapping[str, torch.Tensor], found: torch.Tensor) -> torch.Tensor:
        labels = batch["labels"]
        characters = (labels != IGNORE_INDEX).sum(1)
        # On GPUs its gradient is summed up in any order, and torch refuses it where runs are to be deterministic.
        where = torch.device("cpu") if torch.are_deterministic_algorithms_enabled() else found.device
        losses = F.ctc_loss(
            found.transpose(0, 1).to(where),
            labels.clamp_min(0).to(where),
            self._frames.of_samples(self._lengths(batch)).to(where),
            characters.to(where),
            blank=self._blank,
            reduction="none",
        ).to(found.device)
        return torch.where(characters > 0, losses, 0.0).sum(dtype=torch.float64)

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Noise of uneven lengths. In every third step the last recording has no transcript."""
        generator = torch.Generator().manual_seed(step_seed(seed, step, -1))
        config, frames = cast(Any, self.model.config), self._frames
        counts = torch.randint(LONGEST_OF_VERIFY // 2, LONGEST_OF_VERIFY + 1, (samples,), generator=generator)
        lengths = torch.tensor([frames.samples_of(count) for count in counts.tolist()])
        values = torch.randn(samples, int(lengths.max()), generator=generator)
        labels = torch.randint(0, int(config.vocab_size) - 1, (samples, LONGEST_OF_VERIFY // 4), generator=generator)
        labels += labels >= self._blank
        written = torch.randint(1, labels.shape[1] + 1, (samples, 1), generator=generator)
        if step % 3 == 2 and samples > 2:
            written[-1] = 0
        batch = {
            "input_values": values.masked_fill(torch.arange(values.shape[1]) >= lengths[:, None], 0),
            "lengths": lengths,
            "between_words": torch.ones(samples, dtype=torch.int64),
            "labels": labels.masked_fill(torch.arange(labels.shape[1]) >= written, IGNORE_INDEX),
        }
        if self._hiding.hides:
            numbers = list(range(step * samples, (step + 1) * samples))
            batch.update(self._hiding.drawn(lengths.tolist(), numbers, seed))
        return batch

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One recording at a time, without padding and masks, its hidden frames replaced one after another."""
        losses, base = [], cast(Any, model.base_model)
        for row, length in enumerate(batch["lengths"].tolist()):
            labels = batch["labels"][row]
            labels = labels[labels != IGNORE_INDEX]
            if not len(labels):
                continue

            def hide(states: torch.Tensor, *_: Any, row: int = row, **__: Any) -> torch.Tensor:
                for name, dim in (("hidden_frames", 1), ("hidden_features", 2)):
                    for at in batch[name][row].nonzero().flatten().tolist() if name in batch else ():
                        states = states.clone()
                        states.select(dim, at)[:] = base.masked_spec_embed if dim == 1 else 0
                return states

            hide_by(model, hide)
            shares = (
                forward(input_values=batch["input_values"][row : row + 1, :length]).logits[0].float().log_softmax(-1)
            )
            counts = (torch.tensor(len(shares)), torch.tensor(len(labels)))
            losses.append(F.ctc_loss(shares, labels, *counts, blank=self._blank, reduction="sum"))
        return Reference(torch.stack(losses).sum())


OBJECTIVE = CTCObjective
