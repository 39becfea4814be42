"""Tokens that pictures take in the text of a vision-language model."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mgpu_pipe.architectures.find import family_of


def picture_places(tower: str, across: int, field: Callable[[str], Any]) -> int:
    """Number of vectors of a picture of one size for the language model.

    Args:
        tower: ``model_type`` of the vision tower.
        across: patches across a picture.
        field: gives a field of the model, None where it has none: ``scale_factor`` patches across one vector,
            ``downsample_ratio`` or ``pixel_shuffle_ratio`` vectors across one patch, ``mm_tokens_per_image`` vectors
            of a picture;
            ``vision_feature_select_strategy`` is ``default`` where the tower's first vector is dropped.

    Raises:
        ValueError: vectors that do not divide the patches; the field, and the reason.
    """
    number = field("mm_tokens_per_image")
    if number is not None:
        if math.isqrt(number) ** 2 != number or not number or across % math.isqrt(number):
            raise ValueError("mm_tokens_per_image", f"a picture has {across} x {across} patches")
        return int(number)
    name = "downsample_ratio" if field("downsample_ratio") else "pixel_shuffle_ratio"
    ratio = field(name)
    merge = field("scale_factor") or (round(1 / ratio) if ratio else 1)
    if ratio and across % merge:
        raise ValueError(name, f"a picture has {across} x {across} patches")
    select = field("vision_feature_select_strategy")
    return int((across // merge) ** 2 + family_of(tower).has_summary - (select == "default"))


LONGEST = 200
"""Largest ratio of a picture's sides."""


@dataclass(frozen=True)
class Grid:
    """Patches of pictures in native size (Qwen-VL, arXiv:2409.12191).

    Attributes:
        patch: pixels across a patch.
        merge: patches across one vector of the language model.
        frames: frames of a video in a patch; a still picture is repeated.
        channels: channels of the pictures.
        least, most: bounds of the pixels of a picture or frame; others are scaled.
        pace: places in time per second of video; None if the text states the time of each frame (Qwen3-VL).
    """

    patch: int
    merge: int
    frames: int
    channels: int
    least: int = 0
    most: int = 0
    pace: float | None = None

    @classmethod
    def from_fields(cls, field: Callable[[str], Any]) -> Grid | None:
        """Grid from the fields of a vision tower; None if it takes pictures of one size."""
        names = ("patch_size", "spatial_merge_size", "temporal_patch_size", "in_channels")
        patch, merge, frames, channels = map(field, names)
        return cls(patch, merge, frames, channels, pace=field("tokens_per_second")) if merge is not None else None

    @property
    def has_timestamps(self) -> bool:
        """Whether the text has the frames of a video one by one, each after its time."""
        return self.pace is None

    @property
    def side(self) -> int:
        """Pixels across one vector."""
        return self.patch * self.merge

    @property
    def values(self) -> int:
        """Number of values of a patch."""
        return self.channels * self.frames * self.patch**2

    def places(self, height: int, width: int) -> tuple[int, int]:
        """Vectors down and across of a picture in pixels, scaled like Qwen; (0, 0) if refused."""
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
"""Tokens around a video's frame with a timestamp."""
AROUND, WHOLE, BIGGEST = "<fake_token_around_image>", "<global-img>", 4096
"""Token around a part, token before the whole picture, and most pixels of the longer side."""
ACROSS = 4
"""Default number of parts across a picture."""


@dataclass(frozen=True)
class Parts:
    """Parts of one size into which a picture is cut (SmolVLM, arXiv:2504.05299).

    Attributes:
        side: pixels across a part.
        longest: pixels to which the longer side is scaled first.
        tokens: tokens of a part in the text.
        splits: whether pictures are cut.
    """

    side: int
    longest: int
    tokens: int
    splits: bool = True
    frames: ClassVar[int] = 1
    """Frames of a patch, as in :class:`Grid`."""

    def scaled_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a picture before it is scaled to whole parts, like transformers."""
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
        """Parts down and across of a picture in pixels; (1, 1) means only the whole picture."""
        if not self.splits:
            return 1, 1
        height, width = self.scaled_size(height, width)
        shape = width / height
        if width >= height:
            across = math.ceil(width / self.side)
            return math.ceil(int(across * self.side / shape) / self.side), across
        down = math.ceil(height / self.side)
        return down, math.ceil(int(down * self.side * shape) / self.side)

    def text(self, place: str, down: int, across: int) -> str:
        """Text of a picture of ``down`` by ``across`` parts, with the token ``place`` for each vector."""
        each = place * self.tokens
        rows = ["".join(f"{AROUND}{part(row, column)}{each}" for column in range(across)) + "\n" for row in range(down)]
        before = "".join(rows) + "\n" if down * across > 1 else ""
        return f"{before}{AROUND}{WHOLE}{each}{AROUND}"


def part(row: int, column: int) -> str:
    """Token before those of a part."""
    return f"<row_{row + 1}_col_{column + 1}>"


PLACED = (AROUND, WHOLE, *(part(row, column) for row in range(ACROSS) for column in range(ACROSS)))
"""Other picture tokens in a tokenizer of such a model."""


def encoding_costs(
    grids: Sequence[Sequence[int]], field: Callable[[str], Any], feed_forward_matrices: int = 2
) -> list[float]:
    """Relative FLOPs of encoding pictures in native size, by their patches in time, down and across.

    A patch costs the matrix products of a layer, and attention to the patches of its frame or of its window.

    Args:
        field: value of a field of the tower's configuration; None if it has no such field.
        feed_forward_matrices: 3 with a gate.
    """
    width, inner, depth = (int(field(name)) for name in ("hidden_size", "intermediate_size", "depth"))
    whole, window = field("fullatt_block_indexes"), field("window_size")
    share = 1.0 if whole is None else len(whole) / depth
    local = 0 if window is None else (int(window) // int(field("patch_size"))) ** 2
    products = 8 * width**2 + 2 * feed_forward_matrices * width * inner
    costs = []
    for times, down, across in grids:
        frame = down * across
        seen = share * frame + (1 - share) * min(frame, local)
        costs.append(times * frame * (products + 4 * width * seen))
    return costs


def deal_by_cost(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Numbers of the items of each of ``ranks`` shares, ascending: the costliest item first, each to the cheapest share
    (longest processing time first: Graham 1969). Every rank computes the same."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [(0.0, rank) for rank in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        total, rank = totals[0]
        shares[rank].append(item)
        heapq.heapreplace(totals, (total + costs[item], rank))
    return [sorted(share) for share in shares]


IMAGE_BREAK, IMAGE_STOP = "[IMG_BREAK]", "[IMG_END]"
"""Tokens after a row of a picture's places, and after the last one (Pixtral)."""
IMAGE_OPEN, IMAGE_CLOSE = "<|image>", "<image|>"
"""Tokens around a picture (Gemma 4)."""
SOUND_OPEN, SOUND_PLACE, SOUND_CLOSE = "<|audio>", "<|audio|>", "<audio|>"
"""Tokens around a recording, and of its places, in the published tokenizer (Gemma 4)."""


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
        is_sound = place in ("<audio>", SOUND_PLACE)
        opened, closed = (SOUND_OPEN, SOUND_CLOSE) if is_sound else (IMAGE_OPEN, IMAGE_CLOSE)
        return f"{opened}{place * (down * across)}{closed}"
