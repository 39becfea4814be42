"""Recordings as spectrograms of a fixed window: their field in a batch, what training hides, their plain forward.

A recording fills the window, so its result does not depend on its micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.filter_bank import FilterBank
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.audio.recordings import Spans, random_of_spans
from mgpu_pipe.data.samples import ChangedSamples, SampleSet
from mgpu_pipe.data.step_batch import Field
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.models.speech import prepare_spectrogram_encoder, spectrogram_shape
from mgpu_pipe.objectives.base import Batch, Forward


@dataclass(frozen=True)
class Spectrograms(ChangedSamples):
    """Spectrograms of recordings; training ones may have hidden spans."""

    window: LogMel | FilterBank
    hidden: tuple[Spans, Spans]
    """Spans of frames, and of bands."""
    seed: int

    @classmethod
    def from_config(cls, config: RunConfig, samples: SampleSet, window: LogMel | FilterBank) -> Spectrograms:
        """Spectrograms with what the model's configuration hides of them in training."""
        fields = resolved_fields(config.model)
        hidden = (Spans.from_fields(fields, "time"), Spans.from_fields(fields, "feature"))
        return cls(samples, window, hidden, config.seed)

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        read = self.read.batch(indices, numbers)
        lengths = read["lengths"].tolist()
        waves = [wave[:length] for wave, length in zip(read["input_values"].numpy(), lengths, strict=True)]
        features = self.window.extract(waves)
        hides = any(spans.share for spans in self.hidden)
        for row, (length, number) in enumerate(zip(lengths, numbers.tolist(), strict=True)):
            if hides and number >= 0:  # held-out recordings hide nothing
                random, frames = random_of_spans(self.seed, number), length // self.window.hop
                bands = self.window.by_band(features[row])
                bands[:, :frames][:, self.hidden[0].draw_mask(frames, random)] = 0
                bands[self.hidden[1].draw_mask(self.window.bins, random)] = 0
        return {self.window.input_name: torch.from_numpy(features), "labels": read["labels"]}


class SpectrogramInputs:
    """Spectrograms as the input of ``model``, which is prepared for them in place."""

    def __init__(self, model: Any) -> None:
        prepare_spectrogram_encoder(model)
        self._name, self._shape = str(model.main_input_name), spectrogram_shape(model.config)

    @property
    def fields(self) -> dict[str, Field]:
        """``input_features``, float32, (rows, bands, frames), or ``input_values``, (rows, frames, bands)."""
        return {self._name: Field(sequence_dim=None, dtype="float32", shape=self._shape)}

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {self._name: batch[self._name]}

    def random_batch(self, generator: torch.Generator, seed: int, step: int, samples: int) -> Batch:
        """Noise."""
        return {self._name: torch.randn(samples, *self._shape, generator=generator)}

    def logits_alone(self, forward: Forward, model: Any, batch: Batch, row: int) -> torch.Tensor:
        """Logits of one recording, (1, ...)."""
        return cast(torch.Tensor, forward(**{self._name: batch[self._name][row : row + 1]}).logits)
