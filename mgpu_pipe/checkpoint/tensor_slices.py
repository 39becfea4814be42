"""Boxes: a rank's part of a tensor in the coordinates of the unsharded module.

Every engine's sharding is boxes. A :class:`Piece` is a box with the live tensor that fills it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
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

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.shape)

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


def tiling_fault(global_shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why ``boxes`` do not cover every element of a tensor exactly once; None if they do.

    Boxes that lie inside, do not overlap and have the tensor's volume together leave no gap.
    """
    for box in boxes:
        if len(box.offsets) != len(global_shape) or len(box.shape) != len(global_shape):
            return f"{box.key} does not have the {len(global_shape)} dimensions of the tensor"
        for offset, size, limit in zip(box.offsets, box.shape, global_shape, strict=True):
            if offset < 0 or size < 0 or offset + size > limit:
                return f"{box.key} of shape {list(box.shape)} leaves the tensor of shape {list(global_shape)}"
    if 0 not in global_shape and not all(box.volume for box in boxes):
        return f"one of its {len(boxes)} boxes holds nothing"
    try:
        overlap = None if 0 in global_shape else _first_overlap(list(boxes), range(len(global_shape)))
    except _TooEntangled:
        return f"its {len(boxes)} boxes are cut in no way that a strategy cuts"
    if overlap:
        return f"{overlap[0].key} and {overlap[1].key} overlap"
    covered, volume = sum(box.volume for box in boxes), prod(global_shape)
    if covered != volume or not boxes:
        return f"{len(boxes)} boxes hold {covered} of the {volume} elements"
    return None


class _TooEntangled(Exception):
    """Many boxes that no straight cut separates."""


MOST_ENTANGLED = 512
"""Boxes that are compared pair by pair. What strategies cut falls apart by straight cuts, one dim after another."""
MOST_LOOKS = 64
"""Times that a box may be looked at: cuts that lie in one another."""


def _first_overlap(boxes: list[Box], dims: Sequence[int]) -> tuple[Box, Box] | None:
    """Two boxes that overlap; None if none do. Straight cuts part the boxes until few are left together.

    Raises:
        _TooEntangled: more are left together than are compared, or parting them takes too many cuts.
    """
    left = [boxes]
    looks = MOST_LOOKS * len(boxes) + MOST_ENTANGLED
    while left:
        together = left.pop()
        looks -= len(together)
        parts = next((parts for dim in dims if len(parts := _parted(together, dim)) > 1), None)
        if parts is not None:
            left += [part for part in parts if len(part) > 1]
            if looks < 0:
                raise _TooEntangled
        elif len(together) > MOST_ENTANGLED:
            raise _TooEntangled
        else:
            looks -= len(together) ** 2 // MOST_ENTANGLED
            for index, box in enumerate(together):
                for other in together[:index]:
                    if not dims or other.intersection(box):
                        return other, box
    return None


def _parted(boxes: list[Box], dim: int) -> list[list[Box]]:
    """The boxes in groups that a straight cut across ``dim`` separates."""
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda one: (one.offsets[dim], one.shape[dim])):
        if box.offsets[dim] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.offsets[dim] + box.shape[dim])
    return groups
