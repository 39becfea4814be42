"""How many places in a text a picture takes in a vision-language model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

WITHOUT_SUMMARY = ("siglip_vision_model", "smolvlm_vision", "idefics3_vision")
"""Towers whose first vector is a patch of the picture, not a summary of all."""
READ_WHOLE = ("altclip", "chinese_clip", "vision-text-dual-encoder")
"""Families whose text tower reads captions in both directions; a mask tells it where each ends."""
SEE_VIDEOS = ("qwen2_5_vl", "qwen3_vl")
"""Families that are given videos."""
SEE_PARTS = ("smolvlm", "idefics3")
"""Families that see a picture in parts of one size, and beside them the whole of it."""
READ_QUESTIONS_WHOLE = ("paligemma",)
"""Families that read what stands before an answer, pictures and text, from both sides."""


def picture_places(tower: str, size: int, patch: int, select: str, merge: int = 1) -> int:
    """Vectors of a picture that the language model gets.

    Args:
        tower: ``model_type`` of what sees.
        size, patch: pixels across a picture, and a patch.
        select: ``vision_feature_select_strategy``; ``default`` leaves the first vector out.
        merge: patches across what becomes one vector.
    """
    return (size // patch // merge) ** 2 + (tower not in WITHOUT_SUMMARY) - (select == "default")


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
        pace: places in time that a second of a video takes; None of a model that is told in the text when each of its
            pictures is seen (Qwen3-VL).
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
    def told(self) -> bool:
        """A video stands in a text as its pictures one by one, each behind its time."""
        return self.pace is None

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


BEGIN, END = "<|vision_start|>", "<|vision_end|>"
"""The tokens round what stands for a video's picture that is told its time."""
AROUND, WHOLE, BIGGEST = "<fake_token_around_image>", "<global-img>", 4096
"""The tokens round what stands for a part, and before those of the whole picture; pixels of the longer side at most."""
ACROSS = 4
"""Parts across a picture, where nothing else is said."""


@dataclass(frozen=True)
class Parts:
    """How a model cuts a picture into parts of one size (SmolVLM, arXiv:2504.05299).

    Attributes:
        side: pixels across a part.
        longest: to which a picture's longer side is scaled before.
        tokens: places in the text of a part.
        splits: it is cut at all.
    """

    side: int
    longest: int
    tokens: int
    splits: bool = True
    frames: ClassVar[int] = 1
    """Of a patch, as of :class:`Grid`."""

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a picture before it is brought to whole parts, as transformers scales it."""
        shape = width / height
        if width >= height:
            width = self.longest
            height = int(width / shape)
            height += height % 2
        else:
            height = self.longest
            width = int(height * shape)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        shape = width / height
        if width >= height and width > BIGGEST:
            height, width = int(BIGGEST / shape), BIGGEST
        elif height > BIGGEST:
            height, width = BIGGEST, int(BIGGEST * shape)
        return max(height, 1), max(width, 1)

    def places(self, height: int, width: int) -> tuple[int, int]:
        """Parts down and across of a picture of so many pixels; of 1 and 1 it is seen whole alone."""
        if not self.splits:
            return 1, 1
        height, width = self.scaled(height, width)
        shape = width / height
        if width >= height:
            across = math.ceil(width / self.side)
            return math.ceil(int(across * self.side / shape) / self.side), across
        down = math.ceil(height / self.side)
        return down, math.ceil(int(down * self.side * shape) / self.side)

    def text(self, place: str, down: int, across: int) -> str:
        """What stands in a text for a picture of so many parts, ``place`` being the token of one place."""
        each = place * self.tokens
        rows = ["".join(f"{AROUND}{part(row, at)}{each}" for at in range(across)) + "\n" for row in range(down)]
        before = "".join(rows) + "\n" if down * across > 1 else ""
        return f"{before}{AROUND}{WHOLE}{each}{AROUND}"


def part(row: int, at: int) -> str:
    """The token before those of a part."""
    return f"<row_{row + 1}_col_{at + 1}>"


PLACED = (AROUND, WHOLE, *(part(row, at) for row in range(ACROSS) for at in range(ACROSS)))
"""The tokens beside that of a place which a tokenizer of such a model has."""
