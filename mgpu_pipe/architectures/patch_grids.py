"""Patches of pictures in native size, whose tokens have positions along one axis (Pixtral, Gemma 4)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

IMAGE_BREAK, IMAGE_STOP = "[IMG_BREAK]", "[IMG_END]"
"""Tokens after a row of a picture's places, and after the last one (Pixtral)."""
IMAGE_OPEN, IMAGE_CLOSE = "<|image>", "<image|>"
"""Tokens around a picture (Gemma 4)."""


@dataclass(frozen=True)
class PatchGrid(ABC):
    """Patches of a picture, row by row.

    Attributes:
        patch: pixels across a patch.
        merge: patches across one vector of the language model.
        channels: channels of the pictures.
        most: bound of a picture's size, of the kind's own unit.
    """

    patch: int
    merge: int
    channels: int
    most: int
    frames: ClassVar[int] = 1
    """Frames of a patch, as in :class:`mgpu_pipe.architectures.pictures.Grid`."""

    @property
    def side(self) -> int:
        """Pixels across one vector."""
        return self.patch * self.merge

    @property
    def values(self) -> int:
        """Number of values of a patch."""
        return self.channels * self.patch**2

    @abstractmethod
    def places(self, height: int, width: int) -> tuple[int, int]:
        """Vectors down and across of a picture in pixels."""

    @abstractmethod
    def text(self, place: str, down: int, across: int) -> str:
        """Text of a picture of ``down`` by ``across`` vectors, with the token ``place`` for each."""


class RowGrid(PatchGrid):
    """Pictures scaled to at most ``most`` pixels a side, with a token after each row (Pixtral, arXiv:2410.07073)."""

    def places(self, height: int, width: int) -> tuple[int, int]:
        ratio = max(height / self.most, width / self.most)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return max(1, -(-height // self.side)), max(1, -(-width // self.side))

    def text(self, place: str, down: int, across: int) -> str:
        return IMAGE_BREAK.join([place * across] * down) + IMAGE_STOP


class PooledGrid(PatchGrid):
    """Pictures scaled to as many vectors as fit into ``most`` in their shape (Gemma 4)."""

    def places(self, height: int, width: int) -> tuple[int, int]:
        share = math.sqrt(self.most * self.side**2 / (height * width))
        down, across = (math.floor(share * pixels / self.side) for pixels in (height, width))
        if not down:
            return 1, min(width // height, self.most)
        return (down, across) if across else (min(height // width, self.most), 1)

    def text(self, place: str, down: int, across: int) -> str:
        return f"{IMAGE_OPEN}{place * (down * across)}{IMAGE_CLOSE}"
