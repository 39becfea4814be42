"""Conversations with pictures as tensors: one row a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.audio.chat_sounds import StoredSounds
from mgpu_pipe.data.images.grids import AXES, GridPixels, chat_pixels, row_positions, seen_apart
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.parts import MosaicPixels, PatchPixels
from mgpu_pipe.data.images.scan_images import StoredPictures
from mgpu_pipe.data.images.videos import StoredClips
from mgpu_pipe.data.images.visual_inputs import SOUND
from mgpu_pipe.data.samples import SampleSet, Split, random_of
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.document_encoder import TRAINED
from mgpu_pipe.data.text.packing import best_fit, ranges
from mgpu_pipe.data.text.prepared_rows import RowSamples

if TYPE_CHECKING:
    from PIL.Image import Image

    from mgpu_pipe.data.images.prepare_chats import PreparedPictureChats


def rows_of_lengths(lengths: NDArray[np.int64], seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Packs conversations into rows by best fit: each row has those between two offsets."""
    bins = best_fit(lengths, seq_len)
    return np.concatenate([[0], np.cumsum(np.bincount(bins))]).astype(np.int64), np.argsort(bins, kind="stable")


class PackedChats:
    """Packed rows of one split, a :class:`mgpu_pipe.data.samples.SampleSet`.

    Args:
        alone: the conversations.
        together: pack them; else each has its own row.
        reopen: opens the same samples in another process; picklable.
    """

    def __init__(
        self, alone: PictureChatSamples, seq_len: int, together: bool, reopen: Callable[[], SampleSet]
    ) -> None:
        self.alone, self._seq_len, self._reopen = alone, seq_len, reopen
        one_each = np.arange(len(alone) + 1), np.arange(len(alone))
        self._offsets, self._members = rows_of_lengths(alone.length, seq_len) if together else one_each

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as ``reopen``: another process maps the files itself."""
        return self._reopen, ()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        members = self._members_of(indices)[0]
        return self.alone.valid_units(members, members)

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * self._seq_len

    def padding(self, indices: NDArray[np.int64]) -> int:
        return self.positions(indices) - int(self.alone.length[self._members_of(indices)[0]].sum())

    def costs(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sums of the costs of each row's conversations."""
        members, counts = self._members_of(indices)
        totals = np.zeros(len(indices), np.int64)
        np.add.at(totals, np.repeat(np.arange(len(indices)), counts), self.alone.costs(members))
        return totals

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Batch of packed rows: the fields of single conversations, and ``position_ids`` that restart with each
        conversation. Positions along a model's own axes follow them."""
        members, counts = self._members_of(indices)
        # A row holds fewer than seq_len conversations, so each gets its own number.
        apart = np.repeat(numbers, counts) * self._seq_len + ranges(np.zeros_like(counts), counts)
        alone = self.alone.batch(members, np.where(np.repeat(numbers, counts) < 0, np.repeat(numbers, counts), apart))
        row_of, lengths = np.repeat(np.arange(len(indices)), counts), self.alone.length[members]
        begins = np.cumsum(lengths) - lengths
        begins -= np.repeat(begins[np.cumsum(counts) - counts], counts)
        rows = {
            "input_ids": alone["input_ids"].new_zeros(len(indices), self._seq_len),
            "labels": alone["labels"].new_full((len(indices), self._seq_len), IGNORE_INDEX),
        }
        # The padding after them is a separate document.
        positions = torch.arange(self._seq_len).repeat(len(indices), 1)
        axes = torch.arange(self._seq_len).repeat(len(indices), AXES, 1) if "position_ids" in alone else None
        for member, (row, first, length) in enumerate(
            zip(row_of.tolist(), begins.tolist(), lengths.tolist(), strict=True)
        ):
            here, behind = slice(first, first + length), torch.arange(self._seq_len - first - length)
            for name in ("input_ids", "labels"):
                rows[name][row, here] = alone[name][member, :length]
            positions[row, here], positions[row, first + length :] = torch.arange(length), behind
            if axes is not None:
                axes[row, :, here], axes[row, :, first + length :] = alone["position_ids"][member, :, :length], behind
        rows["position_ids"] = positions if axes is None else torch.cat([positions[:, None], axes], 1)
        for name, amounts in _amounts(alone).items():
            rows[name] = _join(alone[name], amounts, row_of, len(indices))
        if "pictures" in alone:
            rows["pictures"] = torch.zeros(len(indices), dtype=torch.int64)
            rows["pictures"].index_add_(0, torch.from_numpy(row_of), alone["pictures"])
        return rows

    def _members_of(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Conversations of these rows, row after row, and the number in each row."""
        first, counts = self._offsets[indices], self._offsets[indices + 1] - self._offsets[indices]
        return self._members[ranges(first, counts)], counts


def _amounts(alone: Mapping[str, torch.Tensor]) -> dict[str, NDArray[np.int64]]:
    """Elements that each conversation has in every field of pictures and recordings, by the field's name."""
    if "recordings" in alone:
        return dict.fromkeys(("recordings", "input_features"), (alone["recordings"] > 0).sum(1).numpy())
    if "grids" in alone:
        patches = alone["grids"].prod(-1)
        return {"grids": (patches > 0).sum(1).numpy(), "pixel_values": patches.sum(1).numpy()}
    pictures = alone["pictures"].numpy()
    amounts = {name: pictures for name in ("pixel_values", "shown") if name in alone}
    return {**amounts, **({"patches": (alone["patches"].prod(-1) > 0).sum(1).numpy()} if "patches" in alone else {})}


def _join(values: torch.Tensor, amounts: NDArray[np.int64], row_of: NDArray[np.int64], rows: int) -> torch.Tensor:
    """Concatenates the values of each row's conversations, padded with zeros."""
    filled = np.zeros(rows, np.int64)
    joined = values.new_zeros(rows, int(np.bincount(row_of, amounts, rows).max()), *values.shape[2:])
    for member, (row, many) in enumerate(zip(row_of.tolist(), amounts.tolist(), strict=True)):
        joined[row, filled[row] : filled[row] + many] = values[member, :many]
        filled[row] += many
    return joined


class PictureChatSamples(RowSamples):
    """One split of conversations with pictures, unpacked."""

    def __init__(
        self,
        seed: int,
        model: ModelConfig,
        data: DataConfig,
        prepared: PreparedPictureChats,
        split: Split,
        reopen: Callable[[], SampleSet],
    ) -> None:
        super().__init__(prepared, split, reopen)
        assert isinstance(data, PictureChatConfig) and self.store.loss_mask is not None
        self._seed, self._data, self._known = seed, data, prepared
        self._pixels, self._trains = chat_pixels(data, model), split == "train"
        self._stored = StoredPictures(prepared.pictures_of(split), self._pixels.channels)
        self._clips, sounds = StoredClips(prepared.clips_of(split)), prepared.sounds_of(split)
        self._window, audio = prepared.window, prepared.audio_token_id
        self._seen_tokens = [token for token in prepared.standing if token != audio]
        self._sounds = StoredSounds(sounds, prepared.window) if sounds and prepared.window else None
        self._all = prepared.visual_index(split)
        self._first, self._last = self._all.offsets[self.documents], self._all.offsets[self.documents + 1]
        self._places, self._standing = prepared.places_in(split), prepared.standing
        self._written = prepared.placeholder_tokens()
        before = np.concatenate([[0], np.cumsum(self.store.loss_mask & TRAINED != 0)])
        end = self.start + self.length
        self._units = before[end] - before[np.minimum(self.start + 1, end)]
        self._stored_length, self.length = self.length, prepared.lengths(split)[self.documents]

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return int(self._units[indices].sum())

    def costs(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of each conversation's pictures, which the vision tower computes; rows are equally long."""
        places = np.concatenate([[0], np.cumsum(self._places.prod(1))])
        tokens: NDArray[np.int64] = places[self._last[indices]] - places[self._first[indices]]
        return tokens

    def arrays(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Arrays of the conversations ``indices``, in the form of :mod:`mgpu_pipe.objectives.vision_language`."""
        ids = np.full((len(indices), self.seq_len + 1), self.padding_token_id, np.int64)
        labels = np.full_like(ids, IGNORE_INDEX)
        for row, index in enumerate(indices.tolist()):
            self._fill(index, ids[row], labels[row])
        arrays: dict[str, NDArray[Any]] = {"input_ids": ids[:, :-1], "labels": labels[:, 1:]}
        if self._sounds is not None and self._window is not None:
            sounds = [self._sounds.spectrograms(self._sound_places(index)) for index in indices.tolist()]
            arrays["recordings"] = _together([frames for frames, _ in sounds], (), np.int64)
            spectrograms = [several for _, several in sounds]
            if self._window.fixed:
                arrays["input_features"] = _together(spectrograms, self._window.shape)
                return arrays
            frames_of = [[values.T for values in several] for several in spectrograms]
            arrays["input_features"] = _together(_flat(frames_of, self._window.bins), (self._window.bins,))
        pictures_of = [self._seen_pictures(*place) for place in zip(indices.tolist(), numbers.tolist(), strict=True)]
        slices = [self._seen_of(index) for index in indices.tolist()]
        if isinstance(self._pixels, PatchPixels):
            merge, values = self._pixels.parts.merge, self._pixels.parts.values
            grids = [self._places[part] * (1, merge, merge) for part in slices]
            arrays["grids"] = _together(grids, (3,), np.int64)
            arrays["pixel_values"] = _together(_flat(pictures_of, values), (values,))
        elif isinstance(self._pixels, GridPixels):
            grid = self._pixels.grid
            seconds = [self._all.seconds[self._all.pictures[part]] for part in slices]
            apart = [seen_apart(grid, self._places[part], step) for part, step in zip(slices, seconds, strict=True)]
            placed = np.isin(arrays["input_ids"], self._seen_tokens)
            positions = [row_positions(tokens, *seen) for tokens, seen in zip(placed, apart, strict=True)]
            grids = [places * (1, grid.merge, grid.merge) for places, _ in apart]
            arrays |= {"position_ids": np.stack(positions), "grids": _together(grids, (3,), np.int64)}
            arrays["pixel_values"] = _together(_flat(pictures_of, grid.values), (grid.values,))
        else:
            side = (self._pixels.channels, self._pixels.size, self._pixels.size)
            parts = [
                np.concatenate(pictures) if pictures else np.zeros((0, *side), np.float32) for pictures in pictures_of
            ]
            arrays["pictures"] = np.array([len(pictures) for pictures in parts], np.int64)
            arrays["pixel_values"] = _together(parts, side)
            if isinstance(self._pixels, MosaicPixels):
                arrays["patches"] = _together([self._places[part][:, 1:] for part in slices], (2,), np.int64)
            if self._data.cache_features:
                arrays["shown"] = _together(
                    [self._all.pictures[self._pictures_of(index)] for index in indices.tolist()], (), np.int64
                )
        return arrays

    def _pictures_of(self, index: int) -> slice:
        """Slice of a conversation's pictures among all shown."""
        return slice(int(self._first[index]), int(self._last[index]))

    def _sound_places(self, index: int) -> list[int]:
        """Places of a conversation's recordings among the scanned ones."""
        visuals = map(self._all.visual, self._all.pictures[self._pictures_of(index)].tolist())
        return [visual.frames[0] for visual in visuals if visual.is_sound]

    def _seen_of(self, index: int) -> NDArray[np.int64]:
        """Numbers of a conversation's pictures among all shown, without its recordings."""
        numbers = np.arange(self._first[index], self._last[index])
        return numbers[self._all.clips[self._all.pictures[numbers]] != SOUND]

    def _seen_pictures(self, index: int, number: int) -> list[NDArray[np.float32]]:
        """Pictures of a conversation as the model sees them."""
        random, arrays = random_of(self._seed, number), list[NDArray[np.float32]]()
        for images in self.images(index):
            if self._trains:  # every frame of a video gets the same change
                before = random.bit_generator.state
                for position, image in enumerate(images):
                    random.bit_generator.state = before
                    images[position] = self._pixels.augment(image, self._data, random)
            else:
                images = [self._pixels.scale(image) for image in images]
            arrays.append(self._pixels.clip(images))
        return arrays

    def _times(self, index: int) -> list[tuple[float, ...]]:
        """Seconds of each video's frames, if the model family writes them into the text; else empty."""
        numbers, grid = self._all.pictures[self._pictures_of(index)].tolist(), self._known.grid
        if grid is None or not grid.has_timestamps:
            return [()] * len(numbers)
        return [self._all.visual(number).times(grid.frames) for number in numbers]

    def prompt_tokens(self, index: int) -> list[int]:
        """Tokens of a conversation before its first answer, without those of pictures."""
        tokens, trained = self._conversation(index)
        tokens = tokens[: int(np.flatnonzero(trained)[0])]
        return [int(token) for token in tokens[~np.isin(tokens, self._standing)]]

    def images(self, index: int) -> list[list[Image]]:
        """Stored pictures of a conversation; a video gives its frames."""
        channels, numbers = self._pixels.channels, self._all.pictures[self._pictures_of(index)].tolist()
        return [
            [self._stored.picture(place) for place in visual.frames]
            if visual.clip < 0
            else self._clips.frames(visual.clip, visual.frames, channels)
            for visual in map(self._all.visual, numbers)
            if not visual.is_sound
        ]

    def _fill(self, index: int, ids: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        """Writes tokens and labels of a conversation; replaces each picture's token by its placeholder tokens."""
        tokens, trained = self._conversation(index)
        positions = np.flatnonzero(np.isin(tokens, self._standing))
        places, times = self._places[self._pictures_of(index)].tolist(), self._times(index)
        many = [self._written.ids(*place) for place in zip(tokens[positions].tolist(), places, times, strict=True)]
        often = np.ones(len(tokens), np.int64)
        often[positions] = [len(ids_of_place) for ids_of_place in many]
        length = int(often.sum())
        ids[:length] = np.repeat(tokens, often)
        for first, ids_of_place in zip((often.cumsum() - often)[positions], many, strict=True):
            ids[first : first + len(ids_of_place)] = ids_of_place
        trained = np.repeat(trained, often)
        labels[:length][trained] = ids[:length][trained]

    def _conversation(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens of a conversation, each picture one of them, and which are trained."""
        positions = self.start[index] + np.arange(self._stored_length[index])
        return self.tokens_at(positions), self.is_trained(positions)


def _flat(pictures_of: Sequence[list[NDArray[np.float32]]], values: int) -> list[NDArray[np.float32]]:
    """Patches of each row's pictures, (patches, values)."""
    return [np.concatenate([np.zeros((0, values), np.float32), *pictures]) for pictures in pictures_of]


def _together(rows: Sequence[Any], shape: tuple[int, ...], dtype: type[Any] = np.float32) -> NDArray[Any]:
    """Stacks the rows' values, padded with zeros; ``shape`` is that of one value."""
    whole = np.zeros((len(rows), max(map(len, rows)), *shape), dtype)
    for row, values in enumerate(rows):
        if len(values):
            whole[row, : len(values)] = values
    return whole
