"""Conversations with pictures as tensors: one row a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.image.clips import StoredClips
from mgpu_pipe.data.image.dataset import StoredPictures
from mgpu_pipe.data.image.grids import GridPixels, chat_pixels, row_positions, seen_apart
from mgpu_pipe.data.image.keys import PictureChatConfig
from mgpu_pipe.data.samples import SampleSet, Split, random_of
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.encode import TRAINED
from mgpu_pipe.data.text.token_store import TokenStore

if TYPE_CHECKING:
    from PIL.Image import Image

    from mgpu_pipe.data.image.chats import PreparedPictureChats


class PictureChatSamples:
    """One split of conversations with pictures, a :class:`mgpu_pipe.data.samples.SampleSet`.

    Args:
        reopen: gives the same samples in another process; it can be pickled.
    """

    def __init__(
        self, config: RunConfig, prepared: PreparedPictureChats, split: Split, reopen: Callable[[], SampleSet]
    ) -> None:
        assert isinstance(config.data, PictureChatConfig)
        self._config, self._data, self._known, self._reopen = config, config.data, prepared, reopen
        self._pixels, self._trains = chat_pixels(config.data, config.model), split == "train"
        self._stored = StoredPictures(prepared.pictures_of(split), self._pixels.channels)
        self._clips = StoredClips(prepared.clips_of(split))
        store, documents = TokenStore.open(prepared.folder_of(split)), prepared.documents(split)
        assert store.loss_mask is not None
        self._tokens, self._mask = store.tokens, store.loss_mask
        self._start, self._end = store.offsets[documents], store.offsets[documents + 1]
        self._all = prepared.shown_in(split)
        self._first, self._last = self._all.offsets[documents], self._all.offsets[documents + 1]
        self._places, self._standing, self._written = prepared.places_in(split), prepared.standing, prepared.written()
        self.lengths = prepared.lengths(split)[documents]
        counted = np.concatenate([[0], np.cumsum(store.loss_mask & TRAINED != 0)])
        self._units = counted[self._end] - counted[np.minimum(self._start + 1, self._end)]

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the files itself."""
        return self._reopen, ()

    def __len__(self) -> int:
        return len(self._start)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return int(self._units[indices].sum())

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * self._known.seq_len

    def padding(self, indices: NDArray[np.int64]) -> int:
        return self.positions(indices) - int(self.lengths[indices].sum())

    def costs(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places that a conversation's pictures take, and the tower works for; rows are equally long."""
        places = np.concatenate([[0], np.cumsum(self._places.prod(1))])
        found: NDArray[np.int64] = places[self._last[indices]] - places[self._first[indices]]
        return found

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """The conversations ``indices``, as :mod:`mgpu_pipe.objectives.vision_language` describes them."""
        ids = np.full((len(indices), self._known.seq_len + 1), self._known.padding_token_id, np.int64)
        labels = np.full_like(ids, IGNORE_INDEX)
        for row, index in enumerate(indices.tolist()):
            self._fill(index, ids[row], labels[row])
        shown = [self._shown(*one) for one in zip(indices.tolist(), numbers.tolist(), strict=True)]
        arrays = {"input_ids": ids[:, :-1], "labels": labels[:, 1:]}
        if isinstance(self._pixels, GridPixels):
            grid = self._pixels.grid
            patches = [np.concatenate(one) if one else np.zeros((0, grid.values), np.float32) for one in shown]
            of = [self._of(index) for index in indices.tolist()]
            seconds = [self._all.seconds[self._all.pictures[one]] for one in of]
            apart = [seen_apart(grid, self._places[one], step) for one, step in zip(of, seconds, strict=True)]
            placed = np.isin(arrays["input_ids"], self._standing)
            positions = [row_positions(tokens, *one) for tokens, one in zip(placed, apart, strict=True)]
            grids = [places * (1, grid.merge, grid.merge) for places, _ in apart]
            arrays |= {"position_ids": np.stack(positions), "grids": _together(grids, (3,), np.int64)}
            arrays["pixel_values"] = _together(patches, (grid.values,))
        else:
            side = (self._pixels.channels, self._pixels.size, self._pixels.size)
            parts = [np.concatenate(one) if one else np.zeros((0, *side), np.float32) for one in shown]
            arrays["pictures"] = np.array([len(one) for one in parts], np.int64)
            arrays["pixel_values"] = _together(parts, side)
            if self._data.cache_features:
                arrays["shown"] = _together(
                    [self._all.pictures[self._of(one)] for one in indices.tolist()], (), np.int64
                )
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}

    def _of(self, index: int) -> slice:
        """The pictures of a conversation among those shown."""
        return slice(int(self._first[index]), int(self._last[index]))

    def _shown(self, index: int, number: int) -> list[NDArray[np.float32]]:
        """The pictures of a conversation, as the model sees them."""
        random, arrays = random_of(self._config.seed, number), list[NDArray[np.float32]]()
        for images in self.images(index):
            if self._trains:  # all frames of a video are changed alike
                before = random.bit_generator.state
                for at, image in enumerate(images):
                    random.bit_generator.state = before
                    images[at] = self._pixels.changed(image, self._data, random)
            else:
                images = [self._pixels.fitted(image) for image in images]
            arrays.append(self._pixels.clip(images))
        return arrays

    def _times(self, index: int) -> list[tuple[float, ...]]:
        """Of each video the seconds of its frames, where the family writes them into the text; else nothing."""
        things, grid = self._all.pictures[self._of(index)].tolist(), self._known.grid
        if grid is None or not grid.told:
            return [()] * len(things)
        return [self._all.thing(one).times(grid.frames) for one in things]

    def asked(self, index: int) -> list[int]:
        """The tokens of a conversation before its first answer, without those of pictures."""
        piece = slice(int(self._start[index]), int(self._end[index]))
        tokens = self._tokens[piece][: int(np.flatnonzero(self._mask[piece] & TRAINED)[0])]
        return [int(one) for one in tokens[~np.isin(tokens, self._standing)]]

    def images(self, index: int) -> list[list[Image]]:
        """The pictures of a conversation, as they are stored; of a video its frames."""
        channels, shown = self._pixels.channels, self._all.pictures[self._of(index)].tolist()
        return [
            [self._stored.picture(place) for place in one.frames]
            if one.clip < 0
            else self._clips.frames(one.clip, one.frames, channels)
            for one in map(self._all.thing, shown)
        ]

    def _fill(self, index: int, ids: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        """Tokens and labels of a conversation, in the place of each picture's token those that stand for it."""
        piece = slice(int(self._start[index]), int(self._end[index]))
        tokens = self._tokens[piece].astype(np.int64)
        at = np.flatnonzero(np.isin(tokens, self._standing))
        places, times = self._places[self._of(index)].tolist(), self._times(index)
        many = [self._written.ids(*one) for one in zip(tokens[at].tolist(), places, times, strict=True)]
        often = np.ones(len(tokens), np.int64)
        often[at] = [len(one) for one in many]
        length = int(often.sum())
        ids[:length] = np.repeat(tokens, often)
        for first, one in zip((often.cumsum() - often)[at], many, strict=True):
            ids[first : first + len(one)] = one
        trained = np.repeat(self._mask[piece] & TRAINED != 0, often)
        labels[:length][trained] = ids[:length][trained]


def _together(rows: Sequence[Any], shape: tuple[int, ...], dtype: type[Any] = np.float32) -> NDArray[Any]:
    """What each row has, filled up with zeros; ``shape`` is that of one thing."""
    whole = np.zeros((len(rows), max(map(len, rows)), *shape), dtype)
    for row, values in enumerate(rows):
        if len(values):
            whole[row, : len(values)] = values
    return whole
