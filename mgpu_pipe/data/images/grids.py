"""Pictures at their native sizes (Qwen-VL): patches, and positions along three axes.

A native picture keeps its shape; its sides become multiples of the pixels behind one vector of the language model. So
its places in a row depend on its size, which is read once from the file's header and cached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.architectures.find import family_of, sight_of
from mgpu_pipe.architectures.pictures import LONGEST, Grid, Parts, PatchGrid
from mgpu_pipe.architectures.tiles import Tiles
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.cache import build_once
from mgpu_pipe.data.images.decode_image import size_of
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.parts import (
    CanvasPixels,
    MosaicPixels,
    PartPixels,
    PatchPixels,
    TilePixels,
    native_channels,
    picture_tokens_of,
)
from mgpu_pipe.data.images.picture_files import FILES
from mgpu_pipe.data.images.pixels import Pixels, normalisation, preprocessor, vision_field
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.data.text.token_store import load_array, save_array
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image


LEAST, MOST = 4, 1280
"""Default bounds of a picture's places."""
AXES = 3
"""Axes of a token's position: time, down, across."""
TOO_LONG = f"is more than {LONGEST} times as long as wide"


@dataclass(frozen=True)
class GridPixels(Pixels):
    """Converts pictures to patches.

    Attributes:
        grid: of the model; ``size`` is 0.
    """

    grid: Grid
    resampling: ClassVar[str] = "BICUBIC"

    @classmethod
    def from_grid(cls, data: PictureChatConfig, model: ModelConfig, grid: Grid) -> Self:
        """Reads a run's settings; ConfigError for sizes that are no whole numbers, one size for all, or bounds none
        keeps."""
        native_channels(data, grid.channels, "in_channels")
        if not all(isinstance(number, int) and number > 0 for number in (grid.patch, grid.merge, grid.frames)):
            fix = "use whole numbers of at least 1 for it, spatial_merge_size and temporal_patch_size"
            raise ConfigError("model.config.vision_config.patch_size", grid.patch, fix)
        folder = preprocessor(model)
        size, area = folder.get("size"), grid.side**2
        named: Mapping[str, Any] = {**(size if isinstance(size, dict) else {}), **folder}
        usual = (
            named.get("min_pixels", named.get("shortest_edge")),
            named.get("max_pixels", named.get("longest_edge")),
        )
        least, most = (
            configured if configured != "auto" else known if isinstance(known, int) else places * area
            for configured, known, places in zip((data.min_pixels, data.max_pixels), usual, (LEAST, MOST), strict=True)
        )
        if most < max(least, area):
            fix = f"use at least {max(least, area)}"
            raise ConfigError(
                "data.max_pixels", most, fix, f"a place has {area} pixels, and a picture at least {least}"
            )
        mean, std = normalisation(data, folder, grid.channels)
        return cls(0, grid.channels, mean, std, "squash", replace(grid, least=least, most=most))

    def final_size(self, image: Image) -> tuple[int, int]:
        down, across = self.grid.places(image.height, image.width)
        return across * self.grid.side, down * self.grid.side

    def array(self, image: Image) -> NDArray[np.float32]:
        """Patches, grouped by place; float32, (patches, values)."""
        return self.clip([image])

    def clip(self, images: Sequence[Image]) -> NDArray[np.float32]:
        """Patches of a video's frames; the last frame repeats to fill its patch."""
        merge, patch, frames = self.grid.merge, self.grid.patch, self.grid.frames
        arrays = [super(GridPixels, self).array(image) for image in images]
        values = np.stack([*arrays, *arrays[-1:] * (-len(arrays) % frames)])
        down, across = (side // (merge * patch) for side in values.shape[2:])
        cut = values.reshape(-1, frames, self.channels, down, merge, patch, across, merge, patch)
        return np.ascontiguousarray(cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)).reshape(-1, self.grid.values)


_TILE_PIXELS: dict[str, type[TilePixels]] = {"tiles": TilePixels, "canvas": CanvasPixels, "mosaic": MosaicPixels}


def chat_pixels(data: PictureChatConfig, model: ModelConfig) -> Pixels:
    """Chooses how a run's pictures become arrays; raises like :meth:`Pixels.from_config`,
    :meth:`GridPixels.from_grid`, :meth:`PartPixels.from_parts` and :meth:`TilePixels.from_tiles`."""
    model_type = str(model.type or model_field(model, "model_type"))
    if family_of(model_type).recordings and family_of(model_type).sight is None:
        return Pixels(0, 3, (), (), "squash")  # no row has a picture
    grid = Grid.from_fields(partial(vision_field, model))
    kind = sight_of(model_type).pictures
    if kind not in ("parts", "rows") and data.max_side != "auto":
        reason = "the model does not see pictures in parts"
        raise ConfigError("data.max_side", data.max_side, "leave it out", reason)
    if kind == "rows":
        return PatchPixels.from_rows(data, model)
    if grid is not None:
        return GridPixels.from_grid(data, model, grid)
    if kind == "pooled":
        return PatchPixels.from_pooled(data, model)
    if preprocessor(model).get("do_pan_and_scan"):
        fix = "set do_pan_and_scan to false in its preprocessor_config.json"
        raise ConfigError("model.path", model.path, fix, "the model would be given crops next to each picture")
    if kind in _TILE_PIXELS:
        return _TILE_PIXELS[kind].from_tiles(data, model)
    for name in ("min_pixels", "max_pixels"):
        if getattr(data, name) != "auto":
            raise ConfigError(f"data.{name}", getattr(data, name), "leave it out", "the model's pictures have one size")
    if kind == "parts":
        return PartPixels.from_parts(data, model)
    pixels = Pixels.from_config(data, model)
    picture_tokens_of(model, pixels.size)
    return pixels


def known_shapes(pictures: Path) -> Path:
    """Builds or finds the folder with height and width of each picture of a cache folder."""
    folder = pictures.with_name(f"{pictures.name}.shapes")
    build_once(folder, partial(_write_shapes, pictures))
    return folder


def shapes_in(folder: Path) -> NDArray[np.int64]:
    """Heights and widths in a folder of :func:`known_shapes`, (pictures, 2)."""
    return load_array(folder / "shapes.npy")


def too_long(grid: Grid, pictures: Path) -> list[tuple[str, str]]:
    """Pictures of a folder that Qwen's code refuses, and why."""
    if not (pictures / FILES).is_file():
        return []
    paths = json.loads((pictures / FILES).read_text(encoding="utf-8"))["paths"]
    places = places_of_shapes(grid, shapes_in(known_shapes(pictures)))
    return [(paths[index], TOO_LONG) for index in np.flatnonzero(~places.any(1))]


def _write_shapes(pictures: Path, out: Path) -> dict[str, Any]:
    file = pictures / FILES
    if file.is_file():
        paths = json.loads(file.read_text(encoding="utf-8"))["paths"]
        shapes = np.array([size_of(Path(path)) for path in paths], np.int64).reshape(-1, 2)
    else:
        number, *size = load_array(pictures / "pixels.npy").shape
        shapes = np.tile(np.array(size, np.int64), (number, 1))
    save_array(out / "shapes.npy", shapes)
    return {"pictures": len(shapes)}


def places_of_shapes(grid: Grid | Parts | Tiles | PatchGrid, shapes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places down and across of pictures of these shapes, (pictures, 2); zeros for too long ones."""
    different, which = np.unique(shapes.reshape(-1, 2), axis=0, return_inverse=True)
    places = np.array([grid.places(int(height), int(width)) for height, width in different], np.int64).reshape(-1, 2)
    return places[which.reshape(-1)]


def seen_apart(
    grid: Grid, places: NDArray[np.int64], seconds: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Places in time, down and across, and the steps between times, for :func:`row_positions`; separate times are
    pictures."""
    if grid.pace is not None:
        return places, (grid.pace * np.nan_to_num(seconds)).astype(np.float32)
    apart = np.repeat(places, places[:, 0], axis=0)
    apart[:, 0] = 1
    return apart, np.zeros(len(apart), np.float32)


def row_positions(
    pictures: NDArray[np.bool_], places: NDArray[np.int64], steps: NDArray[np.float32]
) -> NDArray[np.int64]:
    """Positions of a row's tokens in time, down and across, (3, tokens).

    A text token stands a step after its predecessor on all axes. A picture's places share one time and count down
    and across from it; a video's do so at each of its times. The next token comes after the longer side
    (arXiv:2409.12191; for time arXiv:2502.13923).

    Args:
        pictures: which of the row's tokens are a picture's or a video's, each of which has as many as places.
        places: of each in time, down and across, (pictures, 3).
        steps: from each time to the next, (pictures,).
    """
    positions = np.empty((3, len(pictures)), np.int64)
    before = np.cumsum(places.prod(1)) - places.prod(1)
    end = start = 0
    firsts = np.flatnonzero(pictures)[before].tolist()
    for first, (times, down, across), step in zip(firsts, places.tolist(), steps, strict=True):
        positions[:, end:first] = start + np.arange(first - end)
        start, end = start + first - end, first + times * down * across
        moments = (np.arange(times, dtype=np.float32) * step).astype(np.int64)  # as transformers rounds them
        positions[0, first:end] = start + np.repeat(moments, down * across)
        positions[1, first:end] = start + np.tile(np.repeat(np.arange(down), across), times)
        positions[2, first:end] = start + np.tile(np.arange(across), times * down)
        start += max(down, across)
    positions[:, end:] = start + np.arange(len(pictures) - end)
    return positions
