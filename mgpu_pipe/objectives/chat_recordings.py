"""Arguments of models that hear recordings in conversations (Qwen2-Audio, arXiv:2407.10759)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from mgpu_pipe.architectures.family import FEWEST_FRAMES, sound_tokens
from mgpu_pipe.data.step_batch import Field
from mgpu_pipe.models.speech import spectrogram_shape
from mgpu_pipe.objectives.picture_inputs import Batch, Picture, PictureInputs


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
        self.token, self.video = int(config.audio_token_id), None
        self._shape = spectrogram_shape(config.audio_config)
        self.most_tokens = int(sound_tokens(self._shape[1]))
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
        return Recording.from_spectrogram(torch.randn(1, *self._shape, generator=generator), frames)

    def blank(self) -> Recording:
        return Recording.from_spectrogram(torch.zeros(1, *self._shape), FEWEST_FRAMES)

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
        return [Recording.from_spectrogram(values[None], frames) for values, frames in pairs if frames]
