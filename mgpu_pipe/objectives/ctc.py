"""Speech recognition by connectionist temporal classification (Graves et al. 2006): characters without their times.

A recording's loss does not depend on the rest of its micro-batch: padding is masked, and the first norm of a waveform's
encoder uses only the recording's samples. The frames and features hidden in training (SpecAugment) are drawn by the
run's seed and the sample's number in the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mgpu_pipe.architectures.family import Frames
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.recordings import Spans, random_of_spans
from mgpu_pipe.data.samples import ChangedSamples, SampleSet
from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.models.speech import HIDDEN_INPUTS, make_padding_invariant
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Objective, Reference
from mgpu_pipe.objectives.ctc_keys import DESCRIPTION
from mgpu_pipe.objectives.transcripts import count_errors, transcribe
from mgpu_pipe.parallel.random_streams import step_seed
from mgpu_pipe.system.compat.transformers_private import hide_by

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERIFY_MAX_FRAMES = 24
"""Most frames of a recording of ``verify``."""


@dataclass(frozen=True)
class SpecAugment:
    """Random spans of frames and features to hide in training."""

    frames: Frames
    time: Spans
    features: Spans
    width: int

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SpecAugment:
        time, features = (Spans.from_fields(fields, which) for which in ("time", "feature"))
        return cls(Frames.from_fields(fields), time, features, int(fields["hidden_size"]))

    @property
    def is_active(self) -> bool:
        return self.time.share > 0 or self.features.share > 0

    def draw_masks(self, lengths: list[int], numbers: list[int], seed: int) -> dict[str, torch.Tensor]:
        """``hidden_frames`` and ``hidden_features`` of recordings of ``lengths`` samples; held-out ones hide none."""
        frames = [max(1, self.frames.num_frames(length)) for length in lengths]
        times = np.zeros((len(lengths), max(frames)), np.bool_)
        features = np.zeros((len(lengths), self.width), np.bool_)
        for row, (count, number) in enumerate(zip(frames, numbers, strict=True)):
            if number >= 0:
                random = random_of_spans(seed, number)
                times[row, :count] = self.time.draw_mask(count, random)
                features[row] = self.features.draw_mask(self.width, random)
        return {"hidden_frames": torch.from_numpy(times), "hidden_features": torch.from_numpy(features)}


@dataclass(frozen=True)
class HiddenSamples(ChangedSamples):
    """Recordings with frames and features hidden as they are read."""

    augment: SpecAugment
    seed: int

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        read = self.read.batch(indices, numbers)
        return {**read, **self.augment.draw_masks(read["lengths"].tolist(), numbers.tolist(), self.seed)}


class CTCObjective(Objective):
    """Negative log-likelihood of transcripts under a Hugging Face model ``...ForCTC``, a mean over characters."""

    description = DESCRIPTION
    num_sums = 5

    def __init__(self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        config = cast(Any, model.config)
        make_padding_invariant(cast(Any, model))
        self._augment, self._blank = SpecAugment.from_fields(config.to_dict()), int(config.pad_token_id)
        self._frames = self._augment.frames

    @classmethod
    def samples(cls, config: RunConfig, samples: SampleSet) -> SampleSet:
        augment = SpecAugment.from_fields(resolved_fields(config.model))
        return HiddenSamples(samples, augment, config.seed) if augment.is_active else samples

    @property
    def batch_spec(self) -> BatchSpec:
        """``input_values``, float32, (rows, samples); ``lengths``, the samples without padding, and
        ``between_words``, the label between words, int64, (rows,); ``labels``, int64, (rows, characters);
        ``hidden_frames`` and ``hidden_features``, boolean, (rows, frames) and (rows, width)."""
        config = cast(Any, self.model.config)
        fields = {
            "input_values": Field(dtype="float32"),
            "lengths": Field(sequence_dim=None),
            "between_words": Field(sequence_dim=None),
            "labels": Field(padding=IGNORE_INDEX, target=True),
        }
        if self._augment.is_active:
            fields["hidden_frames"] = Field(dtype="bool")
            fields["hidden_features"] = Field(sequence_dim=None, dtype="bool", shape=(int(config.hidden_size),))
        return BatchSpec(fields)

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        values = batch["input_values"]
        inside = torch.arange(values.shape[1], device=values.device) < self._lengths(batch)[:, None]
        hidden = {name: batch[name] for name in HIDDEN_INPUTS if name in batch}
        return {"input_values": values, "attention_mask": inside.long(), **hidden}

    def _lengths(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Samples of each row, at least enough for one frame, so that attention has something to read."""
        return batch["lengths"].clamp_min(self._frames.min_samples(1))

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss(batch, self._log_probabilities(batch))

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        log_probabilities = self._log_probabilities(batch)
        frames = self._frames.num_frames(self._lengths(batch)).tolist()
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
        """Log-probabilities of each frame, float64, (rows, frames, characters).

        The gradient subtracts logarithms as large as a recording's loss, some thousands. In float32 they are off by
        1e-4 (measured in one process with other micro-batches).
        """
        return cast(torch.Tensor, self.model(**self.model_inputs(batch)).logits.double().log_softmax(-1))

    def _loss(self, batch: Mapping[str, torch.Tensor], log_probabilities: torch.Tensor) -> torch.Tensor:
        labels = batch["labels"]
        characters = (labels != IGNORE_INDEX).sum(1)
        # Its gradient on GPUs is not deterministic, so torch refuses it in deterministic mode.
        where = torch.device("cpu") if torch.are_deterministic_algorithms_enabled() else log_probabilities.device
        losses = F.ctc_loss(
            log_probabilities.transpose(0, 1).to(where),
            labels.clamp_min(0).to(where),
            self._frames.num_frames(self._lengths(batch)).to(where),
            characters.to(where),
            blank=self._blank,
            reduction="none",
        ).to(log_probabilities.device)
        return torch.where(characters > 0, losses, 0.0).sum(dtype=torch.float64)

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Noise of uneven lengths. In every third step the last recording has no transcript."""
        generator = torch.Generator().manual_seed(step_seed(seed, step, -1))
        config, frames = cast(Any, self.model.config), self._frames
        counts = torch.randint(VERIFY_MAX_FRAMES // 2, VERIFY_MAX_FRAMES + 1, (samples,), generator=generator)
        lengths = torch.tensor([frames.min_samples(count) for count in counts.tolist()])
        values = torch.randn(samples, int(lengths.max()), generator=generator)
        labels = torch.randint(0, int(config.vocab_size) - 1, (samples, VERIFY_MAX_FRAMES // 4), generator=generator)
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
        if self._augment.is_active:
            numbers = list(range(step * samples, (step + 1) * samples))
            batch.update(self._augment.draw_masks(lengths.tolist(), numbers, seed))
        return batch

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One recording at a time, without padding and masks; hidden frames are replaced one by one."""
        losses, base = [], cast(Any, model.base_model)
        for row, length in enumerate(batch["lengths"].tolist()):
            labels = batch["labels"][row]
            labels = labels[labels != IGNORE_INDEX]
            if not len(labels):
                continue

            def hide(states: torch.Tensor, *_: Any, row: int = row, **__: Any) -> torch.Tensor:
                for name, dim in (("hidden_frames", 1), ("hidden_features", 2)):
                    for index in batch[name][row].nonzero().flatten().tolist() if name in batch else ():
                        states = states.clone()
                        states.select(dim, index)[:] = base.masked_spec_embed if dim == 1 else 0
                return states

            hide_by(model, hide)
            shares = (
                forward(input_values=batch["input_values"][row : row + 1, :length]).logits[0].double().log_softmax(-1)
            )
            counts = (torch.tensor(len(shares)), torch.tensor(len(labels)))
            losses.append(F.ctc_loss(shares, labels, *counts, blank=self._blank, reduction="sum"))
        return Reference(torch.stack(losses).sum())


OBJECTIVE = CTCObjective
