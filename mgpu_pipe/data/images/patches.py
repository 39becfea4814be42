"""Pictures in native size as patches whose tokens have positions along one axis (Pixtral, Gemma 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.architectures.patch_grids import PatchGrid, PooledGrid, RowGrid
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.images.decode_image import MODES
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.pixels import Pixels, normalised, preprocessor, vision_field
from mgpu_pipe.data.model_field import model_field_or_default
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

SOFT_TOKENS = 280
"""Default of most vectors of a pooled picture."""


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
        """Reads the settings of a run of a model with a Pixtral tower.

        Raises:
            ConfigError: as :meth:`from_pooled`.
        """
        folder, field = preprocessor(model), partial(vision_field, model)
        channels = _check(data, field("num_channels") or 3)
        size, usual = folder.get("size"), field("image_size")
        longest = size.get("longest_edge") if isinstance(size, dict) else None
        most = data.max_side if data.max_side != "auto" else longest or (usual if isinstance(usual, int) else usual[0])
        merge, patch = model_field_or_default(model, "spatial_merge_size"), field("patch_size")
        grid = RowGrid(*_whole(patch, merge), channels, most)
        if most < grid.side:
            raise ConfigError("data.max_side", most, f"use at least {grid.side}", "a place has so many pixels")
        return cls(0, channels, *normalised(data, folder, channels), data.fit, grid)

    @classmethod
    def from_pooled(cls, data: PictureChatConfig, model: ModelConfig) -> Self:
        """Reads the settings of a run of Gemma 4.

        Raises:
            ConfigError: sizes that are no whole numbers; one size for all pictures; a bound that no picture keeps.
        """
        folder, field = preprocessor(model), partial(vision_field, model)
        channels = _check(data, 3)
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
            0, channels, (0.0,) * channels, (1.0,) * channels, data.fit, PooledGrid(patch, merge, channels, most)
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

    def processed(self, image: Image) -> NDArray[np.float32]:
        """The output of transformers' image processor for a picture: of rows the whole picture, (1, channels, height,
        width); else patches padded with zeros, (1, most patches, values)."""
        if not isinstance(self.parts, PooledGrid):
            return self.array(image)[None]
        patches = self.clip([image])
        return np.pad(patches, ((0, self.parts.most * self.parts.merge**2 - len(patches)), (0, 0)))[None]


def _check(data: PictureChatConfig, channels: Any) -> int:
    """The channels; raises ConfigError for one size of all pictures."""
    own_sizes = "the model takes pictures in sizes of their own"
    if data.image_size != "auto":
        raise ConfigError("data.image_size", data.image_size, "leave it out", own_sizes)
    if data.fit != "squash":
        raise ConfigError("data.fit", data.fit, "leave it out", own_sizes)
    if channels not in MODES:
        raise ConfigError("model.config.vision_config.num_channels", channels, "use 1 or 3", "pictures are grey or RGB")
    return int(channels)


def _whole(patch: Any, merge: Any) -> tuple[int, int]:
    """Pixels across a patch, and patches across a vector."""
    if not all(isinstance(number, int) and number > 0 for number in (patch, merge)):
        fix = "use whole numbers of at least 1 for it and the patches of a vector"
        raise ConfigError("model.config.vision_config.patch_size", patch, fix)
    return patch, merge
