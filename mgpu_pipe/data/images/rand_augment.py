"""RandAugment's operators (Cubuk et al. 2020, arXiv:1909.13719) on Pillow.

They are torchvision 0.26's (``transforms.autoaugment.RandAugment``) to the bit, with bilinear interpolation and black
where a moved picture leaves a place empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mgpu_pipe.data.images.decode_image import pillow

if TYPE_CHECKING:
    from PIL.Image import Image

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
