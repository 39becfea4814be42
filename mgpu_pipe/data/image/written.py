"""The tokens that stand in a row for a picture or a video. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.families.pictures import BEGIN, END, Parts

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Written:
    """Which tokens take the place of one that stands for a picture or a video.

    Args:
        tokenizer: its folder.
        parts: of a model that sees pictures in parts; a text names each.
    """

    def __init__(self, tokenizer: Path, parts: Parts | None) -> None:
        self._folder, self._parts = tokenizer, parts
        self._read: Tokenizer | None = None
        self._known: dict[tuple[Any, ...], NDArray[np.int64]] = {}

    def ids(self, token: int, places: Sequence[int], times: Sequence[float] = ()) -> NDArray[np.int64]:
        """The tokens; none for what cannot be used.

        Args:
            token: that stands for it.
            places: in time, down and across; of parts their number.
            times: of a video whose pictures are each told theirs.
        """
        if not all(places) or (self._parts is None and not times):
            return np.full(int(np.prod(places)), token, np.int64)
        key = (token, *map(int, places), *times)
        if key not in self._known:
            tokenizer = self._tokenizer()
            place = tokenizer.id_to_token(token)
            assert place is not None, "it wrote it"
            if self._parts is None:
                each = f"{BEGIN}{place * int(places[1] * places[2])}{END}"
                text = "".join(f"<{time:.1f} seconds>{each}" for time in times)
            else:
                text = self._parts.text(place, int(places[1]), int(places[2]))
            self._known[key] = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        return self._known[key]

    def knows(self, token: int) -> bool:
        """Whether the tokenizer writes it."""
        return self._tokenizer().id_to_token(token) is not None

    def _tokenizer(self) -> Tokenizer:
        if self._read is None:
            from tokenizers import Tokenizer

            self._read = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        return self._read

    def lengths(self, token: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many tokens stand for each, (pictures,)."""
        if self._parts is None:
            return places.prod(1)
        different, which = np.unique(places, axis=0, return_inverse=True)
        return np.array([len(self.ids(token, one)) for one in different.tolist()], np.int64)[which.reshape(-1)]
