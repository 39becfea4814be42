"""How many places in a text a picture takes in a vision-language model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WITHOUT_SUMMARY = ("siglip_vision_model",)
"""Towers whose first vector is a patch of the picture, not a summary of all."""
READ_WHOLE = ("altclip", "chinese_clip")
"""Families whose text tower reads captions in both directions; a mask tells it where each ends."""
SEE_VIDEOS = ("qwen2_5_vl",)
"""Families that are given videos."""


def picture_places(tower: str, size: int, patch: int, select: str) -> int:
    """Vectors of a picture that the language model gets.

    Args:
        tower: ``model_type`` of what sees.
        size, patch: pixels across a picture, and a patch.
        select: ``vision_feature_select_strategy``; ``default`` leaves the first vector out.
    """
    return (size // patch) ** 2 + (tower not in WITHOUT_SUMMARY) - (select == "default")


LONGEST = 200
"""Times that a picture may be as long as it is wide."""


@dataclass(frozen=True)
class Grid:
    """How a model cuts pictures that have sizes of their own (Qwen-VL, arXiv:2409.12191).

    Attributes:
        patch: pixels across a patch.
        merge: patches across what becomes one vector of the language model's.
        frames: of a video that a patch holds; a still picture is all of them.
        channels: of the pictures.
        least, most: pixels of a picture, or of each frame of a video; another one is scaled.
        pace: places in time that a second of a video takes; None of a model that gives videos no time, which are not
            read.
    """

    patch: int
    merge: int
    frames: int
    channels: int
    least: int = 0
    most: int = 0
    pace: float | None = None

    @classmethod
    def of(cls, field: Callable[[str], Any]) -> Grid | None:
        """From the fields of a vision tower; None where it takes pictures of one size."""
        names = ("patch_size", "spatial_merge_size", "temporal_patch_size", "in_channels")
        patch, merge, frames, channels = map(field, names)
        return cls(patch, merge, frames, channels, pace=field("tokens_per_second")) if merge is not None else None

    @property
    def side(self) -> int:
        """Pixels across what becomes one vector."""
        return self.patch * self.merge

    @property
    def values(self) -> int:
        """Of a patch."""
        return self.channels * self.frames * self.patch**2

    def places(self, height: int, width: int) -> tuple[int, int]:
        """Vectors of a picture of so many pixels, down and across, as Qwen scales it; (0, 0) where it refuses."""
        if max(height, width) > LONGEST * min(height, width):
            return 0, 0
        down, across = (round(pixels / self.side) for pixels in (height, width))
        area = self.side**2
        if down * across * area > self.most:
            share = math.sqrt(height * width / self.most)
            down, across = (max(1, math.floor(pixels / share / self.side)) for pixels in (height, width))
        elif down * across * area < self.least:
            share = math.sqrt(self.least / (height * width))
            down, across = (math.ceil(pixels * share / self.side) for pixels in (height, width))
        return down, across
