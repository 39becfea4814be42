"""Arguments of models that take pictures in their shapes, whose tokens have positions along one axis."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from mgpu_pipe.architectures.family import frame_tokens
from mgpu_pipe.architectures.find import recordings_of, sight_of
from mgpu_pipe.architectures.pictures import PatchGrid, PooledGrid, RowGrid
from mgpu_pipe.architectures.tiles import mosaic_tokens
from mgpu_pipe.data.step_batch import Field
from mgpu_pipe.objectives.chat_recordings import (
    ChatRecordings,
    FilledRecordings,
    NextToRecordings,
    PicturesAndRecordings,
    PicturesAndSeconds,
    Recording,
    padded_recordings,
)
from mgpu_pipe.objectives.picture_inputs import (
    MOST_PLACES,
    Batch,
    FixedSizePictures,
    NativeSizePictures,
    Picture,
    PictureInputs,
    PrefixPictures,
    TiledPictures,
    WholePictures,
)


class PatchPictures(PictureInputs):
    """``grids``, patches in time (1), down and across of each picture, int64, (rows, most, 3); ``pixel_values``,
    patches row by row, float32, (rows, most patches, values), padded with zeros at the end."""

    grid: PatchGrid
    fewest: ClassVar[int] = 1
    """Fewest vectors of a micro-batch that the model takes."""

    def __init__(self, config: Any, packed: bool = False) -> None:
        super().__init__(config)
        self.most_tokens = math.prod(MOST_PLACES)
        self.fields = {
            **({"position_ids": Field(counting=True)} if packed else {}),
            "grids": Field(sequence_dim=None, stages="first", shape=(1, 3)),
            "pixel_values": Field(sequence_dim=None, stages="first", dtype="float32", shape=(1, self.grid.values)),
        }

    @abstractmethod
    def _model_pixels(self, pictures: Sequence[torch.Tensor], grids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Model arguments of pictures, each (patches, values), whose grids are (pictures, 3)."""

    def _token_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Model arguments that say which tokens are pictures."""
        return {}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        ids, positions = batch["input_ids"], {name: batch[name] for name in ("position_ids",) if name in batch}
        pixels = dict[str, torch.Tensor]()
        if "pixel_values" in batch:
            grids = batch["grids"]
            patches = grids.prod(-1)
            values = batch["pixel_values"]
            values = values[torch.arange(values.shape[1], device=values.device) < patches.sum(1, keepdim=True)]
            present = grids[patches > 0]
            if len(values) < self.fewest * self.grid.merge**2:
                blank = self.blank()
                ids, values = self.append_blank_row(ids), torch.cat([values, blank.values.to(values)])
                present = torch.cat([present, self._patches([blank.places]).to(present)])
                row = torch.arange(ids.shape[1], device=ids.device)[None]
                positions = {name: torch.cat([value, row]) for name, value in positions.items()}
            pixels = self._model_pixels(values.split(present.prod(-1).tolist()), present)
        return {"input_ids": ids, **positions, **self._token_inputs(ids), **pixels, "use_cache": False}

    def single_row(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        inputs = {"input_ids": ids[None], **self._token_inputs(ids[None])}
        if not pictures:
            return inputs
        grids = self._patches([picture.places for picture in pictures]).to(ids.device)
        return {**inputs, **self._model_pixels([picture.values for picture in pictures], grids)}

    def random_picture(self, generator: torch.Generator) -> Picture:
        least = (1, self.fewest)
        down, across = (
            int(torch.randint(fewest, most + 1, (), generator=generator))
            for fewest, most in zip(least, MOST_PLACES, strict=True)
        )
        values = torch.randn(down * across * self.grid.merge**2, self.grid.values, generator=generator)
        return Picture(values, (1, down, across))

    def blank(self) -> Picture:
        return Picture(torch.zeros(self.fewest * self.grid.merge**2, self.grid.values), (1, 1, self.fewest))

    def collate(self, ids: torch.Tensor, rows: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        grids = torch.zeros(len(rows), max(map(len, rows)), 3, dtype=torch.int64)
        amounts = [sum(len(picture.values) for picture in pictures) for pictures in rows]
        pixels = torch.zeros(len(rows), max(amounts), self.grid.values)
        for row, pictures in enumerate(rows):
            if pictures:
                grids[row, : len(pictures)] = self._patches([picture.places for picture in pictures])
                pixels[row, : amounts[row]] = torch.cat([picture.values for picture in pictures])
        return {"grids": grids, "pixel_values": pixels}

    def row_pictures(self, batch: Batch, row: int) -> list[Picture]:
        grids = batch["grids"][row]
        grids = grids[grids.prod(-1) > 0]
        sizes, merge = grids.prod(-1).tolist(), self.grid.merge
        values = batch["pixel_values"][row][: sum(sizes)].split(sizes)
        places = [(1, down // merge, across // merge) for _, down, across in grids.tolist()]
        return [Picture(*picture) for picture in zip(values, places, strict=True)]

    def _patches(self, places: Any) -> torch.Tensor:
        return torch.as_tensor(places) * torch.tensor([1, self.grid.merge, self.grid.merge])


class RowPictures(PatchPictures):
    """Pictures of a Pixtral tower, which takes them whole, padded to one size.

    transformers' Mistral 3 fails for a single vector.
    """

    fewest = 2

    def __init__(self, config: Any, packed: bool = False) -> None:
        vision = config.vision_config
        self.grid = RowGrid(int(vision.patch_size), int(config.spatial_merge_size), int(vision.num_channels), 0)
        super().__init__(config, packed)

    def _model_pixels(self, pictures: Sequence[torch.Tensor], grids: torch.Tensor) -> dict[str, torch.Tensor]:
        patch, (_, most_down, most_across) = self.grid.patch, grids.amax(0).tolist()
        whole = []
        for values, (_, down, across) in zip(pictures, grids.tolist(), strict=True):
            cut = values.reshape(down, across, self.grid.channels, patch, patch).permute(2, 0, 3, 1, 4)
            picture = cut.reshape(self.grid.channels, down * patch, across * patch)
            whole.append(F.pad(picture, (0, (most_across - across) * patch, 0, (most_down - down) * patch)))
        return {"pixel_values": torch.stack(whole), "image_sizes": grids[:, 1:] * patch}


class PooledPictures(PatchPictures):
    """Pictures of Gemma 4's tower, which takes patches with their places across and down, padded to one number."""

    def __init__(self, config: Any, packed: bool = False) -> None:
        vision = config.vision_config
        self.grid = PooledGrid(int(vision.patch_size), int(vision.pooling_kernel_size), 3, 0)
        super().__init__(config, packed)

    def _token_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mm_token_type_ids": (ids == self.token).long()}

    def _model_pixels(self, pictures: Sequence[torch.Tensor], grids: torch.Tensor) -> dict[str, torch.Tensor]:
        positions = []
        for _, down, across in grids.tolist():
            places = torch.cartesian_prod(*(torch.arange(size, device=grids.device) for size in (down, across)))
            positions.append(places.flip(1))
        padded = (
            torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=padding)
            for values, padding in ((list(pictures), 0.0), (positions, -1.0))
        )
        return dict(zip(("pixel_values", "image_position_ids"), padded, strict=True))


class PooledAndRecordings(NextToRecordings, PooledPictures):
    """Gemma 4's pictures, and recordings of any length."""

    def __init__(self, config: Any, packed: bool = False) -> None:
        super().__init__(config, packed)
        self._add_recordings(config, int(config.audio_config.subsampling_conv_channels[0]))

    def _tokens(self, frames: int) -> int:
        return int(frame_tokens(frames))

    def _sound(self, recordings: Sequence[torch.Tensor], frames: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(("input_features", "input_features_mask"), padded_recordings(recordings, frames), strict=True))

    def _with_row(self, inputs: dict[str, Any], row: torch.Tensor) -> dict[str, Any]:
        inputs = super()._with_row(inputs, row)
        return {**inputs, **self._token_inputs(inputs["input_ids"])}

    def single_row(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        seen = [picture for picture in pictures if not isinstance(picture, Recording)]
        return {**super().single_row(ids, seen, answer), **self._sounds_among(pictures, ids.device)}


@dataclass(frozen=True)
class MosaicPicture(Picture):
    """Picture on tiles of ``tile`` patches across; its places are the patches that it covers."""

    tile: int = 1

    @property
    def tokens(self) -> int:
        return mosaic_tokens(*self.places[1:], self.tile)


class MosaicPictures(FixedSizePictures):
    """Tiles of each picture and the whole picture; and ``patches``, those down and across that each picture covers,
    int64, (rows, most, 2), padded with zeros at the end (Phi-4 multimodal)."""

    def __init__(self, config: Any, packed: bool = False) -> None:
        super().__init__(config, packed)
        self._tile = self._shape[1] // int(config.vision_config.patch_size)
        self._most = self._tile + self._tile // 2
        self.most_tokens = mosaic_tokens(self._most, self._most, self._tile)
        self.fields = {**self.fields, "patches": Field(sequence_dim=None, stages="first", shape=(1, 2))}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = super().inputs(batch)
        if "pixel_values" not in inputs:
            return inputs
        patches = batch["patches"]
        patches = patches[patches.prod(-1) > 0]
        return self._with_masks(inputs, patches if len(patches) else patches.new_ones(1, 2))

    def single_row(self, ids: torch.Tensor, pictures: Sequence[Picture], answer: int) -> dict[str, Any]:
        inputs = super().single_row(ids, pictures, answer)
        patches = torch.tensor([picture.places[1:] for picture in pictures], device=ids.device)
        return self._with_masks(inputs, patches) if pictures else inputs

    def _with_masks(self, inputs: dict[str, Any], patches: torch.Tensor) -> dict[str, Any]:
        """Model arguments with the whole picture before its tiles, as many for each, and masks of patches."""
        tiles = -(-patches // self._tile)
        pixels = inputs.pop("pixel_values").split((tiles.prod(1) + 1).tolist())
        values = torch.nn.utils.rnn.pad_sequence([picture.roll(1, 0) for picture in pixels], batch_first=True)
        masks = torch.ones(*values.shape[:2], self._tile, self._tile, dtype=torch.bool, device=values.device)
        for mask, (down, across), sides in zip(masks, tiles.tolist(), patches.tolist(), strict=True):
            seen = mask.new_zeros(down * self._tile, across * self._tile)
            seen[: sides[0], : sides[1]] = True
            cut = seen.reshape(down, self._tile, across, self._tile).transpose(1, 2)
            mask[1 : down * across + 1] = cut.flatten(0, 1)
        sizes = tiles * self._shape[1]
        return {**inputs, "image_pixel_values": values, "image_sizes": sizes, "image_attention_mask": masks}

    def random_picture(self, generator: torch.Generator) -> Picture:
        down, across = (int(side) for side in torch.randint(1, self._most + 1, (2,), generator=generator))
        tiles = -(-down // self._tile) * -(-across // self._tile)
        values = torch.randn(tiles + 1, *self._shape, generator=generator)
        return MosaicPicture(values, (1, down, across), tile=self._tile)

    def blank(self) -> Picture:
        return MosaicPicture(torch.zeros(2, *self._shape), (1, 1, 1), tile=self._tile)

    def collate(self, ids: torch.Tensor, rows: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        patches = torch.zeros(len(rows), max(map(len, rows)), 2, dtype=torch.int64)
        for row, pictures in enumerate(rows):
            for number, picture in enumerate(pictures):
                patches[row, number] = torch.tensor(picture.places[1:])
        return {**super().collate(ids, rows), "patches": patches}

    def row_pictures(self, batch: Batch, row: int) -> list[Picture]:
        patches = batch["patches"][row]
        patches = patches[patches.prod(-1) > 0]
        counts = (-(-patches // self._tile)).prod(1) + 1
        pixels = batch["pixel_values"][row][: int(counts.sum())].split(counts.tolist())
        return [
            MosaicPicture(values, (1, *places), tile=self._tile)
            for values, places in zip(pixels, patches.tolist(), strict=True)
        ]


_INPUTS_OF_CUTS: dict[str, type[PictureInputs]] = {
    "grid": NativeSizePictures,
    "mosaic": MosaicPictures,
    "parts": TiledPictures,
    "pooled": PooledPictures,
    "rows": RowPictures,
}
_INPUTS_OF_SOUNDS: dict[str, Callable[[Any, bool], PictureInputs]] = {
    "chunks": PicturesAndRecordings,
    "frames": PooledAndRecordings,
    "seconds": PicturesAndSeconds,
    "silence": FilledRecordings,
    "window": ChatRecordings,
}
_INPUTS_OF_ONE_SIZE: dict[str, type[PictureInputs]] = {"pictures": WholePictures, "questions": PrefixPictures}
"""Pictures of one size, by what is read bidirectionally."""


def build_picture_inputs(config: Any, packed: bool = False) -> PictureInputs:
    """The picture inputs of the model with ``config``, with conversation positions if rows are packed."""
    if kind_of_sound := recordings_of(config.model_type, getattr(config, "audio_config", None)):
        return _INPUTS_OF_SOUNDS[kind_of_sound](config, packed)
    sight = sight_of(config.model_type)
    kind: Any = _INPUTS_OF_CUTS.get(sight.pictures) or _INPUTS_OF_ONE_SIZE.get(sight.both_ways, FixedSizePictures)
    inputs: PictureInputs = kind(config, packed)
    return inputs
