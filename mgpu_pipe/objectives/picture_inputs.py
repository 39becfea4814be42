"""Arguments of vision-language models for micro-batches whose rows have different numbers of pictures.

LLaVA takes pictures of one size, SmolVLM parts of one size. Qwen-VL takes patches of pictures in their native sizes,
their grids, and positions along three axes. A micro-batch without pictures gets a blank one in an extra row that counts
nothing.

A video is a picture with several times in its grid. Qwen-VL's tower treats both alike, and positions are computed
before. So both pass through it at once, with the picture token in all their places. No process waits for another whose
rows have only the other kind.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from mgpu_pipe.architectures.find import image_token
from mgpu_pipe.architectures.pictures import Grid
from mgpu_pipe.data.images.grids import AXES, row_positions, seen_apart
from mgpu_pipe.data.step_batch import IGNORE_INDEX, Field
from mgpu_pipe.models.fields import picture_shape, picture_tokens

Batch = Mapping[str, torch.Tensor]
MOST_PLACES = (2, 3)
"""Most places down and across of a random picture in native size."""
MOST_TIMES = 2
"""Most times of a random video."""
NOT_ZERO = 2.0**-24
"""Smallest number above zero in every precision."""


@dataclass(frozen=True)
class Picture:
    """Picture or video in the form that the model takes.

    Attributes:
        values: fixed size: the picture or its parts, (parts, channels, height, width); else patches.
        places: numbers of tokens in time, down and across, in the language model's row.
        seconds: time between frames of a video; None for a picture.
        times: times of a video whose text states them.
    """

    values: torch.Tensor
    places: tuple[int, int, int]
    seconds: float | None = None
    times: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        return math.prod(self.places)


class PictureInputs(ABC):
    """Picture fields of a micro-batch and model arguments for a kind of vision-language model.

    Attributes:
        token, video: ids of the placeholder tokens of pictures and of videos; None if the model sees no videos.
        audio: id of the placeholder token of recordings; None if the model hears none.
        fields: fields of a micro-batch in addition to ids and labels.
        most_tokens: most tokens of a random picture.
    """

    fields: Mapping[str, Field]
    most_tokens: int
    audio: int | None = None

    def __init__(self, config: Any) -> None:
        self.token = cast(int, image_token(config))
        self.video: int | None = None

    @abstractmethod
    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Model arguments for a micro-batch, perhaps with one more row.

        Later pipeline stages have no picture fields; their arguments have no pictures and no extra row.
        """

    @abstractmethod
    def single_row(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        """Arguments of the plain transformers model for one row of token ids.

        Args:
            answer: index of the first answer token.
        """

    @abstractmethod
    def random_picture(self, generator: torch.Generator) -> Picture:
        """Random picture."""

    @abstractmethod
    def blank(self) -> Picture:
        """Smallest picture, all zeros."""

    def missing(self, pictures: Sequence[Picture]) -> list[Picture]:
        """Blanks of the kinds that a micro-batch with these ``pictures`` lacks."""
        return [] if pictures else [self.blank()]

    @abstractmethod
    def collate(self, ids: torch.Tensor, rows: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        """:attr:`fields` of rows of token ids with their pictures."""

    @abstractmethod
    def row_pictures(self, batch: Batch, row: int) -> list[Picture]:
        """PictureInputs of a row of a random batch."""

    def text_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Model arguments in addition to the ids, for questions without pictures."""
        return {}

    def conversation_positions(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """Positions, (rows, tokens), that restart with each conversation of a packed row; None without packing."""
        return inputs.get("position_ids")

    def placeholder_of(self, picture: Picture) -> int:
        """Id of the placeholder token of ``picture``."""
        return self.token if picture.seconds is None or self.video is None else self.video

    def is_placeholder(self, ids: torch.Tensor) -> torch.Tensor:
        """Mask of the placeholder tokens of pictures and videos."""
        return (ids == self.token) | (ids == (self.token if self.video is None else self.video))

    def append_blank_row(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` with an extra row that holds the blank picture's placeholders."""
        row = ids.new_zeros(1, ids.shape[1])
        row[:, : self.blank().tokens] = self.token
        return torch.cat([ids, row])


class FixedSizePictures(PictureInputs):
    """``pictures``, number of pictures or parts in each row, int64, (rows,); ``pixel_values``, float32, (rows, most,
    channels, height, width), padded at the end."""

    def __init__(self, config: Any, packed: bool = False) -> None:
        super().__init__(config)
        self._shape, self.most_tokens = picture_shape(config), picture_tokens(config)
        self.fields = {
            **({"position_ids": Field(counting=True)} if packed else {}),
            "pictures": Field(sequence_dim=None, stages="first"),
            "pixel_values": Field(sequence_dim=None, stages="first", dtype="float32", shape=(1, *self._shape)),
        }

    def inputs(self, batch: Batch) -> dict[str, Any]:
        ids, positions = batch["input_ids"], {name: batch[name] for name in ("position_ids",) if name in batch}
        if "pixel_values" not in batch:
            return {"input_ids": ids, **positions, "use_cache": False}
        pixels = batch["pixel_values"]
        there = torch.arange(pixels.shape[1], device=pixels.device) < batch["pictures"].unsqueeze(1)
        pixels = pixels[there]
        if not len(pixels):
            ids, pixels = self.append_blank_row(ids), self.blank().values.to(pixels)
            row = torch.arange(ids.shape[1], device=ids.device)[None]
            positions = {name: torch.cat([value, row]) for name, value in positions.items()}
        return {"input_ids": ids, **positions, "pixel_values": self._model_pixels(pixels), "use_cache": False}

    def _model_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels in the shape that the model takes."""
        return pixels

    def single_row(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        if not pictures:
            return {"input_ids": ids[None]}
        pixels = torch.cat([picture.values for picture in pictures])
        return {"input_ids": ids[None], "pixel_values": self._model_pixels(pixels)}

    def random_picture(self, generator: torch.Generator) -> Picture:
        return Picture(torch.randn(1, *self._shape, generator=generator), (1, self.most_tokens, 1))

    def blank(self) -> Picture:
        return Picture(torch.zeros(1, *self._shape), (1, self.most_tokens, 1))

    def collate(self, ids: torch.Tensor, rows: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        parts = [sum(len(picture.values) for picture in pictures) for pictures in rows]
        pixels = torch.zeros(len(rows), max(parts), *self._shape)
        for row, pictures in enumerate(rows):
            if pictures:
                pixels[row, : parts[row]] = torch.cat([picture.values for picture in pictures])
        return {"pictures": torch.tensor(parts), "pixel_values": pixels}

    def row_pictures(self, batch: Batch, row: int) -> list[Picture]:
        pixels = batch["pixel_values"][row][: int(batch["pictures"][row])]
        return [Picture(picture[None], (1, self.most_tokens, 1)) for picture in pixels]


class TiledPictures(FixedSizePictures):
    """Fixed-size parts and whole pictures, passed to the model as those of one row."""

    def _model_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels of one row, none all zero: the model skips all-zero pictures as padding."""
        pixels = pixels.clone()
        corner = pixels[:, 0, 0, 0]
        pixels[:, 0, 0, 0] = torch.where(pixels.flatten(1).any(1), corner, torch.full_like(corner, NOT_ZERO))
        return pixels[None]


class PrefixPictures(FixedSizePictures):
    """Fixed-size pictures of a model whose attention is bidirectional up to the first learned token, then causal."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = super().inputs(batch)
        types = torch.zeros_like(inputs["input_ids"])
        if "labels" in batch:  # shifted: the label of the token before an answer is its first token
            learned = batch["labels"] != IGNORE_INDEX
            types[: len(learned)] = learned.cumsum(1) > learned.int()
        return {**inputs, "token_type_ids": types}

    def single_row(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        types = torch.arange(len(ids), device=ids.device) >= answer
        return {**super().single_row(ids, pictures, answer), "token_type_ids": types[None].long()}

    def text_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"token_type_ids": torch.zeros_like(ids)}


class WholePictures(FixedSizePictures):
    """Fixed-size pictures of a model whose attention is bidirectional within a picture, else causal."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = super().inputs(batch)
        return {**inputs, **self.text_inputs(inputs["input_ids"])}

    def single_row(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        inputs = super().single_row(ids, pictures, answer)
        return {**inputs, **self.text_inputs(inputs["input_ids"])}

    def text_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"token_type_ids": (ids == self.token).long()}


class NativeSizePictures(PictureInputs):
    """``position_ids``, int64, (rows, 3, seq_len); packed rows (rows, 4, seq_len), first the position of a token in its
    conversation; ``grids``, patches in time, down and across of each picture, int64, (rows, most, 3); ``pixel_values``,
    float32, (rows, most patches, values), padded with zeros at the end."""

    def __init__(self, config: Any, packed: bool = False) -> None:
        super().__init__(config)
        grid = Grid.from_fields(lambda name: getattr(config.vision_config, name, None))
        assert grid is not None
        self.grid, self.most_tokens = grid, math.prod(MOST_PLACES)
        self.video = self._video = int(config.video_token_id)
        if not grid.has_timestamps:
            self.most_tokens *= MOST_TIMES
        self.fields = {
            "position_ids": Field(sequence_dim=2, counting=True, shape=(AXES + packed,)),
            "grids": Field(sequence_dim=None, stages="first", shape=(1, 3)),
            "pixel_values": Field(sequence_dim=None, stages="first", dtype="float32", shape=(1, grid.values)),
        }

    def inputs(self, batch: Batch) -> dict[str, Any]:
        ids, positions = batch["input_ids"], batch["position_ids"].transpose(0, 1)
        ids = ids.masked_fill(ids == self._video, self.token)
        if "pixel_values" not in batch:
            return {"input_ids": ids, "position_ids": positions, "use_cache": False}
        pixels, grids = batch["pixel_values"], batch["grids"]
        patches = grids.prod(-1)
        pixels = pixels[torch.arange(pixels.shape[1], device=pixels.device) < patches.sum(1, keepdim=True)]
        present = grids[patches > 0]
        if not len(present):
            blank = self.blank()
            ids, pixels = self.append_blank_row(ids), blank.values.to(pixels)
            present = grids.new_tensor([[1, self.grid.merge, self.grid.merge]])
            # The blank takes one place along every axis, so text positions fit it.
            row = torch.arange(ids.shape[1], device=ids.device).expand(len(positions), 1, -1)
            positions = torch.cat([positions, row], 1)
        return {
            "input_ids": ids,
            "position_ids": positions,
            "pixel_values": pixels,
            "image_grid_thw": present,
            "use_cache": False,
        }

    def conversation_positions(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        positions: torch.Tensor = inputs["position_ids"]
        return positions[0] if len(positions) > AXES else None

    def single_row(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": ids[None], **self.image_and_video_inputs(pictures)}
        if pictures:
            kinds = (ids == self.token).int()
            inputs["mm_token_type_ids"] = (kinds + 2 * (ids == self._video).int())[None]
        if seconds := [picture.seconds for picture in pictures if picture.seconds is not None]:
            inputs["second_per_grid_ts"] = torch.tensor(seconds, device=ids.device)
        return inputs

    def image_and_video_inputs(self, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """Separate arguments for pictures and for videos."""
        inputs = {}
        for pixels, grid, videos in (
            ("pixel_values", "image_grid_thw", False),
            ("pixel_values_videos", "video_grid_thw", True),
        ):
            if chosen := [picture for picture in pictures if (picture.seconds is not None) == videos]:
                inputs[pixels] = torch.cat([picture.values for picture in chosen])
                inputs[grid] = self._patches([picture.places for picture in chosen]).to(inputs[pixels].device)
        return inputs

    def random_picture(self, generator: torch.Generator) -> Picture:
        down, across = (int(torch.randint(1, most + 1, (), generator=generator)) for most in MOST_PLACES)
        times, seconds = 1, None
        if not self.grid.has_timestamps:  # random videos too; elsewhere each time of a video is a picture
            times = int(torch.randint(0, MOST_TIMES + 1, (), generator=generator))
            times, seconds = max(times, 1), 1.0 if times else None
        patches = times * down * across * self.grid.merge**2
        values = torch.randn(patches, self.grid.values, generator=generator)
        return Picture(values, (times, down, across), seconds)

    def blank(self) -> Picture:
        return Picture(torch.zeros(self.grid.merge**2, self.grid.values), (1, 1, 1))

    def collate(self, ids: torch.Tensor, rows: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        num_grids = [
            sum(picture.places[0] if self.grid.has_timestamps else 1 for picture in pictures) for pictures in rows
        ]
        grids = torch.zeros(len(rows), max(num_grids), 3, dtype=torch.int64)
        amounts = [sum(len(picture.values) for picture in pictures) for pictures in rows]
        pixels = torch.zeros(len(rows), max(amounts), self.grid.values)
        positions = torch.empty(len(rows), AXES, ids.shape[1], dtype=torch.int64)
        for row, pictures in enumerate(rows):
            places = np.array([picture.places for picture in pictures], np.int64).reshape(-1, 3)
            seconds = np.array([picture.seconds or 0 for picture in pictures], np.float64)
            places, steps = seen_apart(self.grid, places, seconds)
            positions[row] = torch.from_numpy(row_positions(self.is_placeholder(ids[row]).numpy(), places, steps))
            grids[row, : len(places)] = self._patches(places)
            if pictures:
                pixels[row, : amounts[row]] = torch.cat([picture.values for picture in pictures])
        return {"position_ids": positions, "grids": grids, "pixel_values": pixels}

    def row_pictures(self, batch: Batch, row: int) -> list[Picture]:
        grids = batch["grids"][row]
        sizes = grids[grids.prod(-1) > 0].prod(-1)
        values = batch["pixel_values"][row][: int(sizes.sum())].split(sizes.tolist())
        tokens = sizes // self.grid.merge**2
        ids = batch["input_ids"][row]
        kinds = ids[self.is_placeholder(ids)][tokens.cumsum(0) - tokens].tolist()
        merge = self.grid.merge
        return [
            Picture(patches, (times, down // merge, across // merge), 1.0 if kind == self.video else None)
            for patches, (times, down, across), kind in zip(values, grids.tolist(), kinds, strict=False)
        ]

    def _patches(self, places: Any) -> torch.Tensor:
        return torch.as_tensor(places) * torch.tensor([1, self.grid.merge, self.grid.merge])
