"""Converts pictures to the model's arrays: random changes in training, size, values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
FILTERS = ("NEAREST", "LANCZOS", "BILINEAR", "BICUBIC", "BOX", "HAMMING")
"""Pillow's filters by their numbers, which a folder's ``resample`` states."""
BY_EDGE, CROPPING, BILINEAR = ("CLIP", "ChineseCLIP", "Bit", "ConvNext", "Llava"), ("DeiT",), ("ViT", "Gemma3")
"""Image processors of transformers that by default scale the shorter side and cut the middle out, that cut the middle
out of a square, and that filter bilinearly; the others squash, and filter bicubically."""
WARPED_FROM = 384
"""Side from which ConvNeXt's image processor squashes."""
LONGEST_SCALED = 64
"""Largest ratio of sides up to which a picture is scaled whole before its middle is cropped."""
CROP_SHAPES = (3 / 4, 4 / 3)
"""Width over height of random crops (Szegedy et al. 2015, arXiv:1409.4842)."""


@dataclass(frozen=True)
class Scaling:
    """Steps of a folder's image processor that differ from the usual ones.

    Attributes:
        edge: pixels of the side, or of the shorter side, before the middle is cut out.
        resampling: Pillow's name of the filter.
    """

    edge: int
    resampling: str

    @classmethod
    def from_folder(cls, settings: Mapping[str, Any], size: int) -> tuple[str, Scaling | None]:
        """How the settings of a ``preprocessor_config.json`` make a picture a square of ``size``: ``squash`` or
        ``crop``, and the scaling. Where they make another size they keep the share that they cut off."""
        names = (settings.get(f"{part}_type") or "" for part in ("image_processor", "feature_extractor"))
        kind = re.sub(r"(FeatureExtractor|ImageProcessor)(Fast|Pil)?$", "", next(filter(None, names), ""))
        stated = settings.get("size")
        if not (kind or stated) or settings.get("do_resize", True) is False:
            return "squash", None
        by_edge = kind in BY_EDGE and not isinstance(stated, list)
        if isinstance(stated, dict):
            by_edge = "shortest_edge" in stated
        edge = final = _side(stated, size)
        if kind == "ConvNext":
            by_edge = edge < WARPED_FROM
            edge = int(edge / float(settings.get("crop_pct") or 224 / 256)) if by_edge else edge
        elif settings.get("do_center_crop", kind in BY_EDGE or kind in CROPPING):
            final = _side(settings.get("crop_size"), edge)
        number: Any = settings.get("resample")
        usual = "BICUBIC" if kind and kind not in BILINEAR else "BILINEAR"
        scaling = cls(max(size, edge * size // final), FILTERS[int(number)] if number in range(len(FILTERS)) else usual)
        return "crop" if by_edge else "squash", scaling if scaling != cls(size, "BILINEAR") else None


def _side(stated: Any, otherwise: int) -> int:
    """The side in pixels that a ``size`` or ``crop_size`` states."""
    sides = set(stated.values() if isinstance(stated, dict) else stated if isinstance(stated, list) else [stated])
    side = sides.pop() if len(sides) == 1 else None
    return side if isinstance(side, int) and side > 0 else otherwise


@dataclass(frozen=True)
class Pixels:
    """Converts pictures to arrays of one size.

    Attributes:
        size: height and width.
        channels: 1 or 3.
        mean, std: of each channel.
        fit: squash or crop, see ``data.fit``.
        scaling: of the model's folder; None for :attr:`resampling` to ``size``.
    """

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: str
    scaling: Scaling | None = field(default=None, kw_only=True)
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
        folder = preprocessor(model)
        fit, scaling = Scaling.from_folder(folder, size) if data.fit == "auto" else (data.fit, None)
        return cls(size, channels, *normalisation(data, folder, channels), fit, scaling=scaling)

    def identity(self) -> dict[str, Any]:
        """Settings for the digest of the data; without those of a folder that are the usual ones."""
        return {name: value for name, value in asdict(self).items() if name != "scaling" or value}

    def augment(self, image: Image, data: ImageConfig, random: np.random.Generator) -> Image:
        """Changes a training picture at random and scales it to the final size: crop, rotation, shift, mirror, then
        colours and RandAugment (``data.augment``)."""
        image_module = pillow()
        cut, across, down, angle, mirrored = random.random(4), *random.uniform(-1, 1, 3), random.random()
        box = _crop(image.size, data.random_crop, cut) if data.random_crop < 1 else None
        image = self._crop_randomly(image, data.augment, random) if data.augment.crop_area else self.scale(image, box)
        if data.turn or data.shift:
            moved = tuple(round(data.shift * share) for share in (across, down))
            # The corner's value fills the border: it is the background of most pictures that may be shifted.
            image = image.rotate(
                data.turn * angle, image_module.Resampling.BILINEAR, translate=moved, fillcolor=image.getpixel((0, 0))
            )
        if data.flip and mirrored < 0.5:
            image = image.transpose(image_module.Transpose.FLIP_LEFT_RIGHT)
        return augment(image, data.augment, random)

    def _crop_randomly(self, image: Image, keys: AugmentConfig, random: np.random.Generator) -> Image:
        """Random crop, scaled to the final size of the whole picture."""
        box = random_crop_box(image.size, keys.crop_area, keys.crop_shape, random)
        return image.crop(box).resize(self.final_size(image), self._filter)

    def scale(self, image: Image, box: tuple[float, float, float, float] | None = None) -> Image:
        """Scales the picture, or its box (left, top, right, bottom), to the final size."""
        final, edge = self.final_size(image), self.edge
        if box is None and (edge > self.size or (self.fit == "crop" and image.width != image.height)):
            return self._middle(image)
        if box is None and image.size == final:
            return image
        return image.resize(final, self._filter, box=box)

    @property
    def edge(self) -> int:
        """Side in pixels before the middle is cut out."""
        return self.scaling.edge if self.scaling else self.size

    @property
    def _filter(self) -> Any:
        return pillow().Resampling[self.scaling.resampling if self.scaling else self.resampling]

    def _middle(self, image: Image) -> Image:
        """Scales the picture, or its shorter side, and crops the middle, in whole pixels, like transformers'
        CLIPImageProcessor and DeiTImageProcessor."""
        filtered, shorter = self._filter, min(image.size)
        sides = image.size if self.fit == "crop" else (shorter, shorter)
        width, height = (int(self.edge * side / shorter) for side in sides)
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
    """Mean and deviation of channels of values from 0 to 1, from other ranges too; like :meth:`Pixels.from_config`."""
    normed, factor = folder.get("do_normalize", True), 255 * float(folder.get("rescale_factor") or 1 / 255)
    scale = 255.0 if folder.get("do_rescale", True) is False else factor if abs(factor - 1) > 1e-6 else 1.0
    known = [folder.get(name) if normed else usual for name, usual in (("image_mean", 0.0), ("image_std", 1.0))]
    mean, std = (
        _by_channel(key, ours or _divide(theirs, scale), channels)
        for key, ours, theirs in zip(("data.mean", "data.std"), (data.mean, data.std), known, strict=True)
    )
    if min(std) <= 0:
        raise ConfigError("data.std", list(std), "use numbers above 0")
    return mean, std


def _divide(values: Any, scale: float) -> Any:
    if scale == 1 or values is None:
        return values
    return [value / scale for value in (values if isinstance(values, list) else [values])]


def preprocessor(model: ModelConfig) -> dict[str, Any]:
    """Picture settings of the model folder's preprocessor."""
    return preprocessor_of(model.path, "image_processor")


def _by_channel(key: str, values: Any, channels: int) -> tuple[float, ...]:
    """One number per channel; a single number applies to every channel."""
    values = [values] if isinstance(values, int | float) else list(values or [USUAL])
    if len(values) not in (1, channels):
        raise ConfigError(key, values, f"give one number, or {channels}", f"the model has {channels} channels")
    return tuple(float(value) for value in (values * channels if len(values) == 1 else values))
