"""How vision-language models are given the pictures of a micro-batch, whose rows have different numbers of them.

LLaVA takes pictures of one size, SmolVLM parts of one size, Qwen-VL patches of pictures in sizes of their own, their
grids, and positions along three axes. A micro-batch without any picture gets a blank one, in a row of its own that
counts nothing.

A video is a picture with several times in its grid. Qwen-VL's tower sees both alike, and the positions are made before;
so both go through it in one pass, with the token of a picture in each of their places, and no process waits for another
whose rows have only the other kind.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mgpu_pipe.data.batch_spec import Field
from mgpu_pipe.data.image.grids import AXES, row_positions, seen_apart
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.families.pictures import READ_QUESTIONS_WHOLE, SEE_PARTS, Grid
from mgpu_pipe.models.fields import picture_shape, places_of

Batch = Mapping[str, torch.Tensor]
MOST_PLACES = (2, 3)
"""Down and across, of a random picture in a size of its own."""
MOST_TIMES = 2
"""Of a random video."""
NOT_ZERO = 2.0**-24
"""The smallest number that is above zero in every precision."""


@dataclass(frozen=True)
class Picture:
    """One picture as the model takes it.

    Attributes:
        values: of those of one size the picture or its parts, (parts, channels, height, width); else patches.
        places: in time, down and across, in the language model's row.
        seconds: from each time of a video to the next; None of a picture.
        times: of a video, where the text tells them.
    """

    values: torch.Tensor
    places: tuple[int, int, int]
    seconds: float | None = None
    times: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        return math.prod(self.places)


class Pictures(ABC):
    """What a kind of model wants to be given.

    Attributes:
        token, video: the ids of the tokens that stand for a picture, and for a video, where the model sees any.
        fields: of a micro-batch, beside its ids and labels.
        most_tokens: of a random picture.
    """

    fields: Mapping[str, Field]
    most_tokens: int

    def __init__(self, config: Any) -> None:
        self.token = int(config.image_token_id)
        self.video: int | None = None

    @abstractmethod
    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The model's arguments for a micro-batch, which may have one row more than it.

        Without pictures, and as many rows, where the micro-batch has no field of them: that of a later pipeline stage.
        """

    @abstractmethod
    def alone(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        """transformers' own arguments for one row of token ids.

        Args:
            answer: where it begins.
        """

    @abstractmethod
    def drawn(self, generator: torch.Generator) -> Picture:
        """A random picture."""

    @abstractmethod
    def blank(self) -> Picture:
        """The smallest picture, of zeros."""

    @abstractmethod
    def collated(self, ids: torch.Tensor, rows: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        """:attr:`fields` of rows of token ids with these pictures."""

    @abstractmethod
    def of_row(self, batch: Batch, row: int) -> list[Picture]:
        """The pictures of a row of a random batch."""

    def asked(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the model gets beside the ids of questions without any picture."""
        return {}

    def apart(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """The positions, (rows, tokens), that begin again with each conversation of a packed row; None where each has a
        row of its own."""
        return inputs.get("position_ids")

    def token_of(self, picture: Picture) -> int:
        """That which stands in each of its places."""
        return self.token if picture.seconds is None or self.video is None else self.video

    def placed(self, ids: torch.Tensor) -> torch.Tensor:
        """Which tokens stand for pictures or videos."""
        return (ids == self.token) | (ids == (self.token if self.video is None else self.video))

    def with_blank(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` with a row of the blank picture's places."""
        row = ids.new_zeros(1, ids.shape[1])
        row[:, : self.blank().tokens] = self.token
        return torch.cat([ids, row])


class OneSize(Pictures):
    """``pictures``, how many a row has, or parts of them, int64, (rows,); ``pixel_values``, float32, (rows, most,
    channels, height, width), those first that there are."""

    def __init__(self, config: Any, packed: bool = False) -> None:
        super().__init__(config)
        self._shape, self.most_tokens = picture_shape(config), places_of(config)
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
            ids, pixels = self.with_blank(ids), pixels.new_zeros(1, *self._shape)
            counted = torch.arange(ids.shape[1], device=ids.device)[None]
            positions = {name: torch.cat([value, counted]) for name, value in positions.items()}
        return {"input_ids": ids, **positions, "pixel_values": self._given(pixels), "use_cache": False}

    def _given(self, pixels: torch.Tensor) -> torch.Tensor:
        """What the model takes of the pictures."""
        return pixels

    def alone(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        shown = {"pixel_values": self._given(torch.cat([one.values for one in pictures]))} if pictures else {}
        return {"input_ids": ids[None], **shown}

    def drawn(self, generator: torch.Generator) -> Picture:
        return Picture(torch.randn(1, *self._shape, generator=generator), (1, self.most_tokens, 1))

    def blank(self) -> Picture:
        return Picture(torch.zeros(1, *self._shape), (1, self.most_tokens, 1))

    def collated(self, ids: torch.Tensor, rows: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        parts = [sum(len(one.values) for one in pictures) for pictures in rows]
        pixels = torch.zeros(len(rows), max(parts), *self._shape)
        for row, pictures in enumerate(rows):
            if pictures:
                pixels[row, : parts[row]] = torch.cat([one.values for one in pictures])
        return {"pictures": torch.tensor(parts), "pixel_values": pixels}

    def of_row(self, batch: Batch, row: int) -> list[Picture]:
        shown = batch["pixel_values"][row][: int(batch["pictures"][row])]
        return [Picture(one[None], (1, self.most_tokens, 1)) for one in shown]


class InParts(OneSize):
    """The same, of parts of pictures and pictures seen whole, which the model is given as those of one row."""

    def _given(self, pixels: torch.Tensor) -> torch.Tensor:
        """None wholly zero: the model takes such a picture for one that fills up, and leaves it out."""
        pixels = pixels.clone()
        corner = pixels[:, 0, 0, 0]
        pixels[:, 0, 0, 0] = torch.where(pixels.flatten(1).any(1), corner, torch.full_like(corner, NOT_ZERO))
        return pixels[None]


class ReadWhole(OneSize):
    """The same, of a model that reads a row from both sides up to the first token that is learned, and the rest
    forward."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        given = super().inputs(batch)
        types = torch.zeros_like(given["input_ids"])
        if "labels" in batch:  # shifted: that of the last token before an answer is its first
            learned = batch["labels"] != IGNORE_INDEX
            types[: len(learned)] = learned.cumsum(1) > learned.int()
        return {**given, "token_type_ids": types}

    def alone(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        types = torch.arange(len(ids), device=ids.device) >= answer
        return {**super().alone(ids, pictures, answer), "token_type_ids": types[None].long()}

    def asked(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"token_type_ids": torch.zeros_like(ids)}


class OwnSizes(Pictures):
    """``position_ids``, int64, (rows, 3, seq_len), of packed rows (rows, 4, seq_len), first the place of a token in its
    conversation; ``grids``, patches in time, down and across of each picture, int64, (rows, most, 3); ``pixel_values``,
    float32, (rows, most patches, values): what there is first, and then zeros."""

    def __init__(self, config: Any, packed: bool = False) -> None:
        super().__init__(config)
        grid = Grid.of(lambda name: getattr(config.vision_config, name, None))
        assert grid is not None
        self.grid, self.most_tokens = grid, math.prod(MOST_PLACES)
        self.video = self._video = int(config.video_token_id)
        if not grid.told:
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
        shown = grids[patches > 0]
        if not len(shown):
            blank = self.blank()
            ids, pixels = self.with_blank(ids), blank.values.to(pixels)
            shown = grids.new_tensor([[1, self.grid.merge, self.grid.merge]])
            # One place is one token along every axis, so that a text's positions are right for it.
            counted = torch.arange(ids.shape[1], device=ids.device).expand(len(positions), 1, -1)
            positions = torch.cat([positions, counted], 1)
        return {
            "input_ids": ids,
            "position_ids": positions,
            "pixel_values": pixels,
            "image_grid_thw": shown,
            "use_cache": False,
        }

    def apart(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        positions: torch.Tensor = inputs["position_ids"]
        return positions[0] if len(positions) > AXES else None

    def alone(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        given: dict[str, Any] = {"input_ids": ids[None], **self.in_two(pictures)}
        if pictures:
            kinds = (ids == self.token).int()
            given["mm_token_type_ids"] = (kinds + 2 * (ids == self._video).int())[None]
        if seconds := [one.seconds for one in pictures if one.seconds is not None]:
            given["second_per_grid_ts"] = torch.tensor(seconds, device=ids.device)
        return given

    def in_two(self, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """Pictures and videos as arguments of their own."""
        given = {}
        for pixels, grid, videos in (
            ("pixel_values", "image_grid_thw", False),
            ("pixel_values_videos", "video_grid_thw", True),
        ):
            if chosen := [one for one in pictures if (one.seconds is not None) == videos]:
                given[pixels] = torch.cat([one.values for one in chosen])
                given[grid] = self._patches([one.places for one in chosen]).to(given[pixels].device)
        return given

    def drawn(self, generator: torch.Generator) -> Picture:
        down, across = (int(torch.randint(1, most + 1, (), generator=generator)) for most in MOST_PLACES)
        times, seconds = 1, None
        if not self.grid.told:  # every other one is a video; else each of a video's times is as a picture
            times = int(torch.randint(0, MOST_TIMES + 1, (), generator=generator))
            times, seconds = max(times, 1), 1.0 if times else None
        patches = times * down * across * self.grid.merge**2
        values = torch.randn(patches, self.grid.values, generator=generator)
        return Picture(values, (times, down, across), seconds)

    def blank(self) -> Picture:
        return Picture(torch.zeros(self.grid.merge**2, self.grid.values), (1, 1, 1))

    def collated(self, ids: torch.Tensor, rows: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        apart = [sum(one.places[0] if self.grid.told else 1 for one in pictures) for pictures in rows]
        grids = torch.zeros(len(rows), max(apart), 3, dtype=torch.int64)
        amounts = [sum(len(one.values) for one in pictures) for pictures in rows]
        pixels = torch.zeros(len(rows), max(amounts), self.grid.values)
        positions = torch.empty(len(rows), AXES, ids.shape[1], dtype=torch.int64)
        for row, pictures in enumerate(rows):
            places = np.array([one.places for one in pictures], np.int64).reshape(-1, 3)
            places, steps = seen_apart(self.grid, places, np.array([one.seconds or 0 for one in pictures], np.float64))
            positions[row] = torch.from_numpy(row_positions(self.placed(ids[row]).numpy(), places, steps))
            grids[row, : len(places)] = self._patches(places)
            if pictures:
                pixels[row, : amounts[row]] = torch.cat([one.values for one in pictures])
        return {"position_ids": positions, "grids": grids, "pixel_values": pixels}

    def of_row(self, batch: Batch, row: int) -> list[Picture]:
        grids = batch["grids"][row]
        sizes = grids[grids.prod(-1) > 0].prod(-1)
        values = batch["pixel_values"][row][: int(sizes.sum())].split(sizes.tolist())
        tokens = sizes // self.grid.merge**2
        ids = batch["input_ids"][row]
        kinds = ids[self.placed(ids)][tokens.cumsum(0) - tokens].tolist()
        merge = self.grid.merge
        return [
            Picture(one, (times, down // merge, across // merge), 1.0 if kind == self.video else None)
            for one, (times, down, across), kind in zip(values, grids.tolist(), kinds, strict=False)
        ]

    def _patches(self, places: Any) -> torch.Tensor:
        return torch.as_tensor(places) * torch.tensor([1, self.grid.merge, self.grid.merge])


def pictures_of(config: Any, packed: bool = False) -> Pictures:
    """What a model of that configuration wants to be given; of packed rows where each conversation begins."""
    if hasattr(config.vision_config, "spatial_merge_size"):
        return OwnSizes(config, packed)
    kinds = {**dict.fromkeys(SEE_PARTS, InParts), **dict.fromkeys(READ_QUESTIONS_WHOLE, ReadWhole)}
    return kinds.get(config.model_type, OneSize)(config, packed)
