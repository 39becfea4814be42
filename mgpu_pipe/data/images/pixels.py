"""Converts pictures to the model's arrays: random changes in training, size, values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.architectures.config_source import NO_DEFAULT, config_class
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.images.augment import augment, random_crop_box
from mgpu_pipe.data.images.decode_image import MODES, pillow
from mgpu_pipe.data.images.image_keys import AugmentConfig, ImageConfig
from mgpu_pipe.data.model_field import model_field, preprocessor_of
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

USUAL = 0.5
"""Default mean and standard deviation of a channel."""
LONGEST_SCALED = 64
"""Largest ratio of sides up to which a picture is scaled whole before its middle is cropped."""
CROP_SHAPES = (3 / 4, 4 / 3)
"""Width over height of random crops (Szegedy et al. 2015, arXiv:1409.4842)."""


@dataclass(frozen=True)
class Pixels:
    """Converts pictures to arrays of one size.

    Attributes:
        size: height and width.
        channels: 1 or 3.
        mean, std: of each channel.
        fit: as ``data.fit``.
    """

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: str
    resampling: ClassVar[str] = "BILINEAR"
    """Pillow's name of the filter."""

    @classmethod
    def from_config(cls, data: ImageConfig, model: ModelConfig) -> Pixels:
        """Reads the settings of a run.

        Raises:
            ConfigError: neither the model nor ``data.image_size`` gives a size, or they differ; the model's channels
                are neither 1 nor 3; means or deviations do not match the channels.
        """
        channels = _whole(vision_field(model, "num_channels"), 3)
        if channels not in MODES:
            raise ConfigError("model.config.num_channels", channels, "use 1 or 3", "pictures are grey or RGB")
        model_size = vision_field(model, "image_size")
        size = _whole(model_size, 0) if data.image_size == "auto" else data.image_size
        if not size:
            raise ConfigError("data.image_size", "auto", "give the pictures' height in pixels", "the model has none")
        if model_size is not None and model_size not in (size, [size, size], (size, size)):
            fix = "leave it out" if isinstance(model_size, int) else "use a model of square pictures"
            raise ConfigError("data.image_size", size, fix, f"the model's image_size is {model_size}")
        return cls(size, channels, *normalisation(data, preprocessor(model), channels), data.fit)

    def changed(self, image: Image, data: ImageConfig, random: np.random.Generator) -> Image:
        """Changes a training picture at random and scales it to the final size: crop, rotation, shift, mirror, then
        colours and RandAugment (``data.augment``)."""
        image_module = pillow()
        cut, across, down, angle, mirrored = random.random(4), *random.uniform(-1, 1, 3), random.random()
        box = _crop(image.size, data.random_crop, cut) if data.random_crop < 1 else None
        image = self._cropped(image, data.augment, random) if data.augment.crop_area else self.fitted(image, box)
        if data.turn or data.shift:
            moved = tuple(round(data.shift * share) for share in (across, down))
            # The corner's value fills the border: it is the background of most pictures that may be shifted.
            image = image.rotate(
                data.turn * angle, image_module.Resampling.BILINEAR, translate=moved, fillcolor=image.getpixel((0, 0))
            )
        if data.flip and mirrored < 0.5:
            image = image.transpose(image_module.Transpose.FLIP_LEFT_RIGHT)
        return augment(image, data.augment, random)

    def _cropped(self, image: Image, keys: AugmentConfig, random: np.random.Generator) -> Image:
        """Random crop, scaled to the final size of the whole picture."""
        box = random_crop_box(image.size, keys.crop_area, keys.crop_shape, random)
        return image.crop(box).resize(self.final_size(image), pillow().Resampling[self.resampling])

    def fitted(self, image: Image, box: tuple[float, float, float, float] | None = None) -> Image:
        """Scales the picture, or its box (left, top, right, bottom), to the final size."""
        image_module = pillow()
        (width, height), final = image.size, self.final_size(image)
        if box is None and self.fit == "crop" and width != height:
            return self._middle(image)
        if box is None and image.size == final:
            return image
        return image.resize(final, image_module.Resampling[self.resampling], box=box)

    def _middle(self, image: Image) -> Image:
        """Scales the shorter side to the size and crops the middle, in whole pixels, like transformers'
        CLIPImageProcessor."""
        filtered, shorter = pillow().Resampling[self.resampling], min(image.size)
        width, height = (int(self.size * side / shorter) for side in image.size)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        right, bottom = left + self.size, top + self.size
        if max(width, height) <= LONGEST_SCALED * self.size:
            return image.resize((width, height), filtered).crop((left, top, right, bottom))
        # Crop first: the result differs in the rounding of few values, and the cropped part would take gigabytes.
        across, down = image.width / width, image.height / height
        box = (left * across, top * down, right * across, bottom * down)
        return image.resize((self.size, self.size), filtered, box=box)

    def final_size(self, image: Image) -> tuple[int, int]:
        """Width and height that the model gets of a picture."""
        return self.size, self.size

    def array(self, image: Image) -> NDArray[np.float32]:
        """Channels first, float32."""
        stored = np.asarray(image).reshape(image.height, image.width, self.channels).transpose(2, 0, 1)
        # One array, changed in place: new memory for each step costs more than the arithmetic.
        values: NDArray[np.float32] = np.divide(stored, np.float32(255), order="C", dtype=np.float32)
        values -= np.array(self.mean, np.float32)[:, None, None]
        values /= np.array(self.std, np.float32)[:, None, None]
        return values

    def clip(self, images: Sequence[Image]) -> NDArray[np.float32]:
        """The model's input for a picture or a video's frames: pictures or parts, (parts, channels, size, size), or
        patches."""
        (image,) = images
        return self.array(image)[None]


def _crop(size: tuple[int, int], least: float, uniform: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """Random box (left, top, right, bottom) with at least the share ``least`` of the area and a random shape."""
    width, height = size
    area = width * height * (least + (1 - least) * float(uniform[0]))
    low, high = (np.log(shape) for shape in CROP_SHAPES)
    shape = float(np.exp(low + (high - low) * uniform[1]))
    across, down = min((area * shape) ** 0.5, width), min((area / shape) ** 0.5, height)
    left, top = float(uniform[2]) * (width - across), float(uniform[3]) * (height - down)
    return left, top, left + across, top + down


def vision_field(model: ModelConfig, name: str) -> Any:
    """A field of the model's configuration, or of its image tower's."""
    value = None
    for source in (model, replace(model, config={})):  # configured fields of a tower override those in its folder
        nested = model_field(source, "vision_config")
        value = nested.get(name) if value is None and isinstance(nested, dict) else value
    value = model_field(model, name) if value is None else value
    kind = model.type if name == "model_type" else vision_field(model, "model_type") or model.type
    names = (f"{kind}", f"{kind}_vision", f"{kind}".replace("_thinker", "_vision_encoder"))
    towers = (config_class(tower) for tower in names if value is None and kind)
    usual = (tower.defaults.get(name, NO_DEFAULT) for tower in towers if tower is not None)
    return next((tower for tower in usual if tower is not NO_DEFAULT), value)


def _whole(value: Any, otherwise: int) -> int:
    if isinstance(value, list | tuple) and len(set(value)) == 1:
        value = value[0]
    return value if isinstance(value, int) and value > 0 else otherwise


def normalisation(
    data: ImageConfig, folder: Mapping[str, Any], channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel; raises like :meth:`Pixels.from_config`."""
    mean = _of_channels("data.mean", data.mean or folder.get("image_mean"), channels)
    std = _of_channels("data.std", data.std or folder.get("image_std"), channels)
    if min(std) <= 0:
        raise ConfigError("data.std", list(std), "use numbers above 0")
    return mean, std


def preprocessor(model: ModelConfig) -> dict[str, Any]:
    """Picture settings of the model folder's preprocessor."""
    return preprocessor_of(model.path, "image_processor")


def _of_channels(key: str, values: Any, channels: int) -> tuple[float, ...]:
    """One number per channel; a single number applies to every channel."""
    values = [values] if isinstance(values, int | float) else list(values or [USUAL])
    if len(values) not in (1, channels):
        raise ConfigError(key, values, f"give one number, or {channels}", f"the model has {channels} channels")
    return tuple(float(value) for value in (values * channels if len(values) == 1 else values))
