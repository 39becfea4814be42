"""Pictures with captions: a caption a line of a list, or what is said of the pictures of a class. No torch.

They are looked through as pictures with a class are (:mod:`mgpu_pipe.data.image.prepare`); a caption stands in place of
a class. In the cache their different captions are a table of tokens, ``captions.npy`` of shape (captions, seq_len), of
which a class has as many consecutive rows as there are ways to say it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.paths import cache_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import Progress, build_once, digest_of, no_progress, read_manifest, writing_to_cache
from mgpu_pipe.data.image.dataset import LabelledImages
from mgpu_pipe.data.image.keys import CaptionConfig
from mgpu_pipe.data.image.prepare import PreparedImages, counted, looked_through
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.text.documents import Document, Source
from mgpu_pipe.data.text.labelled_row import Row
from mgpu_pipe.data.text.row_encoder import RowEncoder
from mgpu_pipe.data.text.token_store import load_array, save_array
from mgpu_pipe.data.text.tokenizer import TokenizerInfo, model_field, resolve_tokenizer
from mgpu_pipe.families.pictures import READ_WHOLE

if TYPE_CHECKING:
    from mgpu_pipe.data.array_samples import ArraySamples

TABLE = "captions.npy"
LIST, TAR = "captions", "captioned_tar"
_FORMAT = 1
_AT_ONCE = 1024
"""Captions that are encoded together."""


@dataclass(frozen=True, kw_only=True)
class PreparedCaptions(PreparedImages):
    """All that a worker needs to load pictures with captions; made by :func:`prepare_captions`."""

    kind: ClassVar[str] = "captioned_images"
    places: ClassVar[tuple[str, ...]] = (*PreparedImages.places, "tokenizer_folder", "table", "held_out_table")

    table: Path
    """The folder with the tokens of the training pictures' captions."""
    held_out_table: Path
    end_of_text: int

    def open(self, config: RunConfig, split: Split) -> ArraySamples:
        from mgpu_pipe.data.array_samples import ArraySamples

        if split == "validation" and not self.held_out_samples:
            raise ValueError("this data holds nothing out")
        return ArraySamples(config, CaptionedImages(config, split, self), partial(self.open, config, split))

    def labels(self, split: Split) -> NDArray[np.int64]:
        """The caption, or the class, of each sample of a split: its place among the names of its folder."""
        numbers: NDArray[np.int64] = load_array(self.folder_of(split) / "labels.npy")[self.pictures(split)]
        return numbers

    def table_of(self, split: Split) -> Path:
        return self.table if split == "train" else self.held_out_table

    def is_here(self) -> bool:
        return super().is_here() and self.table.exists() and self.held_out_table.exists()

    def amounts(self) -> list[tuple[int, str]]:
        return [one for one in super().amounts() if one[1] != "classes"]

    def model_fields(self) -> dict[str, Any]:
        return {}

    def complete(self, config: RunConfig) -> RunConfig:
        """CLIP takes what it knows of a caption where its text ends, so the model has to know the token."""
        return with_end_of_text(config, self.end_of_text)


class CaptionedImages(LabelledImages):
    """One split. A sample is ``pixel_values``, as of :class:`LabelledImages`, ``input_ids`` of shape (seq_len,), and
    ``labels``, int64: equal where captions, or classes, are."""

    def __init__(self, config: RunConfig, split: Split, prepared: PreparedCaptions) -> None:
        super().__init__(config, split, prepared)
        assert isinstance(config.data, CaptionConfig)
        self._tokens = load_array(prepared.table_of(split) / TABLE)
        self._ways = len(ways_to_say(config.data))

    def sample(self, index: int, random: np.random.Generator) -> Mapping[str, NDArray[Any]]:
        shown = super().sample(index, random)
        row = int(shown["labels"]) * self._ways + int(random.integers(self._ways))
        return {**shown, "input_ids": self._tokens[row].astype(np.int64)}

    def positions(self, index: int) -> int:
        return self._tokens.shape[1]


def ways_to_say(data: CaptionConfig) -> list[str]:
    """Templates of captions; those of a list or a tar file stand as they are."""
    return ["{}"] if data.source in (LIST, TAR) else data.captions


def prepare_captions(config: RunConfig, progress: Progress | None = None) -> PreparedCaptions:
    """Make the pictures and captions of ``config`` ready, or find them ready.

    Raises:
        ConfigError: as :func:`mgpu_pipe.data.image.prepare.prepare_images`; a tokenizer that cannot work.
        DataError: likewise.
    """
    data, told = config.data, progress or no_progress
    assert isinstance(data, CaptionConfig)
    found = looked_through(config, progress)
    cache, ways = cache_folder(data.cache_dir).absolute(), ways_to_say(data)
    texts = {folder: _captions(folder, ways) for folder in dict.fromkeys((found.folder, found.held))}
    with writing_to_cache(cache):
        first = texts[found.folder]

        def documents() -> Iterator[Document]:
            return (Document(text, str(found.folder), 1) for text in first)

        source = Source(LIST, digest_of(LIST, first), len(first), documents)
        tokenizer = resolve_tokenizer(config, [(config, source)], cache, told)
        tables = {folder: _table(config, each, tokenizer, cache) for folder, each in texts.items()}
    known = PreparedCaptions(
        **found.fields(config),
        classes=[],
        train_samples=0,
        held_out_samples=0,
        validation_samples=0,
        majority_accuracy=None,
        digest="",
        validation_digest="",
        tokenizer_folder=tokenizer.folder,
        table=tables[found.folder],
        held_out_table=tables[found.held],
        end_of_text=tokenizer.eos_token_id,
    )
    return counted(known, config, (found.seen, *(table.name for table in tables.values())), found)


def _captions(folder: Path, ways: Sequence[str]) -> list[str]:
    manifest = read_manifest(folder)
    assert manifest is not None
    return [way.replace("{}", name) for name in manifest["labels"] for way in ways]


def _table(config: RunConfig, texts: Sequence[str], tokenizer: TokenizerInfo, cache: Path) -> Path:
    """The folder with the tokens of the captions, padded; a longer one is cut, and keeps its end."""
    length = config.data.seq_len
    padding = _padding(config, tokenizer)
    folder = cache / "tokens" / digest_of("captions", _FORMAT, texts, tokenizer.digest, length, padding)

    def build(out: Path) -> dict[str, Any]:
        encoder, parts = RowEncoder(tokenizer, length), []
        for at in range(0, len(texts), _AT_ONCE):
            part = texts[at : at + _AT_ONCE]
            encoded, _ = encoder.encode([Row((text,), "", "", 0) for text in part])
            inside = np.arange(length) < encoded.lengths[:, None]
            rows = np.full((len(part), length), padding, np.int32)
            rows[inside] = encoded.tokens
            parts.append(rows)
        save_array(out / TABLE, np.concatenate(parts))
        return {"captions": len(texts)}

    build_once(folder, build)
    return folder


def _padding(config: RunConfig, tokenizer: TokenizerInfo) -> int:
    """What follows a caption: its end again, which CLIP passes over; SigLIP, which reads it, has a token for it."""
    text = model_field(config.model, "text_config")
    own = text.get("pad_token_id") if isinstance(text, Mapping) else None
    siglip = config.model.type == "siglip" or model_field(config.model, "model_type") == "siglip"
    return own if siglip and isinstance(own, int) else tokenizer.eos_token_id


def with_end_of_text(config: RunConfig, token: int) -> RunConfig:
    """``config`` with the end of a text in a new model's text tower, and in one that is told where its texts end."""
    if config.model.path is not None and model_field(config.model, "model_type") not in READ_WHOLE:
        return config
    text = {**config.model.config.get("text_config", {}), "eos_token_id": token}
    return replace(config, model=replace(config.model, config={**config.model.config, "text_config": text}))
