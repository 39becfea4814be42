"""Pictures that are seen in parts of one size, and whole, as SmolVLM sees them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.image.decode import pillow
from mgpu_pipe.data.image.keys import PictureChatConfig
from mgpu_pipe.data.image.pixels import Pixels, of_vision, preprocessor
from mgpu_pipe.data.text.tokenizer import model_field
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.config_source import config_class
from mgpu_pipe.families.pictures import ACROSS, Parts

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class PartPixels(Pixels):
    """How pictures become parts.

    Attributes:
        parts: of the model; ``size`` is a part's.
    """

    parts: Parts
    resampling: ClassVar[str] = "LANCZOS"

    @classmethod
    def of_parts(cls, data: PictureChatConfig, model: ModelConfig) -> Self:
        """Of a run.

        Raises:
            ConfigError: as :meth:`Pixels.of`; a picture that is cropped; patches that do not merge; a longer side that
                is shorter than a part.
        """
        if data.fit != "squash":
            raise ConfigError("data.fit", data.fit, "leave it out", "the model sees pictures in parts")
        whole, folder, kind = (
            Pixels.of(data, model),
            preprocessor(model),
            model.type or model_field(model, "model_type"),
        )
        side, patch = whole.size, of_vision(model, "patch_size")
        known = config_class(str(kind))
        merge = model_field(model, "scale_factor") or (known.defaults["scale_factor"] if known else None)
        if not all(isinstance(one, int) and one > 0 for one in (patch, merge)) or side // patch % merge:
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
        return cls(side, whole.channels, whole.mean, whole.std, data.fit, parts)

    def final_size(self, image: Image) -> tuple[int, int]:
        down, across = self.parts.places(image.height, image.width)
        return across * self.size, down * self.size

    def fitted(self, image: Image, box: tuple[float, float, float, float] | None = None) -> Image:
        final, filtered = self.final_size(image), pillow()[0].Resampling[self.resampling]
        if box is not None:
            return image.resize(final, filtered, box=box)
        height, width = self.parts.scaled(image.height, image.width)
        return image.resize((width, height), filtered).resize(final, filtered)

    def clip(self, images: Sequence[Image]) -> NDArray[np.float32]:
        """The parts of a picture, row by row, and then the whole; float32, (parts, channels, size, size)."""
        (image,) = images
        size, whole = (self.size, self.size), self.array(image)
        down, across = (side // self.size for side in whole.shape[1:])
        if down * across == 1:
            return whole[None]
        cut = whole.reshape(self.channels, down, self.size, across, self.size).transpose(1, 3, 0, 2, 4)
        small = self.array(image.resize(size, pillow()[0].Resampling[self.resampling]))
        return np.concatenate([cut.reshape(-1, self.channels, *size), small[None]])
