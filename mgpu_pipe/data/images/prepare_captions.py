"""Pictures with captions: one caption a line of a list, or templates for the pictures of a class.

The scan is that of pictures with a class (:mod:`mgpu_pipe.data.images.scan_images`), with a caption instead of a class.
The cache keeps the different captions as tokens, ``captions.npy`` of shape (captions, seq_len). A class has one row for
each template, consecutively.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.arrays import ArraySamples
from mgpu_pipe.data.bad_samples import LengthLimit, describe_too_long, refuse_too_long
from mgpu_pipe.data.cache import Progress, build_once, digest_of, no_progress, run_cache
from mgpu_pipe.data.images.image_keys import CaptionConfig, layout_of
from mgpu_pipe.data.images.prepare_images import PreparedImages, add_figures, scan_images
from mgpu_pipe.data.images.scan_images import LabelledImages
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.data.prepared_splits import stored_names
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.text.documents import Document, Source
from mgpu_pipe.data.text.file_source import Row
from mgpu_pipe.data.text.pair_template import RowEncoder
from mgpu_pipe.data.text.token_store import load_array, save_array
from mgpu_pipe.data.text.tokenizer import TokenizerInfo, resolve_tokenizer

TABLE, LENGTHS = "captions.npy", "lengths.npy"
_FORMAT = 1
_AT_ONCE = 1024
"""Captions encoded at once."""


@dataclass(frozen=True, kw_only=True)
class PreparedCaptions(PreparedImages):
    """Everything a worker needs to load pictures with captions; :func:`prepare_captions` makes it."""

    kind: ClassVar[str] = "captioned_images"

    table: Path
    """Folder with the tokens of the training pictures' captions."""
    held_out_table: Path
    end_of_text: int
    on_too_long: str = "truncate"

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
        table = self.table_of(split)
        long = load_array(_lengths_folder(table) / LENGTHS) > load_array(table / TABLE).shape[1]
        names = stored_names(self.folder_of(split))
        numbers = load_array(self.folder_of(split) / "labels.npy")[super().pictures(split)]
        rows: NDArray[np.bool_] = long.reshape(len(names), -1).any(1)[numbers]
        return rows

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Caption or class of each sample of a split: its index among the names of its folder."""
        numbers: NDArray[np.int64] = load_array(self.folder_of(split) / "labels.npy")[self.pictures(split)]
        return numbers

    def table_of(self, split: Split) -> Path:
        return self.table if split == "train" else self.held_out_table

    def held_out_prompts(self, data: DataConfig) -> tuple[list[str], NDArray[np.int64]] | None:
        """Names of the held-out pictures' classes, and the tokens of their captions by all templates, (classes,
        templates, seq_len); None where the pictures have captions of their own."""
        assert isinstance(data, CaptionConfig)
        if layout_of(data) in ("list", "tar"):
            return None
        names = stored_names(self.held_out_folder)
        tokens = load_array(self.held_out_table / TABLE).astype(np.int64)
        return names, tokens.reshape(len(names), len(data.captions), -1)

    def is_here(self) -> bool:
        tables = (self.table, self.held_out_table)
        return super().is_here() and all(_lengths_folder(table).exists() for table in tables)

    def too_long(self, data: DataConfig) -> str:
        return describe_too_long(self.too_long_samples, "captions", self.on_too_long, f"data.seq_len={data.seq_len}")

    def amounts(self) -> list[tuple[int, str]]:
        samples = sum(len(load_array(folder / "labels.npy")) for folder in self.folders)
        captions = [(samples, "captions")] if samples > self.num_pictures else []
        pictures, _, *left_out = super().amounts()
        return [pictures, *captions, *left_out]

    def model_fields(self) -> dict[str, Any]:
        return {}

    def complete_model(self, model: ModelConfig, objective: ObjectiveConfig) -> ModelConfig:
        """Adds the end-of-text token: CLIP pools a caption at that token, so the model must know it."""
        return with_end_of_text(model, self.end_of_text)


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
        first = texts[scan.folder]

        def documents() -> Iterator[Document]:
            return (Document(text, str(scan.folder), 1) for text in first)

        source = Source("captions", digest_of("captions", first), len(first), documents)
        tokenizer = resolve_tokenizer(model, data, objective, [(data, source)], cache, report)
        tables = {folder: _table(model, data, each, tokenizer, cache) for folder, each in texts.items()}
    known = PreparedCaptions(
        **scan.fields(),
        classes=[],
        tokenizer_folder=tokenizer.folder,
        table=tables[scan.folder],
        held_out_table=tables[scan.held_out_folder],
        end_of_text=tokenizer.eos_token_id,
        on_too_long="truncate" if data.on_too_long == "auto" else data.on_too_long,
    )
    if data.on_too_long == "refuse":
        lengths = [load_array(_lengths_folder(table) / LENGTHS) for table in dict.fromkeys(tables.values())]
        refuse_too_long(LengthLimit("data.seq_len", data.seq_len, "captions"), np.concatenate(lengths))
    long = sum(int(known.long_captions(split).sum()) for split in ("train", "validation"))
    dropped = ["drop"] if long and known.on_too_long == "drop" else []
    seen = (scan.seen, *(table.name for table in tables.values()), *dropped)
    return add_figures(replace(known, too_long_samples=long), data, seen, scan)


def _captions(folder: Path, ways: Sequence[str]) -> list[str]:
    return [way.replace("{}", name) for name in stored_names(folder) for way in ways]


def _table(model: ModelConfig, data: DataConfig, texts: Sequence[str], tokenizer: TokenizerInfo, cache: Path) -> Path:
    """Builds the folder of padded caption tokens; a longer caption is cut before its end token."""
    length = data.seq_len
    padding = _padding(model, tokenizer)
    folder = cache / "tokens" / digest_of("captions", _FORMAT, texts, tokenizer.digest, length, padding)

    def build(out: Path) -> dict[str, Any]:
        encoder, parts = RowEncoder(tokenizer, length), []
        for start in range(0, len(texts), _AT_ONCE):
            part = texts[start : start + _AT_ONCE]
            encoded, _ = encoder.encode([Row((text,), "", "", 0) for text in part])
            inside = np.arange(length) < encoded.lengths[:, None]
            rows = np.full((len(part), length), padding, np.int32)
            rows[inside] = encoded.tokens
            parts.append(rows)
        save_array(out / TABLE, np.concatenate(parts))
        return {"captions": len(texts)}

    def measure(out: Path) -> dict[str, Any]:
        encoder = RowEncoder(tokenizer, length)
        parts = (texts[start : start + _AT_ONCE] for start in range(0, len(texts), _AT_ONCE))
        lengths = [encoder.lengths([Row((text,), "", "", 0) for text in part]) for part in parts]
        save_array(out / LENGTHS, np.array([number for part in lengths for number in part], np.int64))
        return {"captions": len(texts)}

    build_once(folder, build)
    build_once(_lengths_folder(folder), measure)
    return folder


def _lengths_folder(table: Path) -> Path:
    """Folder next to a table with ``lengths.npy``, (captions,): the tokens that each caption needs."""
    return table.with_name(f"{table.name}.lengths")


def _padding(model: ModelConfig, tokenizer: TokenizerInfo) -> int:
    """Padding token of captions: the end token for CLIP, which ignores it; SigLIP's own, which it reads."""
    text = model_field(model, "text_config")
    padding = text.get("pad_token_id") if isinstance(text, Mapping) else None
    siglip = model.type == "siglip" or model_field(model, "model_type") == "siglip"
    return padding if siglip and isinstance(padding, int) else tokenizer.eos_token_id


def with_end_of_text(model: ModelConfig, token: int) -> ModelConfig:
    """``model`` with the end-of-text id in its text tower, where it is new or of a family that needs to be given it."""
    if model.path is not None and not family_of(str(model_field(model, "model_type"))).caption_mask:
        return model
    text = {**model.config.get("text_config", {}), "eos_token_id": token}
    return replace(model, config={**model.config, "text_config": text})
