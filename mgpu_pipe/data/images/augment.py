"""Random changes of training pictures: torchvision's crop, colour jitter, RandAugment and erasing, on Pillow.

Every random number comes from the generator of the sample, so no cut of a batch changes a picture. The formulas are
those of torchvision 0.26 (``transforms.transforms``) for Pillow's pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.images.image_keys import AugmentConfig
from mgpu_pipe.data.images.rand_augment import RAND_OPERATORS, enhance, rand_operator, turn_hue

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_TRIES = 10
"""Boxes that are drawn until one fits into the picture."""


def random_crop_box(
    size: tuple[int, int], area: Sequence[float], shape: Sequence[float], random: np.random.Generator
) -> tuple[int, int, int, int]:
    """Random box (left, top, right, bottom) of a picture of (width, height).

    Of a picture that no drawn box fits into, it is the largest middle part of an allowed shape.
    """
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
    """Erases a random rectangle of a normalised picture, (channels, height, width), in place, if ``keys`` ask for it.

    A picture that no drawn rectangle fits into stays as it is.
    """
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
