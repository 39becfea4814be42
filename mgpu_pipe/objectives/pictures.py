"""How vision-language models are given the pictures of a micro-batch, whose rows have different numbers of them.

LLaVA takes pictures of one size, Qwen-VL patches of pictures in sizes of their own, their grids, and positions along
three axes. A micro-batch without any picture gets a blank one, in a row of its own that counts nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mgpu_pipe.data.batch_spec import Field
from mgpu_pipe.data.image.grids import row_positions
from mgpu_pipe.families.pictures import Grid
from mgpu_pipe.models.fields import picture_shape, places_of

Batch = Mapping[str, torch.Tensor]
MOST_PLACES = (2, 3)
"""Down and across, of a random picture in a size of its own."""


@dataclass(frozen=True)
class Picture:
    """One picture as the model takes it.

    Attributes:
        places: down and across, in the language model's row.
    """

    values: torch.Tensor
    places: tuple[int, int]

    @property
    def tokens(self) -> int:
        return self.places[0] * self.places[1]


class Pictures(ABC):
    """What a kind of model wants to be given.

    Attributes:
        token: the id of the token that stands for a picture.
        fields: of a micro-batch, beside its ids and labels.
        most_tokens: of a random picture.
    """

    fields: Mapping[str, Field]
    most_tokens: int

    def __init__(self, config: Any) -> None:
        self.token = int(config.image_token_id)

    @abstractmethod
    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The model's arguments for a micro-batch, which may have one row more than it."""

    @abstractmethod
    def alone(self, ids: torch.Tensor, pictures: Sequence[Picture]) -> dict[str, Any]:
        """transformers' own arguments for one row of token ids."""

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
        """The pictures of a row."""

    def with_blank(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` with a row of the blank picture's places."""
        row = ids.new_zeros(1, ids.shape[1])
        row[:, : self.blank().tokens] = self.token
        return torch.cat([ids, row])


class OneSize(Pictures):
    """``pictures``, how many a row has, int64, (rows,); ``pixel_values``, float32, (rows, most, channels, height,
    width), those first that there are."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._shape, self.most_tokens = picture_shape(config), places_of(config)
        self.fields = {
            "pictures": Field(sequence_dim=None),
            "pixel_values": Field(sequence_dim=None, dtype="float32", shape=(1, *self._shape)),
        }

    def inputs(self, batch: Batch) -> dict[str, Any]:
        ids, pixels = batch["input_ids"], batch["pixel_values"]
        there = torch.arange(pixels.shape[1], device=pixels.device) < batch["pictures"].unsqueeze(1)
        pixels = pixels[there]
        if not len(pixels):
            ids, pixels = self.with_blank(ids), pixels.new_zeros(1, *self._shape)
        return {"input_ids": ids, "pixel_values": pixels, "use_cache": False}

    def alone(self, ids: torch.Tensor, pictures: Sequence[Picture]) -> dict[str, Any]:
        shown = {"pixel_values": torch.stack([one.values for one in pictures])} if pictures else {}
        return {"input_ids": ids[None], **shown}

    def drawn(self, generator: torch.Generator) -> Picture:
        return Picture(torch.randn(*self._shape, generator=generator), (self.most_tokens, 1))

    def blank(self) -> Picture:
        return Picture(torch.zeros(*self._shape), (self.most_tokens, 1))

    def collated(self, ids: torch.Tensor, rows: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        pixels = torch.zeros(len(rows), max(map(len, rows)), *self._shape)
        for row, pictures in enumerate(rows):
            for at, picture in enumerate(pictures):
                pixels[row, at] = picture.values
        return {"pictures": torch.tensor([len(one) for one in rows]), "pixel_values": pixels}

    def of_row(self, batch: Batch, row: int) -> list[Picture]:
        shown = batch["pixel_values"][row][: int(batch["pictures"][row])]
        return [Picture(one, (self.most_tokens, 1)) for one in shown]


class OwnSizes(Pictures):
    """``position_ids``, int64, (rows, 3, seq_len); ``grids``, patches down and across of each picture, int64, (rows,
    most, 2); ``pixel_values``, float32, (rows, most patches, values): what there is first, and then zeros."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        grid = Grid.of(partial(getattr, config.vision_config))
        assert grid is not None
        self.grid, self.most_tokens = grid, MOST_PLACES[0] * MOST_PLACES[1]
        self.fields = {
            "position_ids": Field(sequence_dim=2, counting=True, shape=(3,)),
            "grids": Field(sequence_dim=None, shape=(1, 2)),
            "pixel_values": Field(sequence_dim=None, dtype="float32", shape=(1, grid.values)),
        }

    def inputs(self, batch: Batch) -> dict[str, Any]:
        ids, pixels, grids = batch["input_ids"], batch["pixel_values"], batch["grids"]
        positions = batch["position_ids"].transpose(0, 1)
        patches = grids.prod(-1)
        pixels = pixels[torch.arange(pixels.shape[1], device=pixels.device) < patches.sum(1, keepdim=True)]
        shown = grids[patches > 0]
        if not len(shown):
            blank = self.blank()
            ids, pixels = self.with_blank(ids), blank.values.to(pixels)
            shown = grids.new_full((1, 2), self.grid.merge)
            # One place is one token along every axis, so that a text's positions are right for it.
            counted = torch.arange(ids.shape[1], device=ids.device).expand(3, 1, -1)
            positions = torch.cat([positions, counted], 1)
        return {
            "input_ids": ids,
            "position_ids": positions,
            "pixel_values": pixels,
            "image_grid_thw": F.pad(shown, (1, 0), value=1),
            "use_cache": False,
        }

    def alone(self, ids: torch.Tensor, pictures: Sequence[Picture]) -> dict[str, Any]:
        if not pictures:
            return {"input_ids": ids[None]}
        sides = [(1, *(side * self.grid.merge for side in one.places)) for one in pictures]
        return {
            "input_ids": ids[None],
            "pixel_values": torch.cat([one.values for one in pictures]),
            "image_grid_thw": torch.tensor(sides, device=ids.device),
            "mm_token_type_ids": (ids[None] == self.token).int(),
        }

    def drawn(self, generator: torch.Generator) -> Picture:
        down, across = (int(torch.randint(1, most + 1, (), generator=generator)) for most in MOST_PLACES)
        patches = down * across * self.grid.merge**2
        return Picture(torch.randn(patches, self.grid.values, generator=generator), (down, across))

    def blank(self) -> Picture:
        return Picture(torch.zeros(self.grid.merge**2, self.grid.values), (1, 1))

    def collated(self, ids: torch.Tensor, rows: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        grids = torch.zeros(len(rows), max(map(len, rows)), 2, dtype=torch.int64)
        amounts = [sum(len(one.values) for one in pictures) for pictures in rows]
        pixels = torch.zeros(len(rows), max(amounts), self.grid.values)
        positions = torch.empty(len(rows), 3, ids.shape[1], dtype=torch.int64)
        for row, pictures in enumerate(rows):
            places = np.array([one.places for one in pictures], np.int64).reshape(-1, 2)
            positions[row] = torch.from_numpy(row_positions(ids[row].numpy() == self.token, places))
            grids[row, : len(pictures)] = torch.from_numpy(places) * self.grid.merge
            if pictures:
                pixels[row, : amounts[row]] = torch.cat([one.values for one in pictures])
        return {"position_ids": positions, "grids": grids, "pixel_values": pixels}

    def of_row(self, batch: Batch, row: int) -> list[Picture]:
        grids = [one for one in batch["grids"][row].tolist() if all(one)]
        sizes = [down * across for down, across in grids]
        values = batch["pixel_values"][row][: sum(sizes)].split(sizes)
        merge = self.grid.merge
        return [
            Picture(one, (down // merge, across // merge)) for one, (down, across) in zip(values, grids, strict=True)
        ]


def pictures_of(config: Any) -> Pictures:
    """What a model of that configuration wants to be given."""
    return OwnSizes(config) if hasattr(config.vision_config, "spatial_merge_size") else OneSize(config)
