"""Arguments of models that hear recordings in conversations: Qwen2-Audio (arXiv:2407.10759), Qwen2.5-Omni, Voxtral."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from mgpu_pipe.architectures.family import FEWEST_FRAMES, sound_tokens
from mgpu_pipe.data.step_batch import Field
from mgpu_pipe.models.speech import spectrogram_shape
from mgpu_pipe.objectives.picture_inputs import MOST_PLACES, Batch, NativeSizePictures, Picture, PictureInputs

MOST_FRAMES = 24
"""Most frames of a random recording that is read in chunks."""


@dataclass(frozen=True)
class Recording(Picture):
    """Recording of a conversation: ``values`` is its spectrogram with the silence after it, (1, bands, frames).

    Attributes:
        frames: without that silence.
    """

    frames: int = 0

    @classmethod
    def from_spectrogram(cls, values: torch.Tensor, frames: int) -> Recording:
        return cls(values, (1, sound_tokens(frames), 1), frames=frames)


class ChatRecordings(PictureInputs):
    """``recordings``, frames of each recording of a row, int64, (rows, most), 0 after the last; ``input_features``,
    their spectrograms, float32, (rows, most, bands, frames)."""

    def __init__(self, config: Any, packed: bool = False) -> None:
        self.token = self.audio = int(config.audio_token_id)
        self.video = None
        self._shape = spectrogram_shape(config.audio_config)
        self.most_tokens = self._tokens(self._shape[1])
        self.fields = {
            **({"position_ids": Field(counting=True)} if packed else {}),
            "recordings": Field(sequence_dim=None, stages="first", shape=(1,)),
            "input_features": Field(sequence_dim=None, stages="first", dtype="float32", shape=(1, *self._shape)),
        }

    def inputs(self, batch: Batch) -> dict[str, Any]:
        ids, positions = batch["input_ids"], {name: batch[name] for name in ("position_ids",) if name in batch}
        if "input_features" not in batch:
            return {"input_ids": ids, **positions, "use_cache": False}
        there = batch["recordings"] > 0
        features, frames = batch["input_features"][there], batch["recordings"][there]
        if not len(features):
            blank = self.blank()
            ids, features = self.append_blank_row(ids), blank.values.to(features)
            frames = frames.new_tensor([blank.frames])
            row = torch.arange(ids.shape[1], device=ids.device)[None]
            positions = {name: torch.cat([value, row]) for name, value in positions.items()}
        return {"input_ids": ids, **positions, **self._sound(features, frames), "use_cache": False}

    def _tokens(self, frames: int) -> int:
        """Tokens of a recording of ``frames``."""
        return int(sound_tokens(frames))

    def _recording(self, values: torch.Tensor, frames: int) -> Recording:
        return Recording(values, (1, self._tokens(frames), 1), frames=frames)

    def _sound(self, features: torch.Tensor, frames: torch.Tensor) -> dict[str, torch.Tensor]:
        inside = torch.arange(self._shape[1], device=frames.device) < frames[:, None]
        return {"input_features": features, "feature_attention_mask": inside.long()}

    def single_row(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        if not pictures:
            return {"input_ids": ids[None]}
        features = torch.cat([recording.values for recording in pictures])
        frames = torch.tensor([cast(Recording, recording).frames for recording in pictures], device=ids.device)
        return {"input_ids": ids[None], **self._sound(features, frames)}

    def random_picture(self, generator: torch.Generator) -> Recording:
        frames = int(torch.randint(FEWEST_FRAMES, self._shape[1] + 1, (), generator=generator))
        return self._recording(torch.randn(1, *self._shape, generator=generator), frames)

    def blank(self) -> Recording:
        return self._recording(torch.zeros(1, *self._shape), FEWEST_FRAMES)

    def collate(self, ids: torch.Tensor, rows: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        most = max(map(len, rows))
        frames, features = torch.zeros(len(rows), most, dtype=torch.int64), torch.zeros(len(rows), most, *self._shape)
        for row, recordings in enumerate(rows):
            for place, recording in enumerate(recordings):
                frames[row, place] = cast(Recording, recording).frames
                features[row, place] = recording.values[0]
        return {"recordings": frames, "input_features": features}

    def row_pictures(self, batch: Batch, row: int) -> list[Picture]:
        pairs = zip(batch["input_features"][row], batch["recordings"][row].tolist(), strict=True)
        return [self._recording(values[None], frames) for values, frames in pairs if frames]


class FilledRecordings(ChatRecordings):
    """Recordings of Voxtral, whose window has tokens for the silence after a recording."""

    def __init__(self, config: Any, packed: bool = False) -> None:
        audio = config.audio_config
        self._filled = int(audio.max_source_positions * audio.hidden_size // audio.intermediate_size)
        super().__init__(config, packed)

    def _tokens(self, frames: int) -> int:
        return self._filled

    def _sound(self, features: torch.Tensor, frames: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input_features": features}


class PicturesAndRecordings(NativeSizePictures):
    """Pictures in native size, and ``recordings``, frames of each recording of a row, int64, (rows, most), 0 after the
    last; ``input_features``, their frames, float32, (rows, most frames, bands), padded with zeros at the end.

    Recordings have positions like text.
    """

    def __init__(self, config: Any, packed: bool = False) -> None:
        super().__init__(config, packed)
        self.video, self._video, self.audio = None, self.token, int(config.audio_token_id)
        self._bands = int(config.audio_config.num_mel_bins)
        self.most_tokens = max(math.prod(MOST_PLACES), int(sound_tokens(MOST_FRAMES)))
        self.fields = {
            **self.fields,
            "recordings": Field(sequence_dim=None, stages="first", shape=(1,)),
            "input_features": Field(sequence_dim=None, stages="first", dtype="float32", shape=(1, self._bands)),
        }

    def placeholder_of(self, picture: Picture) -> int:
        return cast(int, self.audio) if isinstance(picture, Recording) else self.token

    def inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = super().inputs(batch)
        if "input_features" not in batch:
            return inputs
        values, frames = batch["input_features"], batch["recordings"]
        inside = torch.arange(values.shape[1], device=values.device) < frames.sum(1, keepdim=True)
        values, frames = values[inside], frames[frames > 0]
        if not len(frames):
            blank = self.blank_recording()
            values, frames = blank.values[0].T.to(values), frames.new_tensor([blank.frames])
            row = inputs["input_ids"].new_zeros(1, inputs["input_ids"].shape[1])
            row[:, : blank.tokens] = self.audio
            inputs["input_ids"] = torch.cat([inputs["input_ids"], row])
            text = torch.arange(row.shape[1], device=row.device).expand(len(inputs["position_ids"]), 1, -1)
            inputs["position_ids"] = torch.cat([inputs["position_ids"], text], 1)
        return {**inputs, **_chunks(values.split(frames.tolist()), frames)}

    def single_row(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        batch = {name: value.to(ids.device) for name, value in self.collate(ids[None].cpu(), [pictures]).items()}
        positions = batch["position_ids"].transpose(0, 1)
        inputs: dict[str, Any] = {"input_ids": ids[None], "position_ids": positions}
        if seen := [picture for picture in pictures if not isinstance(picture, Recording)]:
            inputs |= self.image_and_video_inputs(seen)
        if recordings := [picture for picture in pictures if isinstance(picture, Recording)]:
            frames = torch.tensor([recording.frames for recording in recordings], device=ids.device)
            inputs |= _chunks([recording.values[0].T for recording in recordings], frames)
        return inputs

    def random_picture(self, generator: torch.Generator) -> Picture:
        if int(torch.randint(2, (), generator=generator)):
            _, down, across = super().random_picture(generator).places
            values = torch.randn(down * across * self.grid.merge**2, self.grid.values, generator=generator)
            return Picture(values, (1, down, across))
        frames = int(torch.randint(FEWEST_FRAMES, MOST_FRAMES + 1, (), generator=generator))
        return Recording.from_spectrogram(torch.randn(1, self._bands, frames, generator=generator), frames)

    def missing(self, pictures: Sequence[Picture]) -> list[Picture]:
        kinds = {isinstance(picture, Recording) for picture in pictures}
        return [*([] if False in kinds else [self.blank()]), *([] if True in kinds else [self.blank_recording()])]

    def blank_recording(self) -> Recording:
        """Shortest recording, all zeros."""
        return Recording.from_spectrogram(torch.zeros(1, self._bands, FEWEST_FRAMES), FEWEST_FRAMES)

    def is_placeholder(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids == self.token) | (ids == self.audio)

    def collate(self, ids: torch.Tensor, rows: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        pictures = [[picture for picture in row if not isinstance(picture, Recording)] for row in rows]
        recordings = [[picture for picture in row if isinstance(picture, Recording)] for row in rows]
        frames = torch.zeros(len(rows), max(map(len, recordings)), dtype=torch.int64)
        most = max(sum(recording.frames for recording in row) for row in recordings)
        features = torch.zeros(len(rows), most, self._bands)
        for row, several in enumerate(recordings):
            if several:
                frames[row, : len(several)] = torch.tensor([recording.frames for recording in several])
                values = torch.cat([recording.values[0].T for recording in several])
                features[row, : len(values)] = values
        # Recordings have a text's positions.
        seen_tokens = ids.masked_fill(ids != self.token, -1)
        return {**super().collate(seen_tokens, pictures), "recordings": frames, "input_features": features}

    def row_pictures(self, batch: Batch, row: int) -> list[Picture]:
        ids, frames = batch["input_ids"][row], batch["recordings"][row]
        counts = frames[frames > 0].tolist()
        values = batch["input_features"][row][: sum(counts)].split(counts)
        recordings = iter([Recording.from_spectrogram(part.T[None], len(part)) for part in values])
        pictures, ordered = iter(super().row_pictures(batch, row)), list[Picture]()
        placeholders = ids[self.is_placeholder(ids)].tolist()
        while (position := sum(picture.tokens for picture in ordered)) < len(placeholders):
            ordered.append(next(recordings if placeholders[position] == self.audio else pictures))
        return ordered


def _chunks(recordings: Sequence[torch.Tensor], frames: torch.Tensor) -> dict[str, torch.Tensor]:
    """Model arguments of recordings, (frames, bands) each."""
    padded = torch.nn.utils.rnn.pad_sequence(list(recordings), batch_first=True).transpose(1, 2)
    inside = torch.arange(padded.shape[2], device=frames.device) < frames[:, None]
    return {"input_features": padded, "feature_attention_mask": inside.long()}
