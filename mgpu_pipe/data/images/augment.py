"""Random changes of training pictures: torchvision's crop, colour jitter, RandAugment and erasing, on Pillow.

Every random number comes from the generator of the sample, so no cut of a batch changes a picture. The formulas are
those of torchvision 0.26 (``transforms.transforms``) for Pillow's pictures. RandAugment's operators (Cubuk et al. 2020,
arXiv:1909.13719) are torchvision's (``transforms.autoaugment.RandAugment``) to the bit, with bilinear interpolation and
black where a moved picture leaves a place empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.images.decode_image import pillow
from mgpu_pipe.data.images.image_keys import AugmentConfig

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_TRIES = 10
"""Most boxes drawn until a box fits into the picture."""


def random_crop_box(
    size: tuple[int, int], area: Sequence[float], shape: Sequence[float], random: np.random.Generator
) -> tuple[int, int, int, int]:
    """Random box (left, top, right, bottom) of a picture, or its largest middle part of an allowed shape."""
    width, height = size
    low, high = np.log(shape)
    for _ in range(MAX_TRIES):
        pixels, sides = width * height * random.uniform(area[0], area[1]), float(np.exp(random.uniform(low, high)))
        across, down = round(math.sqrt(pixels * sides)), round(math.sqrt(pixels / sides))
        if 0 < across <= width and 0 < down <= height:
            top, left = int(random.integers(height - down + 1)), int(random.integers(width - across + 1))
            return left, top, left + across, top + down
    across, down = width, height
    if width / height < min(shape):
        down = max(1, round(width / min(shape)))
    elif width / height > max(shape):
        across = max(1, round(height * max(shape)))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def augment(image: Image, keys: AugmentConfig, random: np.random.Generator) -> Image:
    """Changes colours and applies RandAugment, each if ``keys`` ask for it."""
    if keys.has_jitter and random.random() < keys.jitter:
        image = _jitter(image, keys, random)
    names = list(RAND_OPERATORS)
    for _ in range(keys.rand_ops):
        name, sign = names[int(random.integers(len(names)))], 1 - 2 * int(random.integers(2))
        image = rand_operator(image, name, keys.rand_magnitude, sign)
    return image


def _jitter(image: Image, keys: AugmentConfig, random: np.random.Generator) -> Image:
    """Changes brightness, contrast, saturation and hue in a random order."""
    factors = {"Brightness": keys.brightness, "Contrast": keys.contrast, "Color": keys.saturation}
    changes: list[Callable[[Image], Image]] = [
        partial(enhance, name=name, factor=random.uniform(max(0.0, 1 - most), 1 + most))
        for name, most in factors.items()
        if most
    ]
    if keys.hue:
        changes.append(partial(turn_hue, share=random.uniform(-keys.hue, keys.hue)))
    for index in random.permutation(len(changes)):
        image = changes[index](image)
    return image


def erase(values: NDArray[np.float32], keys: AugmentConfig, random: np.random.Generator) -> None:
    """Erases in place a random rectangle that fits into (channels, height, width), if ``keys`` ask for it."""
    if not keys.erase or random.random() >= keys.erase:
        return
    channels, height, width = values.shape
    low, high = np.log(keys.erase_shape)
    for _ in range(MAX_TRIES):
        pixels, sides = (
            height * width * random.uniform(keys.erase_area[0], keys.erase_area[1]),
            float(np.exp(random.uniform(low, high))),
        )
        down, across = round(math.sqrt(pixels * sides)), round(math.sqrt(pixels / sides))
        if down < height and across < width:
            top, left = int(random.integers(height - down + 1)), int(random.integers(width - across + 1))
            noise = random.standard_normal((channels, down, across), np.float32) if keys.erase_with == "noise" else 0
            values[:, top : top + down, left : left + across] = noise
            return


STRENGTHS = 30
"""Largest ``data.augment.rand_magnitude``."""
FARTHEST = 150 / 331
"""Share of the side that a picture is moved by at most (150 pixels of AutoAugment's 331)."""
Operator = Callable[["Image", float], "Image"]


def turn_hue(image: Image, share: float) -> Image:
    """Turns the hue by a share of the colour circle, -0.5 to 0.5."""
    if image.mode == "L":
        return image
    hue, saturation, value = image.convert("HSV").split()
    turned = np.asarray(hue) + np.array(int(share * 255) % 256, np.uint8)  # past 255 it starts at 0 again
    parts = (pillow().fromarray(turned), saturation, value)
    return pillow().merge("HSV", parts).convert(image.mode)


def enhance(image: Image, name: str, factor: float) -> Image:
    """Multiplies brightness, contrast, saturation or sharpness, by the name of Pillow's enhancer."""
    from PIL import ImageEnhance

    enhanced: Image = getattr(ImageEnhance, name)(image).enhance(factor)
    return enhanced


def _affine(image: Image, *matrix: float) -> Image:
    """Samples the picture at ``matrix`` times the place, bilinearly; black outside."""
    module = pillow()
    moved: Image = image.transform(image.size, module.Transform.AFFINE, matrix, module.Resampling.BILINEAR)
    return moved


def _rotate(image: Image, degrees: float) -> Image:
    return image.rotate(degrees, pillow().Resampling.BILINEAR)


def _equalize(image: Image, _: float) -> Image:
    from PIL import ImageOps

    return ImageOps.equalize(image)


def _autocontrast(image: Image, _: float) -> Image:
    from PIL import ImageOps

    return ImageOps.autocontrast(image)


def _posterize(image: Image, bits: float) -> Image:
    from PIL import ImageOps

    return ImageOps.posterize(image, round(bits))


def _solarize(image: Image, threshold: float) -> Image:
    from PIL import ImageOps

    return ImageOps.solarize(image, math.ceil(threshold))  # whole values: those below it are the same


@dataclass(frozen=True)
class RandOperator:
    """An operator of RandAugment.

    Attributes:
        apply: changes a picture by an amount.
        strongest: amount at the largest magnitude, for a picture's (width, height).
        weakest: amount at magnitude 0.
        is_signed: whether half of the pictures get the negative amount.
    """

    apply: Operator
    strongest: Callable[[tuple[int, int]], float] = lambda size: 0.0
    weakest: float = 0.0
    is_signed: bool = False

    def amount(self, size: tuple[int, int], magnitude: int) -> float:
        """Amount at ``magnitude``, 0 to 30; ends and step are float32, as those of ``torch.linspace``."""
        start, end = float(np.float32(self.weakest)), float(np.float32(self.strongest(size)))
        step, rest = float(np.float32(end - start) / np.float32(STRENGTHS)), STRENGTHS - magnitude
        return float(np.float32(start + step * magnitude if magnitude < rest else end - step * rest))


def _enhancer(name: str) -> RandOperator:
    return RandOperator(lambda image, amount: enhance(image, name, 1 + amount), lambda size: 0.9, is_signed=True)


RAND_OPERATORS = {
    "identity": RandOperator(lambda image, _: image),
    "shear_x": RandOperator(
        lambda image, tangent: _affine(image, 1, tangent, 0, 0, 1, 0), lambda size: 0.3, is_signed=True
    ),
    "shear_y": RandOperator(
        lambda image, tangent: _affine(image, 1, 0, 0, tangent, 1, 0), lambda size: 0.3, is_signed=True
    ),
    "translate_x": RandOperator(
        lambda image, pixels: _affine(image, 1, 0, -int(pixels), 0, 1, 0),
        lambda size: FARTHEST * size[0],
        is_signed=True,
    ),
    "translate_y": RandOperator(
        lambda image, pixels: _affine(image, 1, 0, 0, 0, 1, -int(pixels)),
        lambda size: FARTHEST * size[1],
        is_signed=True,
    ),
    "rotate": RandOperator(_rotate, lambda size: 30.0, is_signed=True),
    "brightness": _enhancer("Brightness"),
    "color": _enhancer("Color"),
    "contrast": _enhancer("Contrast"),
    "sharpness": _enhancer("Sharpness"),
    "posterize": RandOperator(_posterize, lambda size: 4.0, weakest=8.0),
    "solarize": RandOperator(_solarize, lambda size: 0.0, weakest=255.0),
    "autocontrast": RandOperator(_autocontrast),
    "equalize": RandOperator(_equalize),
}
"""RandAugment's operators by name."""


def rand_operator(image: Image, name: str, magnitude: int, sign: int) -> Image:
    """Applies an operator of :data:`RAND_OPERATORS` at ``magnitude``, 0 to 30, in the direction ``sign``, 1 or -1."""
    operator = RAND_OPERATORS[name]
    amount = operator.amount(image.size, magnitude)
    return operator.apply(image, sign * amount if operator.is_signed else amount)
