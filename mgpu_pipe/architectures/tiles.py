"""Tiles of one size into which a picture is cut, next to the whole picture (InternVL, Llama 4, Phi-4 multimodal)."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import ClassVar

IMAGE_BEGIN, IMAGE_END, MOST_TILES = "<img>", "</img>", 12
"""Tokens around a picture in tiles, and the default of most tiles."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of one size into which a picture is cut (InternVL, arXiv:2404.16821).

    Attributes:
        side: pixels across a tile.
        tokens: tokens of a tile in the text.
        fewest, most: bounds of the number of tiles.
    """

    side: int
    tokens: int
    fewest: int = 1
    most: int = MOST_TILES
    frames: ClassVar[int] = 1
    """Frames of a patch, as in :class:`Grid`."""

    def places(self, height: int, width: int) -> tuple[int, int]:
        """Tiles down and across of a picture in pixels: of those whose shape is closest the last in order of their
        number that covers less than twice the picture, like transformers; (1, 1) means only the whole picture."""
        best, least = (1, 1), math.inf
        for across, down in self._arrangements():
            distance = abs(width / height - across / down)
            if distance < least:
                best, least = (down, across), distance
            elif distance == least and width * height > 0.5 * self.side**2 * across * down:
                best = down, across
        return best

    def _arrangements(self) -> list[tuple[int, int]]:
        """Numbers of tiles across and down, few tiles first."""
        sides = range(1, self.most + 1)
        allowed = [(across, down) for across in sides for down in sides if self.fewest <= across * down <= self.most]
        return sorted(allowed, key=math.prod)

    def text(self, place: str, down: int, across: int) -> str:
        """Text of a picture of ``down`` by ``across`` tiles, with the token ``place`` for each vector."""
        tiles = down * across
        return f"{IMAGE_BEGIN}{place * (self.tokens * (tiles + (tiles > 1)))}{IMAGE_END}"


CANVAS_BEGIN, CANVAS_WHOLE, CANVAS_END = "<|image_start|>", "<|image|>", "<|image_end|>"
NEXT_TILE, NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"
"""Tokens around a picture and before the whole one, between two tiles, and after a row of tiles (Llama 4)."""
MOST_OF_CANVAS = 16
"""Default of most tiles of a canvas."""


class Canvas(Tiles):
    """Tiles onto which a picture is laid in its shape, with black to the right of it or below (Llama 4)."""

    def places(self, height: int, width: int) -> tuple[int, int]:
        """Tiles down and across of a picture in pixels, like transformers: where it need not shrink the ones that it
        fills best, else those on which it shrinks least; of equal ones the fewest."""
        scales = {
            (down, across): min(_single(down * self.side / height), _single(across * self.side / width))
            for down, across in self._canvases()
        }
        larger = [scale for scale in scales.values() if scale >= 1]
        chosen = min(larger) if larger else max(scales.values())
        return min((tiles for tiles, scale in scales.items() if scale == chosen), key=math.prod)

    def _canvases(self) -> list[tuple[int, int]]:
        """Numbers of tiles down and across, those of one shape together."""
        shapes: dict[float, list[tuple[int, int]]] = {}
        for tiles in range(self.most, 0, -1):
            for down in (number for number in range(1, tiles + 1) if tiles % number == 0):
                shapes.setdefault(down / (tiles // down), []).append((down, tiles // down))
        return [canvas for canvases in shapes.values() for canvas in canvases]

    def scaled_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a picture on its canvas; a side of a tile is the most to which it grows."""
        lengths, tiles = (height, width), self.places(height, width)
        wanted = [max(length, self.side) for length in lengths]
        rooms = [min(most, number * self.side) for most, number in zip(wanted, tiles, strict=True)]
        # transformers divides in single precision where the canvas bounds a side
        singles = [room < most for room, most in zip(rooms, wanted, strict=True)]
        shares = [
            _single(room / length) if single else room / length
            for room, length, single in zip(rooms, lengths, singles, strict=True)
        ]
        down, across = map(_single, shares) if any(singles) else shares
        short, full = (0, 1) if across < down else (1, 0)
        size, exact = list(rooms), lengths[short] * shares[full]
        size[short] = max(1, min(math.floor(_single(exact) if singles[full] else exact), rooms[short]))
        return size[0], size[1]

    def text(self, place: str, down: int, across: int) -> str:
        """Text of a picture of ``down`` by ``across`` tiles, with the token ``place`` for each vector."""
        each = place * self.tokens
        rows = (NEXT_TILE.join([each] * across) + NEXT_ROW) * down if down * across > 1 else ""
        return f"{CANVAS_BEGIN}{rows}{CANVAS_WHOLE}{each}{CANVAS_END}"


MOST_OF_MOSAIC = 36
"""Default of most tiles of a mosaic."""
SHORTEST_OF_MOSAIC = 10
"""Fewest pixels of a side of a scaled picture."""


@dataclass(frozen=True)
class Mosaic(Tiles):
    """Tiles onto which a picture is laid in its shape, with white to the right of it or below (Phi-4 multimodal,
    arXiv:2503.01743). The language model gets a vector for each square of four patches that the picture covers.

    Attributes:
        patch: pixels across a patch.
        tokens: unused; the tokens of a tile depend on the picture.
    """

    patch: int = 14

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Tiles down and across of a picture in pixels, like transformers."""
        down, across = math.ceil(height / self.side), math.ceil(width / self.side)
        return (down, across) if down * across <= self.most else super().places(height, width)

    def scaled_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a picture that fills its tiles down or across."""
        down, across = (number * self.side for number in self.tiles(height, width))
        if across / width < down / height:
            return int(height * (across / width)), across
        return down, int(width * (down / height))

    def places(self, height: int, width: int) -> tuple[int, int]:
        """Patches down and across that a picture in pixels covers; (0, 0) for one that transformers refuses."""
        sides, tiles = self.scaled_size(height, width), self.tiles(height, width)
        if min(sides) < SHORTEST_OF_MOSAIC:
            return 0, 0
        down, across = ((number * self.side - side) // self.patch for number, side in zip(tiles, sides, strict=True))
        a_tile = self.side // self.patch
        return tiles[0] * a_tile - down, tiles[1] * a_tile - across

    def text(self, place: str, down: int, across: int) -> str:
        return place * mosaic_tokens(down, across, self.side // self.patch)


def mosaic_tokens(down: int, across: int, patches: int) -> int:
    """Tokens of a picture that covers ``down`` by ``across`` patches, in tiles of ``patches`` across: a vector for each
    square of four, one after each row, as many of the whole picture, and one between them."""
    whole = patches // 2
    return -(-down // 2) * (-(-across // 2) + 1) + 1 + whole * (whole + 1)


def _single(value: float) -> float:
    """``value`` in single precision."""
    return array("f", [value])[0]
