"""The tokens that stand in a row for a picture or a video. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.families.pictures import Parts


class Written:
    """Which tokens take the place of one that stands for a picture or a video.

    Args:
        tokenizer: its folder.
        parts: of a model that sees pictures in parts; a text names each.
    """

    def __init__(self, tokenizer: Path, parts: Parts | None) -> None:
        self._folder, self._parts = tokenizer, parts
        self._known: dict[tuple[int, ...], NDArray[np.int64]] = {}

    def ids(self, token: int, places: Sequence[int]) -> NDArray[np.int64]:
        """The tokens; none for what cannot be used.

        Args:
            token: that stands for it.
            places: in time, down and across; of parts their number.
        """
        if self._parts is None or not all(places):
            return np.full(int(np.prod(places)), token, np.int64)
        key = (token, *map(int, places))
        if key not in self._known:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
            place = tokenizer.id_to_token(token)
            assert place is not None, "it wrote it"
            text = self._parts.text(place, *key[-2:])
            self._known[key] = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        return self._known[key]

    def lengths(self, token: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many tokens stand for each, (pictures,)."""
        if self._parts is None:
            return places.prod(1)
        different, which = np.unique(places, axis=0, return_inverse=True)
        return np.array([len(self.ids(token, one)) for one in different.tolist()], np.int64)[which.reshape(-1)]
