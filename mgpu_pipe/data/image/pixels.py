"""What the model sees of a picture: random changes of a training sample, size, values. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.plain_files import MAX_JSON_BYTES, parse_json, read_bytes
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.image.decode import MODES, pillow
from mgpu_pipe.data.image.keys import ImageConfig
from mgpu_pipe.data.text.tokenizer import model_field
from mgpu_pipe.errors import ConfigError, DataError
from mgpu_pipe.families.config_source import NO_DEFAULT, config_class

if TYPE_CHECKING:
    from PIL.Image import Image

USUAL = 0.5
"""Mean and standard deviation of a channel where nothing else is said."""
CROP_SHAPES = (3 / 4, 4 / 3)
"""Width over height of random crops (Szegedy et al. 2015, arXiv:1409.4842)."""


@dataclass(frozen=True)
class Pixels:
    """How pictures become arrays.

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
    """Pillow's name."""

    @classmethod
    def of(cls, data: ImageConfig, model: ModelConfig) -> Pixels:
        """Of a run.

        Raises:
            ConfigError: the model says no size and ``data.image_size`` neither, or they are two; a model of other than
                1 or 3 channels; as many means or deviations as there are channels are not given.
        """
        channels = _whole(of_vision(model, "num_channels"), 3)
        if channels not in MODES:
            raise ConfigError("model.config.num_channels", channels, "use 1 or 3", "pictures are grey or RGB")
        own = of_vision(model, "image_size")
        size = _whole(own, 0) if data.image_size == "auto" else data.image_size
        if not size:
            raise ConfigError("data.image_size", "auto", "give the pictures' height in pixels", "the model has none")
        if own is not None and own not in (size, [size, size]):
            fix = "leave it out" if isinstance(own, int) else "use a model of square pictures"
            raise ConfigError("data.image_size", size, fix, f"the model's image_size is {own}")
        return cls(size, channels, *normalised(data, preprocessor(model), channels), data.fit)

    def changed(self, image: Image, data: ImageConfig, random: np.random.Generator) -> Image:
        """A training sample: cut, turned, moved and mirrored at random, of the final size."""
        image_module, _ = pillow()
        cut, across, down, angle, mirrored = random.random(4), *random.uniform(-1, 1, 3), random.random()
        box = _crop(image.size, data.random_crop, cut) if data.random_crop < 1 else None
        image = self.fitted(image, box)
        if data.turn or data.shift:
            moved = tuple(round(data.shift * share) for share in (across, down))
            # The corner's value fills what comes in: the background of most pictures that may be moved.
            image = image.rotate(
                data.turn * angle, image_module.Resampling.BILINEAR, translate=moved, fillcolor=image.getpixel((0, 0))
            )
        if data.flip and mirrored < 0.5:
            image = image.transpose(image_module.Transpose.FLIP_LEFT_RIGHT)
        return image

    def fitted(self, image: Image, box: tuple[float, float, float, float] | None = None) -> Image:
        """The picture, or a box (left, top, right, bottom) of it, in the final size."""
        image_module, _ = pillow()
        (width, height), final = image.size, self.final_size(image)
        if box is None and self.fit == "crop" and width != height:
            side = min(width, height)
            left, top = (width - side) / 2, (height - side) / 2
            box = (left, top, left + side, top + side)
        if box is None and image.size == final:
            return image
        return image.resize(final, image_module.Resampling[self.resampling], box=box)

    def final_size(self, image: Image) -> tuple[int, int]:
        """Width and height that the model gets of a picture."""
        return self.size, self.size

    def array(self, image: Image) -> NDArray[np.float32]:
        """Channels first, float32."""
        stored = np.asarray(image).reshape(image.height, image.width, self.channels).transpose(2, 0, 1)
        # One array, changed in place: fresh memory for each step would cost more than its arithmetic.
        values: NDArray[np.float32] = np.divide(stored, np.float32(255), order="C", dtype=np.float32)
        values -= np.array(self.mean, np.float32)[:, None, None]
        values /= np.array(self.std, np.float32)[:, None, None]
        return values

    def clip(self, images: Sequence[Image]) -> NDArray[np.float32]:
        """What the model is given of one picture, or of a video's frames: the pictures or their parts, (parts,
        channels, size, size), or patches."""
        (image,) = images
        return self.array(image)[None]


def _crop(size: tuple[int, int], least: float, drawn: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """A box of a random share of the area, at least ``least``, and of a random shape."""
    width, height = size
    area = width * height * (least + (1 - least) * float(drawn[0]))
    low, high = (np.log(shape) for shape in CROP_SHAPES)
    shape = float(np.exp(low + (high - low) * drawn[1]))
    across, down = min((area * shape) ** 0.5, width), min((area / shape) ** 0.5, height)
    left, top = float(drawn[2]) * (width - across), float(drawn[3]) * (height - down)
    return left, top, left + across, top + down


def of_vision(model: ModelConfig, name: str) -> Any:
    """A field of the model's configuration, or of its image tower's."""
    own = None
    for one in (model, replace(model, config={})):  # what is given for a tower stands over its folder's
        nested = model_field(one, "vision_config")
        own = nested.get(name) if own is None and isinstance(nested, dict) else own
    own = model_field(model, name) if own is None else own
    kind = model.type if name == "model_type" else of_vision(model, "model_type") or model.type
    towers = (config_class(one) for one in (f"{kind}", f"{kind}_vision") if own is None and kind)
    usual = (one.defaults.get(name, NO_DEFAULT) for one in towers if one is not None)
    return next((one for one in usual if one is not NO_DEFAULT), own)


def _whole(value: Any, otherwise: int) -> int:
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    return value if isinstance(value, int) and value > 0 else otherwise


def normalised(
    data: ImageConfig, folder: Mapping[str, Any], channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel; raises as :meth:`Pixels.of`."""
    mean = _of_channels("data.mean", data.mean or folder.get("image_mean"), channels)
    std = _of_channels("data.std", data.std or folder.get("image_std"), channels)
    if min(std) <= 0:
        raise ConfigError("data.std", list(std), "use numbers above 0")
    return mean, std


def preprocessor(model: ModelConfig) -> dict[str, Any]:
    """What the model folder says of its pictures."""
    if model.path is None:
        return {}
    file = local_folder(model.path) / "preprocessor_config.json"
    if not file.is_file():
        return {}
    try:
        content = parse_json(read_bytes(file, MAX_JSON_BYTES), file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({type(error).__name__})") from error
    return content if isinstance(content, dict) else {}


def _of_channels(key: str, values: Any, channels: int) -> tuple[float, ...]:
    """One number for each channel; one number alone is every channel's."""
    values = [values] if isinstance(values, int | float) else list(values or [USUAL])
    if len(values) not in (1, channels):
        raise ConfigError(key, values, f"give one number, or {channels}", f"the model has {channels} channels")
    return tuple(float(value) for value in (values * channels if len(values) == 1 else values))
