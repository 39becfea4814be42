"""Pictures that are cut: into parts of one size (SmolVLM) or tiles (InternVL, Llama 4, Phi-4), each next to the
whole picture, or in native size into patches whose tokens have positions along one axis (Pixtral, Gemma 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.architectures.config_source import config_class
from mgpu_pipe.architectures.pictures import ACROSS, Parts, PatchGrid, PooledGrid, RowGrid, picture_places
from mgpu_pipe.architectures.tiles import MOST_OF_CANVAS, MOST_OF_MOSAIC, MOST_TILES, Canvas, Mosaic, Tiles
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.images.decode_image import MODES, pillow
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.pixels import Pixels, normalisation, preprocessor, vision_field
from mgpu_pipe.data.model_field import model_field, model_field_or_default
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class CutPixels(Pixels):
    """Converts pictures to squares of one size and the whole picture."""

    @classmethod
    def whole_picture(cls, data: PictureChatConfig, model: ModelConfig, what: str) -> tuple[Pixels, dict[str, Any]]:
        """Conversion of the whole picture, and the preprocessor's settings; ConfigError for a picture that is
        cropped."""
        if data.fit == "crop":
            raise ConfigError("data.fit", data.fit, "leave it out", f"the model sees pictures in {what}")
        return Pixels.from_config(data, model), preprocessor(model)

    def resize_to(self, image: Image, width: int, height: int) -> Image:
        """The picture in this size; itself where it has it."""
        filtered = pillow().Resampling[self.resampling]
        return image if image.size == (width, height) else image.resize((width, height), filtered)

    def lay_out(self, image: Image, size: tuple[int, int], down: int, across: int, colour: str) -> NDArray[np.float32]:
        """The picture, scaled to ``size`` (height, width), in the corner of ``down`` by ``across`` squares."""
        canvas = pillow().new(image.mode, (across * self.size, down * self.size), colour)
        canvas.paste(self.resize_to(image, *size[::-1]))
        return self.array(canvas)

    def cut(self, values: NDArray[np.float32], small: NDArray[np.float32]) -> NDArray[np.float32]:
        """Squares of a picture, row by row, then the whole picture; float32, (squares + 1, channels, size, size)."""
        down, across = (side // self.size for side in values.shape[1:])
        cut = values.reshape(self.channels, down, self.size, across, self.size).transpose(1, 3, 0, 2, 4)
        return np.concatenate([cut.reshape(-1, self.channels, self.size, self.size), small[None]])


@dataclass(frozen=True)
class PartPixels(CutPixels):
    """Converts pictures to parts.

    Attributes:
        parts: of the model; ``size`` is a part's.
    """

    parts: Parts
    resampling: ClassVar[str] = "LANCZOS"

    @classmethod
    def from_parts(cls, data: PictureChatConfig, model: ModelConfig) -> Self:
        """Reads a run's settings; ConfigError as :meth:`whole_picture`, for patches that do not merge, or a short
        side."""
        whole, folder = cls.whole_picture(data, model, "parts")
        kind = model.type or model_field(model, "model_type")
        side, patch = whole.size, vision_field(model, "patch_size")
        known = config_class(str(kind))
        merge = model_field(model, "scale_factor") or (known.defaults["scale_factor"] if known else None)
        if not all(isinstance(count, int) and count > 0 for count in (patch, merge)) or side // patch % merge:
            reason = f"a part of {side} pixels has {side}/{patch} patches across"
            raise ConfigError("model.config.scale_factor", merge, "use a divisor of the patches", reason)
        size, most = folder.get("size"), folder.get("max_image_size")
        if isinstance(most, dict) and most.get("longest_edge", side) != side:
            reason = f"its preprocessor_config.json cuts parts of {most['longest_edge']} pixels, its tower sees {side}"
            raise ConfigError("model.path", model.path, "give a folder whose files agree", reason)
        usual = size.get("longest_edge") if isinstance(size, dict) else None
        longest = data.max_side if data.max_side != "auto" else usual if isinstance(usual, int) else ACROSS * side
        if longest < side:
            raise ConfigError("data.max_side", longest, f"use at least {side}", "a part has so many pixels")
        splits = bool(folder.get("do_image_splitting", True))
        parts = Parts(side, longest, (side // patch // merge) ** 2, splits)
        return cls(side, whole.channels, whole.mean, whole.std, "squash", parts)

    def final_size(self, image: Image) -> tuple[int, int]:
        down, across = self.parts.places(image.height, image.width)
        return across * self.size, down * self.size

    def scale(self, image: Image, box: tuple[float, float, float, float] | None = None) -> Image:
        final, filtered = self.final_size(image), pillow().Resampling[self.resampling]
        if box is not None:
            return image.resize(final, filtered, box=box)
        height, width = self.parts.scaled_size(image.height, image.width)
        return image.resize((width, height), filtered).resize(final, filtered)

    def clip(self, images: Sequence[Image]) -> NDArray[np.float32]:
        """Parts of a picture, row by row, then the whole picture; float32, (parts, channels, size, size)."""
        (image,) = images
        values = self.array(image)
        if image.size == (self.size, self.size):
            return values[None]
        return self.cut(values, self.array(self.resize_to(image, self.size, self.size)))


@dataclass(frozen=True)
class TilePixels(CutPixels):
    """Converts pictures to tiles.

    Attributes:
        parts: of the model; ``size`` is a tile's.
    """

    parts: Tiles
    resampling: ClassVar[str] = "BICUBIC"
    kind: ClassVar[type[Tiles]] = Tiles
    usual_most: ClassVar[int] = MOST_TILES
    """Default of most tiles of a picture."""
    most_field: ClassVar[str] = "max_patches"
    """The preprocessor's field of it."""

    @classmethod
    def from_tiles(cls, data: PictureChatConfig, model: ModelConfig) -> Self:
        """Reads a run's settings; ConfigError as :meth:`whole_picture`, or for bounds that no tile keeps."""
        whole, folder = cls.whole_picture(data, model, "tiles")
        if data.min_pixels != "auto" and cls.kind is not Tiles:
            reason = f"a {cls.kind.__name__.lower()} has no fewest tiles"
            raise ConfigError("data.min_pixels", data.min_pixels, "leave it out", reason)
        area = whole.size**2
        fewest, most = folder.get("min_patches") or 1, folder.get(cls.most_field) or cls.usual_most
        if data.min_pixels != "auto":
            fewest = max(1, -(-data.min_pixels // area))
        if data.max_pixels != "auto":
            most = data.max_pixels // area
        if most < fewest:
            reason = f"a tile has {area} pixels, and a picture at least {fewest} tiles"
            raise ConfigError("data.max_pixels", data.max_pixels, f"use at least {fewest * area}", reason)
        tiles = cls.cut_of(model, whole.size, fewest, most)
        return cls(whole.size, whole.channels, whole.mean, whole.std, "squash", tiles)

    @classmethod
    def cut_of(cls, model: ModelConfig, size: int, fewest: int, most: int) -> Tiles:
        """The model's cut into tiles of ``size`` pixels across; ConfigError as :func:`picture_tokens_of`."""
        return cls.kind(size, picture_tokens_of(model, size), fewest, most)

    def final_size(self, image: Image) -> tuple[int, int]:
        """The picture's pixels, from which tiles and whole picture are scaled."""
        return image.size

    def scale(self, image: Image, box: tuple[float, float, float, float] | None = None) -> Image:
        """The picture, or its box, in the picture's size: tiles and whole picture are scaled from it."""
        return image if box is None else image.resize(image.size, pillow().Resampling[self.resampling], box=box)

    def clip(self, images: Sequence[Image]) -> NDArray[np.float32]:
        """Tiles of a picture, row by row, then the whole picture; float32, (tiles, channels, size, size)."""
        (image,) = images
        down, across = self.parts.places(image.height, image.width)
        whole = self.array(self.resize_to(image, self.size, self.size))
        if down * across == 1:
            return whole[None]
        return self.cut(self.array(self.resize_to(image, across * self.size, down * self.size)), whole)


def picture_tokens_of(model: ModelConfig, size: int) -> int:
    """Tokens of a picture of ``size`` pixels across; ConfigError for patches or vectors that do not divide it."""
    patch = vision_field(model, "patch_size")
    patch = patch[0] if isinstance(patch, list | tuple) and len(set(patch)) == 1 else patch
    if not isinstance(patch, int) or not 1 <= patch <= size:
        fix = "give model.config.vision_config.image_size and patch_size"
        raise ConfigError("model.config.vision_config.patch_size", patch, fix, f"pictures have {size} pixels")

    def field(name: str) -> Any:
        value = model_field_or_default(model, name)
        return vision_field(model, name) if value is None else value

    try:
        return picture_places(str(vision_field(model, "model_type")), size // patch, field)
    except ValueError as error:
        name, reason = error.args
        part = "vision_config." if model_field_or_default(model, name) is None else ""
        raise ConfigError(f"model.config.{part}{name}", field(name), "use a divisor of the patches", reason) from error


@dataclass(frozen=True)
class CanvasPixels(TilePixels):
    """Converts pictures to the tiles of a canvas, in steps that are rounded to bfloat16 as in transformers."""

    parts: Canvas
    resampling: ClassVar[str] = "BILINEAR"
    kind: ClassVar[type[Tiles]] = Canvas
    usual_most: ClassVar[int] = MOST_OF_CANVAS

    @classmethod
    def from_tiles(cls, data: PictureChatConfig, model: ModelConfig) -> Self:
        if preprocessor(model).get("resize_to_max_canvas"):
            fix = "set resize_to_max_canvas to false in its preprocessor_config.json"
            raise ConfigError("model.path", model.path, fix, "the model would be given the largest canvas")
        return super().from_tiles(data, model)

    def array(self, image: Image) -> NDArray[np.float32]:
        levels = _bfloat16(np.arange(256, dtype=np.float32) * np.float32(1 / 255))
        stored = np.asarray(image).reshape(image.height, image.width, self.channels)
        means, stds = _bfloat16(self.mean), _bfloat16(self.std)
        values = [_bfloat16(_bfloat16(levels - mean) / std) for mean, std in zip(means, stds, strict=True)]
        return np.stack([values[channel][stored[..., channel]] for channel in range(self.channels)])

    def clip(self, images: Sequence[Image]) -> NDArray[np.float32]:
        (image,) = images
        down, across = self.parts.places(image.height, image.width)
        size = self.parts.scaled_size(image.height, image.width)
        values = self.lay_out(image, size, down, across, "black")
        if down * across == 1:
            return values[None]
        return self.cut(values, self.array(self.resize_to(image, self.size, self.size)))


@dataclass(frozen=True)
class MosaicPixels(TilePixels):
    """Converts pictures to the tiles of a mosaic."""

    parts: Mosaic
    resampling: ClassVar[str] = "BILINEAR"
    kind: ClassVar[type[Tiles]] = Mosaic
    usual_most: ClassVar[int] = MOST_OF_MOSAIC
    most_field: ClassVar[str] = "dynamic_hd"

    @classmethod
    def cut_of(cls, model: ModelConfig, size: int, fewest: int, most: int) -> Tiles:
        picture_tokens_of(model, size)
        patch = int(vision_field(model, "patch_size"))
        if size % (2 * patch):
            fix = f"use a divisor of {size // 2}"
            raise ConfigError("model.config.vision_config.patch_size", patch, fix, f"a tile has {size} pixels")
        if (crop := vision_field(model, "crop_size")) != size:
            raise ConfigError("model.config.vision_config.crop_size", crop, f"use {size}", "its tower sees such tiles")
        return Mosaic(size, 0, fewest, most, patch)

    def clip(self, images: Sequence[Image]) -> NDArray[np.float32]:
        (image,) = images
        down, across = self.parts.tiles(image.height, image.width)
        size = self.parts.scaled_size(image.height, image.width)
        values = self.lay_out(image, size, down, across, "white")
        return self.cut(values, _every(_every(values, down, 1), across, 2))


CUBIC = np.array([-3, 19, 19, -3], np.float32) / 32
"""Weights halfway between pixels of torch's bicubic filter."""


def _every(values: NDArray[np.float32], step: int, axis: int) -> NDArray[np.float32]:
    """``values`` shrunk ``step`` times along an axis by torch's bicubic filter without antialiasing."""
    length = values.shape[axis]
    middles = np.arange(length // step) * step + step // 2
    if step % 2:
        return values.take(middles, axis)
    taps = (values.take(np.clip(middles + shift, 0, length - 1), axis) for shift in (-2, -1, 0, 1))
    shrunk: NDArray[np.float32] = sum(weight * tap for weight, tap in zip(CUBIC, taps, strict=True))
    return shrunk


def _bfloat16(values: Any) -> NDArray[np.float32]:
    """Values rounded to the nearest bfloat16, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) & np.uint32(0xFFFF0000)
    result: NDArray[np.float32] = rounded.astype(np.uint32).view(np.float32)
    return result


SOFT_TOKENS = 280
"""Default of the largest number of vectors of a pooled picture."""


@dataclass(frozen=True)
class PatchPixels(Pixels):
    """Converts pictures to patches, row by row.

    Attributes:
        parts: of the model; ``size`` is 0.
    """

    parts: PatchGrid
    resampling: ClassVar[str] = "BICUBIC"

    @classmethod
    def from_rows(cls, data: PictureChatConfig, model: ModelConfig) -> Self:
        """Reads the settings of a run with a Pixtral tower; ConfigError as :meth:`from_pooled`."""
        folder, field = preprocessor(model), partial(vision_field, model)
        channels = native_channels(data, field("num_channels") or 3)
        size, usual = folder.get("size"), field("image_size")
        longest = size.get("longest_edge") if isinstance(size, dict) else None
        most = data.max_side if data.max_side != "auto" else longest or (usual if isinstance(usual, int) else usual[0])
        merge, patch = model_field_or_default(model, "spatial_merge_size"), field("patch_size")
        grid = RowGrid(*_whole(patch, merge), channels, most)
        if most < grid.side:
            raise ConfigError("data.max_side", most, f"use at least {grid.side}", "a place has so many pixels")
        return cls(0, channels, *normalisation(data, folder, channels), "squash", grid)

    @classmethod
    def from_pooled(cls, data: PictureChatConfig, model: ModelConfig) -> Self:
        """Reads the settings of a run of Gemma 4; ConfigError for wrong sizes, one size for all, or a bound none
        keeps."""
        folder, field = preprocessor(model), partial(vision_field, model)
        channels = native_channels(data, 3)
        patch, merge = _whole(field("patch_size"), field("pooling_kernel_size"))
        area = (patch * merge) ** 2
        most = data.max_pixels // area if data.max_pixels != "auto" else folder.get("max_soft_tokens", SOFT_TOKENS)
        if most < 1:
            raise ConfigError("data.max_pixels", data.max_pixels, f"use at least {area}", "a place has so many pixels")
        for name in ("mean", "std"):
            if getattr(data, name):
                reason = "the model normalises pictures by itself"
                raise ConfigError(f"data.{name}", getattr(data, name), "leave it out", reason)
        return cls(
            0, channels, (0.0,) * channels, (1.0,) * channels, "squash", PooledGrid(patch, merge, channels, most)
        )

    def final_size(self, image: Image) -> tuple[int, int]:
        down, across = self.parts.places(image.height, image.width)
        return across * self.parts.side, down * self.parts.side

    def clip(self, images: Sequence[Image]) -> NDArray[np.float32]:
        """Patches of a picture; float32, (patches, values)."""
        (image,) = images
        patch, values = self.parts.patch, self.array(image)
        cut = values.reshape(self.channels, values.shape[1] // patch, patch, values.shape[2] // patch, patch)
        order = (1, 3, 2, 4, 0) if isinstance(self.parts, PooledGrid) else (1, 3, 0, 2, 4)
        return np.ascontiguousarray(cut.transpose(order)).reshape(-1, self.parts.values)

    def processor_output(self, image: Image) -> NDArray[np.float32]:
        """The output of transformers' image processor for a picture: of rows the whole picture, (1, channels, height,
        width); else patches padded with zeros, (1, most patches, values)."""
        if not isinstance(self.parts, PooledGrid):
            return self.array(image)[None]
        patches = self.clip([image])
        return np.pad(patches, ((0, self.parts.most * self.parts.merge**2 - len(patches)), (0, 0)))[None]


def native_channels(data: PictureChatConfig, channels: Any, field: str = "num_channels") -> int:
    """Channels of pictures in native size, by the vision ``field``; ConfigError for neither 1 nor 3, or one size for
    all."""
    if channels not in MODES:
        raise ConfigError(f"model.config.vision_config.{field}", channels, "use 1 or 3", "pictures are grey or RGB")
    for key, value in (("image_size", data.image_size), ("fit", data.fit)):
        if value not in ("auto", "squash"):
            raise ConfigError(f"data.{key}", value, "leave it out", "the model takes pictures in native size")
    return int(channels)


def _whole(patch: Any, merge: Any) -> tuple[int, int]:
    """Pixels across a patch, and patches across a vector."""
    if not all(isinstance(number, int) and number > 0 for number in (patch, merge)):
        fix = "use whole numbers of at least 1 for it and the patches of a vector"
        raise ConfigError("model.config.vision_config.patch_size", patch, fix)
    return patch, merge
