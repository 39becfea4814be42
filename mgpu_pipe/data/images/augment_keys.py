"""Keys of the random changes of training pictures, as torchvision and timm define them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from mgpu_pipe.errors import ConfigError

MAX_SIDES = 100.0
"""Most width over height of a crop or an erased part; the least is its inverse."""


@dataclass
class AugmentConfig:
    crop_area: list[float] = field(default_factory=list)
    """Least and most share of the area that a random crop keeps, [0.08,1] in torchvision's and timm's recipes; empty
    crops none. The first of the changes, which follow in the order of these keys."""
    crop_shape: list[float] = field(default_factory=lambda: [3 / 4, 4 / 3])
    """Least and most width over height of that crop, drawn evenly by logarithm (Szegedy et al. 2015)."""
    jitter: float = field(default=1.0, metadata={"at_least": 0, "at_most": 1})
    """Share of the pictures whose colours change by the next four keys, in a random order."""
    brightness: float = field(default=0.0, metadata={"at_least": 0})
    """Brightness is multiplied by a factor from 1 - this, at least 0, to 1 + this; saturation and contrast alike."""
    contrast: float = field(default=0.0, metadata={"at_least": 0})
    """Furthest from 1 that the factor of the contrast is."""
    saturation: float = field(default=0.0, metadata={"at_least": 0})
    """Furthest from 1 that the factor of the saturation is; grey pictures have none."""
    hue: float = field(default=0.0, metadata={"at_least": 0, "at_most": 0.5})
    """Share of the colour circle that the hue turns by at most, either way; grey pictures have none."""
    rand_ops: int = field(default=0, metadata={"at_least": 0, "at_most": 14})
    """RandAugment (Cubuk et al. 2020): operators that each picture gets, drawn from torchvision's 14; 0 for none."""
    rand_magnitude: int = field(default=9, metadata={"at_least": 0, "at_most": 30})
    """Strength of these operators, on torchvision's scale of 0 to 30."""
    erase: float = field(default=0.0, metadata={"at_least": 0, "at_most": 1})
    """Share of the pictures of which a rectangle is erased (Zhong et al. 2020)."""
    erase_area: list[float] = field(default_factory=lambda: [0.02, 0.33])
    """Least and most share of the area that is erased."""
    erase_shape: list[float] = field(default_factory=lambda: [0.3, 3.3])
    """Least and most height over width of what is erased, drawn evenly by logarithm."""
    erase_with: Literal["mean", "noise"] = "mean"
    """Content of the erased area: the mean colour (0 after normalisation), or normal noise (timm's pixel mode)."""

    @property
    def has_jitter(self) -> bool:
        """Whether colours change."""
        return self.jitter > 0 and any((self.brightness, self.contrast, self.saturation, self.hue))

    def errors(self, crops_already: bool, can_erase: bool) -> Iterator[ConfigError]:
        """Yields what cannot work.

        Args:
            crops_already: ``data.random_crop`` crops.
            can_erase: whether a sample is one array of a picture.
        """
        for name, most in (
            ("crop_area", 1.0),
            ("crop_shape", MAX_SIDES),
            ("erase_area", 1.0),
            ("erase_shape", MAX_SIDES),
        ):
            values, least = getattr(self, name), 1 / most if most > 1 else 0.0
            if name == "crop_area" and not values:
                continue
            if len(values) != 2 or not least <= values[0] <= values[1] <= most:
                limits = f"{least:g} <= least <= most <= {most:g}"
                yield ConfigError(f"data.augment.{name}", values, f"give two numbers, [least,most], {limits}")
            elif values[0] == 0:
                yield ConfigError(f"data.augment.{name}", values, "let the least be above 0", "no area is no picture")
        if self.crop_area and crops_already:
            fix = "use data.random_crop=1, or leave it out"
            yield ConfigError("data.augment.crop_area", self.crop_area, fix, "data.random_crop crops already")
        if self.erase and not can_erase:
            reason = "the pictures of a conversation are cut into patches"
            yield ConfigError("data.augment.erase", self.erase, "use 0", reason)
