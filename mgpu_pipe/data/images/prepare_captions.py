"""Pictures with captions: one caption a line of a list, or templates for the pictures of a class.

The scan is that of pictures with a class (:mod:`mgpu_pipe.data.images.scan_images`), with a caption instead of a class.
The cache keeps the different captions as tokens, ``captions.npy`` of shape (captions, seq_len). A class has one row for
each template, consecutively.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.arrays import ArraySamples
from mgpu_pipe.data.cache import Progress, no_progress, run_cache
from mgpu_pipe.data.images.image_keys import CaptionConfig, layout_of
from mgpu_pipe.data.images.prepare_images import PreparedImages, add_figures, scan_images
from mgpu_pipe.data.images.scan_images import LabelledImages
from mgpu_pipe.data.prepared_splits import stored_names
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.text.caption_tokens import TABLE, PreparedWithCaptions, are_too_long, tokenize_captions
from mgpu_pipe.data.text.token_store import load_array


@dataclass(frozen=True, kw_only=True)
class PreparedCaptions(PreparedWithCaptions, PreparedImages):
    """Everything a worker needs to load pictures with captions; :func:`prepare_captions` makes it."""

    kind: ClassVar[str] = "captioned_images"

    def samples(
        self, seed: int, model: ModelConfig, data: DataConfig, split: Split, reopen: Callable[[], Any]
    ) -> ArraySamples:
        return ArraySamples(seed, data.source, CaptionedImages(model, data, split, self), reopen)

    def pictures(self, split: Split) -> NDArray[np.int64]:
        """Indices of a split's pictures in its folder; those with too long captions may be left out."""
        every = super().pictures(split)
        return every[~self.long_captions(split)] if self.on_too_long == "drop" else every

    def long_captions(self, split: Split) -> NDArray[np.bool_]:
        """Which samples of a split have a caption, or a caption of their class, that does not fit."""
        long = are_too_long(self.table_of(split))
        names = stored_names(self.folder_of(split))
        numbers = load_array(self.folder_of(split) / "labels.npy")[super().pictures(split)]
        rows: NDArray[np.bool_] = np.asarray(long.reshape(len(names), -1).any(1))[numbers]
        return rows

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Caption or class of each sample of a split: its index among the names of its folder."""
        numbers: NDArray[np.int64] = load_array(self.folder_of(split) / "labels.npy")[self.pictures(split)]
        return numbers

    def held_out_prompts(self, data: DataConfig) -> tuple[list[str], NDArray[np.int64]] | None:
        """Names of the held-out pictures' classes, and the tokens of their captions by all templates, (classes,
        templates, seq_len); None where the pictures have captions of their own."""
        assert isinstance(data, CaptionConfig)
        if layout_of(data) in ("list", "tar"):
            return None
        names = stored_names(self.held_out_folder)
        tokens = load_array(self.held_out_table / TABLE).astype(np.int64)
        return names, tokens.reshape(len(names), len(data.captions), -1)

    def amounts(self) -> list[tuple[int, str]]:
        samples = sum(len(load_array(folder / "labels.npy")) for folder in self.folders)
        captions = [(samples, "captions")] if samples > self.num_pictures else []
        pictures, _, *left_out = super().amounts()
        return [pictures, *captions, *left_out]

    def model_fields(self) -> dict[str, Any]:
        return {}


class CaptionedImages(LabelledImages):
    """One split of pictures with captions. A sample has ``pixel_values``, see :class:`LabelledImages`, ``input_ids`` of
    shape (seq_len,), and int64 ``labels`` and ``picture_ids``: equal for equal captions or classes, and for equal
    pictures."""

    def __init__(self, model: ModelConfig, data: DataConfig, split: Split, prepared: PreparedCaptions) -> None:
        super().__init__(model, data, split, prepared)
        assert isinstance(data, CaptionConfig)
        self._tokens = load_array(prepared.table_of(split) / TABLE)
        self._ways = len(ways_to_say(data))
        hashes = load_array(prepared.folder_of(split) / "hashes.npy")[prepared.pictures(split)]
        self._picture_ids = np.unique(hashes, return_inverse=True)[1].reshape(-1)

    def sample(self, index: int, random: np.random.Generator) -> Mapping[str, NDArray[Any]]:
        arrays = super().sample(index, random)
        row = int(arrays["labels"]) * self._ways + int(random.integers(self._ways))
        ids = {"input_ids": self._tokens[row].astype(np.int64), "picture_ids": self._picture_ids[index]}
        return {**arrays, **ids}

    def positions(self, index: int) -> int:
        return self._tokens.shape[1]


def ways_to_say(data: CaptionConfig) -> list[str]:
    """Templates of captions; a list's or a tar file's captions are used unchanged."""
    return ["{}"] if layout_of(data) in ("list", "tar") else data.captions


def prepare_captions(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, progress: Progress | None = None
) -> PreparedCaptions:
    """Prepares the pictures and captions of ``data``, or finds them in the cache.

    Raises:
        ConfigError: see :func:`mgpu_pipe.data.images.prepare_images.prepare_images`; or the tokenizer cannot work.
        DataError: see :func:`mgpu_pipe.data.images.prepare_images.prepare_images`.
    """
    report = progress or no_progress
    assert isinstance(data, CaptionConfig)
    scan = scan_images(model, data, progress)
    ways = ways_to_say(data)
    texts = {folder: _captions(folder, ways) for folder in dict.fromkeys((scan.folder, scan.held_out_folder))}
    with run_cache(data) as cache:
        captions, tables = tokenize_captions(model, data, objective, texts, cache, report)
    known = PreparedCaptions(**scan.fields(), classes=[], **captions)
    long = known.count_long()
    dropped = ["drop"] if long and known.on_too_long == "drop" else []
    seen = (scan.seen, *(table.name for table in tables.values()), *dropped)
    return add_figures(replace(known, too_long_samples=long), data, seen, scan)


def _captions(folder: Path, ways: Sequence[str]) -> list[str]:
    return [way.replace("{}", name) for name in stored_names(folder) for way in ways]
