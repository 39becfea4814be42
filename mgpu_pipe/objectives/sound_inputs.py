"""Recordings as inputs of models: waveforms and spectrograms, and what training hides of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.architectures.family import Frames
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.audio.filter_bank import Window, window_of
from mgpu_pipe.data.audio.listen import Sound
from mgpu_pipe.data.audio.recordings import Spans, random_of_spans
from mgpu_pipe.data.audio.speech_source import AudioConfig
from mgpu_pipe.data.samples import ChangedSamples, SampleSet
from mgpu_pipe.data.step_batch import Field
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.models.speech import (
    HIDDEN_INPUTS,
    make_padding_invariant,
    prepare_spectrogram_encoder,
    spectrogram_shape,
)
from mgpu_pipe.objectives.base import Batch, Forward, Objective
from mgpu_pipe.system.compat.transformers_private import hide_by

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


def hide_spans(samples: SampleSet, model: ModelConfig, seed: int) -> SampleSet:
    """``samples`` with what the model's configuration hides of them in training."""
    augment = SpecAugment.from_fields(resolved_fields(model))
    return HiddenSamples(samples, augment, seed) if augment.is_active else samples


class WaveInputs:
    """Waveforms as the inputs of ``model``, which becomes independent of padding, in place."""

    def __init__(self, model: Any) -> None:
        make_padding_invariant(model)
        self._model, self._width = model, int(model.config.hidden_size)
        self._augment = SpecAugment.from_fields(model.config.to_dict())
        self.frames = self._augment.frames

    @property
    def fields(self) -> dict[str, Field]:
        """``input_values``, float32, (rows, samples); ``lengths``, the samples without padding, int64, (rows,);
        ``hidden_frames`` and ``hidden_features``, boolean, (rows, frames) and (rows, width)."""
        fields = {"input_values": Field(dtype="float32"), "lengths": Field(sequence_dim=None)}
        if self._augment.is_active:
            fields["hidden_frames"] = Field(dtype="bool")
            fields["hidden_features"] = Field(sequence_dim=None, dtype="bool", shape=(self._width,))
        return fields

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        values = batch["input_values"]
        inside = torch.arange(values.shape[1], device=values.device) < self._lengths(batch)[:, None]
        hidden = {name: batch[name] for name in HIDDEN_INPUTS if name in batch}
        return {"input_values": values, "attention_mask": inside.long(), **hidden}

    def num_frames(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Frames of each recording, int64, (rows,)."""
        return cast(torch.Tensor, self.frames.num_frames(self._lengths(batch)))

    def _lengths(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Samples of each row, at least enough for one frame, so that attention has something to read."""
        return batch["lengths"].clamp_min(self.frames.min_samples(1))

    def random_batch(self, generator: torch.Generator, seed: int, step: int, samples: int) -> Batch:
        """Noise of uneven lengths."""
        counts = torch.randint(VERIFY_MAX_FRAMES // 2, VERIFY_MAX_FRAMES + 1, (samples,), generator=generator)
        lengths = torch.tensor([self.frames.min_samples(count) for count in counts.tolist()])
        values = torch.randn(samples, int(lengths.max()), generator=generator)
        outside = torch.arange(values.shape[1]) >= lengths[:, None]
        batch = {"input_values": values.masked_fill(outside, 0), "lengths": lengths}
        if self._augment.is_active:
            numbers = list(range(step * samples, (step + 1) * samples))
            batch.update(self._augment.draw_masks(lengths.tolist(), numbers, seed))
        return batch

    def logits_alone(self, forward: Forward, model: Any, batch: Batch, row: int) -> torch.Tensor:
        """Logits of one recording, (1, ...), without padding and masks; hidden frames are replaced one by one."""

        def hide(states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            for name, dim in (("hidden_frames", 1), ("hidden_features", 2)):
                for index in batch[name][row].nonzero().flatten().tolist() if name in batch else ():
                    states = states.clone()
                    states.select(dim, index)[:] = model.base_model.masked_spec_embed if dim == 1 else 0
            return states

        hide_by(model, hide)
        length = int(batch["lengths"][row])
        return cast(torch.Tensor, forward(input_values=batch["input_values"][row : row + 1, :length]).logits)


@dataclass(frozen=True)
class Spectrograms(ChangedSamples):
    """Spectrograms of recordings; training ones may have hidden spans."""

    window: Window
    hidden: tuple[Spans, Spans]
    """Spans of frames, and of bands."""
    seed: int

    @classmethod
    def from_model(cls, samples: SampleSet, window: Window, model: ModelConfig, seed: int) -> Spectrograms:
        """Spectrograms with what the model's configuration hides of them in training."""
        fields = resolved_fields(model)
        hidden = (Spans.from_fields(fields, "time"), Spans.from_fields(fields, "feature"))
        return cls(samples, window, hidden, seed)

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
        others = {name: value for name, value in read.items() if name not in ("input_values", "lengths")}
        return {self.window.input_name: torch.from_numpy(features), **others}


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


class SoundObjective(Objective):
    """Base of objectives on recordings, which a model reads as waveforms or as spectrograms."""

    @classmethod
    def samples(cls, config: RunConfig, samples: SampleSet) -> SampleSet:
        data, model = config.data, config.model
        window = window_of(model, Sound.from_config(data, model).rate) if isinstance(data, AudioConfig) else None
        if window is None:
            return hide_spans(samples, model, config.seed)
        return Spectrograms.from_model(samples, window, model, config.seed)
