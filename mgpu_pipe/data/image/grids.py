"""Pictures in sizes of their own, as Qwen-VL takes them: patches, and positions along three axes. No torch.

A picture keeps its shape; its sides become multiples of what one vector of the language model sees. So the number of
places that it takes in a row depends on its size, which is read once from its file's head and kept in the cache.
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

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.cache import build_once
from mgpu_pipe.data.image.decode import FORMATS, MODES, pillow
from mgpu_pipe.data.image.keys import PictureChatConfig
from mgpu_pipe.data.image.parts import PartPixels
from mgpu_pipe.data.image.pixels import Pixels, normalised, of_vision, preprocessor
from mgpu_pipe.data.image.sources import FILES
from mgpu_pipe.data.text.token_store import load_array, save_array
from mgpu_pipe.data.text.tokenizer import model_field
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.pictures import LONGEST, SEE_PARTS, Grid, Parts

if TYPE_CHECKING:
    from PIL.Image import Image

LEAST, MOST = 4, 1280
"""Places of a picture, where nothing else is said."""
TURNED = (5, 6, 7, 8)
"""Values of EXIF's orientation whose pictures lie on their side."""
ORIENTATION = 274
AXES = 3
"""Of a token's position: in time, down and across."""
TOO_LONG = f"is more than {LONGEST} times as long as wide"


@dataclass(frozen=True)
class GridPixels(Pixels):
    """How pictures become patches.

    Attributes:
        grid: of the model; ``size`` is 0.
    """

    grid: Grid
    resampling: ClassVar[str] = "BICUBIC"

    @classmethod
    def of_grid(cls, data: PictureChatConfig, model: ModelConfig, grid: Grid) -> Self:
        """Of a run.

        Raises:
            ConfigError: sizes that are no whole numbers; one size for all pictures; bounds that no picture keeps.
        """
        if grid.channels not in MODES:
            reason = "pictures are grey or RGB"
            raise ConfigError("model.config.vision_config.in_channels", grid.channels, "use 1 or 3", reason)
        if not all(isinstance(one, int) and one > 0 for one in (grid.patch, grid.merge, grid.frames)):
            fix = "use whole numbers of at least 1 for it, spatial_merge_size and temporal_patch_size"
            raise ConfigError("model.config.vision_config.patch_size", grid.patch, fix)
        own = "the model takes pictures in sizes of their own"
        if data.image_size != "auto":
            raise ConfigError("data.image_size", data.image_size, "use auto, and data.max_pixels", own)
        if data.fit != "squash":
            raise ConfigError("data.fit", data.fit, "leave it out", own)
        folder = preprocessor(model)
        size, area = folder.get("size"), grid.side**2
        named: Mapping[str, Any] = {**(size if isinstance(size, dict) else {}), **folder}
        usual = (
            named.get("min_pixels", named.get("shortest_edge")),
            named.get("max_pixels", named.get("longest_edge")),
        )
        least, most = (
            given if given != "auto" else known if isinstance(known, int) else places * area
            for given, known, places in zip((data.min_pixels, data.max_pixels), usual, (LEAST, MOST), strict=True)
        )
        if most < max(least, area):
            fix = f"use at least {max(least, area)}"
            raise ConfigError(
                "data.max_pixels", most, fix, f"a place has {area} pixels, and a picture at least {least}"
            )
        mean, std = normalised(data, folder, grid.channels)
        return cls(0, grid.channels, mean, std, data.fit, replace(grid, least=least, most=most))

    def final_size(self, image: Image) -> tuple[int, int]:
        down, across = self.grid.places(image.height, image.width)
        return across * self.grid.side, down * self.grid.side

    def array(self, image: Image) -> NDArray[np.float32]:
        """Patches, those of one place one after the other; float32, (patches, values)."""
        return self.clip([image])

    def clip(self, images: Sequence[Image]) -> NDArray[np.float32]:
        """The same of a video's frames, of which the last is repeated until it is a patch's last."""
        merge, patch, frames = self.grid.merge, self.grid.patch, self.grid.frames
        shown = [super(GridPixels, self).array(image) for image in images]
        values = np.stack([*shown, *shown[-1:] * (-len(shown) % frames)])
        down, across = (side // (merge * patch) for side in values.shape[2:])
        cut = values.reshape(-1, frames, self.channels, down, merge, patch, across, merge, patch)
        return np.ascontiguousarray(cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)).reshape(-1, self.grid.values)


def chat_pixels(data: PictureChatConfig, model: ModelConfig) -> Pixels:
    """How a run's pictures become arrays; raises as :meth:`Pixels.of`, :meth:`GridPixels.of_grid` and
    :meth:`PartPixels.of_parts`."""
    grid = Grid.of(partial(of_vision, model))
    parted = (model.type or model_field(model, "model_type")) in SEE_PARTS
    if not parted and data.max_side != "auto":
        reason = "the model does not see pictures in parts"
        raise ConfigError("data.max_side", data.max_side, "leave it out", reason)
    if grid is not None:
        return GridPixels.of_grid(data, model, grid)
    for name in ("min_pixels", "max_pixels"):
        if getattr(data, name) != "auto":
            raise ConfigError(f"data.{name}", getattr(data, name), "leave it out", "the model's pictures have one size")
    return PartPixels.of_parts(data, model) if parted else Pixels.of(data, model)


def known_shapes(pictures: Path) -> Path:
    """The folder with the height and width of each picture of a folder in the cache, made if it is not there."""
    folder = pictures.with_name(f"{pictures.name}.shapes")
    build_once(folder, partial(_write_shapes, pictures))
    return folder


def shapes_in(folder: Path) -> NDArray[np.int64]:
    """Of :func:`known_shapes`, (pictures, 2)."""
    return load_array(folder / "shapes.npy")


def too_long(grid: Grid, pictures: Path) -> list[tuple[str, str]]:
    """The files of a folder of pictures that Qwen's code refuses, and why."""
    if not (pictures / FILES).is_file():
        return []
    paths = json.loads((pictures / FILES).read_text(encoding="utf-8"))["paths"]
    places = places_of_shapes(grid, shapes_in(known_shapes(pictures)))
    return [(paths[at], TOO_LONG) for at in np.flatnonzero(~places.any(1))]


def _write_shapes(pictures: Path, out: Path) -> dict[str, Any]:
    file = pictures / FILES
    if file.is_file():
        paths = json.loads(file.read_text(encoding="utf-8"))["paths"]
        shapes = np.array([_shape(Path(path)) for path in paths], np.int64).reshape(-1, 2)
    else:
        number, *size = load_array(pictures / "pixels.npy").shape
        shapes = np.tile(np.array(size, np.int64), (number, 1))
    save_array(out / "shapes.npy", shapes)
    return {"pictures": len(shapes)}


def _shape(path: Path) -> tuple[int, int]:
    """Height and width, upright; the picture was decoded before."""
    with pillow()[0].open(path, formats=FORMATS) as image:
        width, height = image.size
        return (width, height) if image.getexif().get(ORIENTATION) in TURNED else (height, width)


def places_of_shapes(grid: Grid | Parts, shapes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places down and across of pictures of these shapes, (pictures, 2); zeros for those that are too long."""
    different, which = np.unique(shapes.reshape(-1, 2), axis=0, return_inverse=True)
    found = np.array([grid.places(int(height), int(width)) for height, width in different], np.int64).reshape(-1, 2)
    return found[which.reshape(-1)]


def seen_apart(
    grid: Grid, places: NDArray[np.int64], seconds: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Places in time, down and across, and the places from each time to the next, as of :func:`row_positions`; of each
    time of a video where these stand apart in a row.

    Args:
        seconds: from each time to the next; nan of a picture.
    """
    if grid.pace is not None:
        return places, (grid.pace * np.nan_to_num(seconds)).astype(np.float32)
    apart = np.repeat(places, places[:, 0], axis=0)
    apart[:, 0] = 1
    return apart, np.zeros(len(apart), np.float32)


def row_positions(
    pictures: NDArray[np.bool_], places: NDArray[np.int64], steps: NDArray[np.float32]
) -> NDArray[np.int64]:
    """Where each token of a row stands: in time, down and across, (3, tokens).

    A text's token is one further along all axes than what is before it; a picture's places share one time and count
    down and across from there, a video's do so at each of its times, and what comes next stands behind the longer side
    (arXiv:2409.12191, and of time arXiv:2502.13923).

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
