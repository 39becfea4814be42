"""Boxes: a rank's part of a tensor in the coordinates of the unsharded module.

Every engine's sharding is boxes (DESIGN 9). A :class:`Piece` is a box with the live tensor that fills it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, order=True)
class Box:
    """An axis-aligned block of the unsharded tensor ``name``; a scalar has empty ``offsets`` and ``shape``."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """The entry's name in a file: ``name@o0,o1``; ``name@`` for a scalar."""
        return f"{self.name}@{','.join(map(str, self.offsets))}"

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Box:
        return cls(name, (0,) * len(shape), tuple(shape))

    def intersection(self, other: Box) -> Box | None:
        """The block both boxes cover, or None."""
        if self.name != other.name or len(self.shape) != len(other.shape):
            return None
        low = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        )
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            return None
        return Box(self.name, low, tuple(h - lo for lo, h in zip(low, high, strict=True)))


@dataclass
class Piece:
    """A box, the shape of the whole tensor it belongs to, and the live tensor (of the box's shape) that fills it.

    Saving reads ``tensor``; loading writes into it in place.
    """

    box: Box
    global_shape: tuple[int, ...]
    tensor: torch.Tensor
