"""Arguments of models that hear recordings in conversations: Qwen2-Audio (arXiv:2407.10759), Voxtral, Qwen2.5-Omni."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from mgpu_pipe.architectures.family import FEWEST_FRAMES, SECOND, second_tokens, sound_tokens
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


class NextToRecordings(PictureInputs):
    """Pictures as the class after it gives them, and ``recordings``, frames of each recording of a row, int64,
    (rows, most), 0 after the last; ``input_features``, their frames, float32, (rows, most frames, bands), padded with
    zeros at the end."""

    bands: int
    most_frames = MOST_FRAMES
    """Most frames of a random recording."""

    def _add_recordings(self, config: Any, bands: int) -> None:
        """Adds the fields of recordings of so many bands."""
        self.audio, self.bands = int(config.audio_token_id), bands
        self.most_tokens = max(math.prod(MOST_PLACES), self._tokens(self.most_frames))
        self.fields = {
            **self.fields,
            "recordings": Field(sequence_dim=None, stages="first", shape=(1,)),
            "input_features": Field(sequence_dim=None, stages="first", dtype="float32", shape=(1, bands)),
        }

    def _tokens(self, frames: int) -> int:
        """Tokens of a recording of ``frames``."""
        return int(sound_tokens(frames))

    @abstractmethod
    def _sound(self, recordings: Sequence[torch.Tensor], frames: torch.Tensor) -> dict[str, torch.Tensor]:
        """Model arguments of recordings, (frames, bands) each."""

    def _with_row(self, inputs: dict[str, Any], row: torch.Tensor) -> dict[str, Any]:
        """``inputs`` with a row of token ids, (1, tokens), after the others."""
        return {**inputs, "input_ids": torch.cat([inputs["input_ids"], row])}

    def _recording(self, values: torch.Tensor) -> Recording:
        """Recording of a spectrogram, (1, bands, frames)."""
        frames = values.shape[2]
        return Recording(values, (1, self._tokens(frames), 1), frames=frames)

    def placeholder_of(self, picture: Picture) -> int:
        return cast(int, self.audio) if isinstance(picture, Recording) else self.token

    def inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = super().inputs(batch)  # type: ignore[safe-super]
        if "input_features" not in batch:
            return inputs
        values, frames = batch["input_features"], batch["recordings"]
        inside = torch.arange(values.shape[1], device=values.device) < frames.sum(1, keepdim=True)
        values, frames = values[inside], frames[frames > 0]
        if not len(frames):
            blank = self.blank_recording()
            values, frames = blank.values[0].T.to(values), frames.new_tensor([blank.frames])
            row = inputs["input_ids"].new_zeros(1, inputs["input_ids"].shape[1])
            row[:, : blank.tokens] = cast(int, self.audio)
            inputs = self._with_row(inputs, row)
        return {**inputs, **self._sound(values.split(frames.tolist()), frames)}

    def _sounds_among(self, pictures: Sequence[Picture], device: torch.device) -> dict[str, torch.Tensor]:
        """Model arguments of the recordings among ``pictures``."""
        recordings = [picture for picture in pictures if isinstance(picture, Recording)]
        if not recordings:
            return {}
        frames = torch.tensor([recording.frames for recording in recordings], device=device)
        return self._sound([recording.values[0].T for recording in recordings], frames)

    def random_picture(self, generator: torch.Generator) -> Picture:
        if int(torch.randint(2, (), generator=generator)):
            return self._random_still(generator)
        frames = int(torch.randint(FEWEST_FRAMES, self.most_frames + 1, (), generator=generator))
        return self._recording(torch.randn(1, self.bands, frames, generator=generator))

    def _random_still(self, generator: torch.Generator) -> Picture:
        """Random picture that is no video."""
        return super().random_picture(generator)  # type: ignore[safe-super]

    def missing(self, pictures: Sequence[Picture]) -> list[Picture]:
        kinds = {isinstance(picture, Recording) for picture in pictures}
        return [*([] if False in kinds else [self.blank()]), *([] if True in kinds else [self.blank_recording()])]

    def blank_recording(self) -> Recording:
        """Shortest recording, all zeros."""
        return self._recording(torch.zeros(1, self.bands, FEWEST_FRAMES))

    def is_placeholder(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids == self.token) | (ids == self.audio)

    def collate(self, ids: torch.Tensor, rows: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        pictures = [[picture for picture in row if not isinstance(picture, Recording)] for row in rows]
        recordings = [[picture for picture in row if isinstance(picture, Recording)] for row in rows]
        frames = torch.zeros(len(rows), max(map(len, recordings)), dtype=torch.int64)
        most = max(sum(recording.frames for recording in row) for row in recordings)
        features = torch.zeros(len(rows), most, self.bands)
        for row, several in enumerate(recordings):
            if several:
                frames[row, : len(several)] = torch.tensor([recording.frames for recording in several])
                values = torch.cat([recording.values[0].T for recording in several])
                features[row, : len(values)] = values
        # Recordings have a text's positions.
        seen_tokens = ids.masked_fill(ids != self.token, -1)
        seen = super().collate(seen_tokens, pictures)  # type: ignore[safe-super]
        return {**seen, "recordings": frames, "input_features": features}

    def row_pictures(self, batch: Batch, row: int) -> list[Picture]:
        ids, frames = batch["input_ids"][row], batch["recordings"][row]
        counts = frames[frames > 0].tolist()
        values = batch["input_features"][row][: sum(counts)].split(counts)
        recordings = iter([self._recording(part.T[None]) for part in values])
        pictures = iter(super().row_pictures(batch, row))  # type: ignore[safe-super]
        ordered, placeholders = list[Picture](), ids[self.is_placeholder(ids)].tolist()
        while (position := sum(picture.tokens for picture in ordered)) < len(placeholders):
            ordered.append(next(recordings if placeholders[position] == self.audio else pictures))
        return ordered


class PicturesAndRecordings(NextToRecordings, NativeSizePictures):
    """Pictures in native size and recordings, which have positions like text (Qwen2.5-Omni)."""

    def __init__(self, config: Any, packed: bool = False) -> None:
        super().__init__(config, packed)
        self.video, self._video = None, self.token
        self._add_recordings(config, int(config.audio_config.num_mel_bins))

    def _sound(self, recordings: Sequence[torch.Tensor], frames: torch.Tensor) -> dict[str, torch.Tensor]:
        padded, inside = padded_recordings(recordings, frames)
        return {"input_features": padded.transpose(1, 2), "feature_attention_mask": inside.long()}

    def _with_row(self, inputs: dict[str, Any], row: torch.Tensor) -> dict[str, Any]:
        positions = inputs["position_ids"]
        text = torch.arange(row.shape[1], device=row.device).expand(len(positions), 1, -1)
        return {**super()._with_row(inputs, row), "position_ids": torch.cat([positions, text], 1)}

    def single_row(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        batch = {name: value.to(ids.device) for name, value in self.collate(ids[None].cpu(), [pictures]).items()}
        inputs: dict[str, Any] = {"input_ids": ids[None], "position_ids": batch["position_ids"].transpose(0, 1)}
        if seen := [picture for picture in pictures if not isinstance(picture, Recording)]:
            inputs |= self.image_and_video_inputs(seen)
        return {**inputs, **self._sounds_among(pictures, ids.device)}

    def _random_still(self, generator: torch.Generator) -> Picture:
        _, down, across = super()._random_still(generator).places
        values = torch.randn(down * across * self.grid.merge**2, self.grid.values, generator=generator)
        return Picture(values, (1, down, across))


class PicturesAndSeconds(PicturesAndRecordings):
    """Pictures in native size and recordings whose seconds are read alone (Qwen3-Omni)."""

    most_frames = SECOND + MOST_FRAMES

    def _tokens(self, frames: int) -> int:
        return int(second_tokens(frames))


def padded_recordings(recordings: Sequence[torch.Tensor], frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Recordings, (frames, bands) each, padded to one length, and which frames are theirs."""
    padded = torch.nn.utils.rnn.pad_sequence(list(recordings), batch_first=True)
    return padded, torch.arange(padded.shape[1], device=frames.device) < frames[:, None]
