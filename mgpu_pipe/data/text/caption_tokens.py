"""Captions as rows of tokens, and the captions that are too long.

The cache keeps the captions of a folder of pictures or recordings as ``captions.npy``, (captions, seq_len).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.bad_samples import LengthLimit, describe_too_long, refuse_too_long
from mgpu_pipe.data.cache import Progress, build_once, digest_of
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.data.prepared_splits import PreparedSplits
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
class PreparedWithCaptions(PreparedSplits):
    """Base of prepared pictures or recordings with captions."""

    table: Path
    """Folder with the tokens of the training samples' captions."""
    held_out_table: Path
    end_of_text: int
    on_too_long: str = "truncate"

    @abstractmethod
    def long_captions(self, split: Split) -> NDArray[np.bool_]:
        """Which samples of a split have a caption that does not fit, (samples,)."""

    def count_long(self) -> int:
        """Number of samples of both splits with a caption that does not fit."""
        return sum(int(self.long_captions(split).sum()) for split in ("train", "validation"))

    def table_of(self, split: Split) -> Path:
        return self.table if split == "train" else self.held_out_table

    def is_here(self) -> bool:
        return super().is_here() and all(lengths_folder(table).exists() for table in (self.table, self.held_out_table))

    def too_long(self, data: DataConfig) -> str:
        return describe_too_long(self.too_long_samples, "captions", self.on_too_long, f"data.seq_len={data.seq_len}")

    def complete_model(self, model: ModelConfig, objective: ObjectiveConfig) -> ModelConfig:
        """Adds the end-of-text id to the text tower, where it is new or of a family that needs to be given it."""
        if model.path is not None and not family_of(str(model_field(model, "model_type"))).caption_mask:
            return model
        text = {**model.config.get("text_config", {}), "eos_token_id": self.end_of_text}
        return replace(model, config={**model.config, "text_config": text})


def tokenize_captions(
    model: ModelConfig,
    data: DataConfig,
    objective: ObjectiveConfig,
    texts: Mapping[Path, Sequence[str]],
    cache: Path,
    progress: Progress,
) -> tuple[dict[str, Any], dict[Path, Path]]:
    """Fields of :class:`PreparedWithCaptions`, and the folder with the tokens of each folder's captions.

    Args:
        texts: captions of the training folder, then of the held-out folder if it is another.

    Raises:
        ConfigError: the tokenizer cannot work.
        DataError: a caption that does not fit, with ``data.on_too_long=refuse``.
    """
    folder, first = next(iter(texts.items()))

    def documents() -> Iterator[Document]:
        return (Document(text, str(folder), 1) for text in first)

    source = Source("captions", digest_of("captions", first), len(first), documents)
    tokenizer = resolve_tokenizer(model, data, objective, [(data, source)], cache, progress)
    tables = {named: _table(model, data, each, tokenizer, cache) for named, each in texts.items()}
    if data.on_too_long == "refuse":
        lengths = [load_array(lengths_folder(table) / LENGTHS) for table in dict.fromkeys(tables.values())]
        refuse_too_long(LengthLimit("data.seq_len", data.seq_len, "captions"), np.concatenate(lengths))
    fields = {
        "tokenizer_folder": tokenizer.folder,
        "table": tables[folder],
        "held_out_table": [*tables.values()][-1],
        "end_of_text": tokenizer.eos_token_id,
        "on_too_long": "truncate" if data.on_too_long == "auto" else data.on_too_long,
    }
    return fields, tables


def are_too_long(table: Path) -> NDArray[np.bool_]:
    """Which captions of a table do not fit into its rows, (captions,)."""
    long: NDArray[np.bool_] = load_array(lengths_folder(table) / LENGTHS) > load_array(table / TABLE).shape[1]
    return long


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
    build_once(lengths_folder(folder), measure)
    return folder


def lengths_folder(table: Path) -> Path:
    """Folder next to a table with ``lengths.npy``, (captions,): the tokens that each caption needs."""
    return table.with_name(f"{table.name}.lengths")


def _padding(model: ModelConfig, tokenizer: TokenizerInfo) -> int:
    """Padding token of captions: the end token for CLIP, which ignores it; SigLIP's own, which it reads."""
    text = model_field(model, "text_config")
    padding = text.get("pad_token_id") if isinstance(text, Mapping) else None
    siglip = model.type == "siglip" or model_field(model, "model_type") == "siglip"
    return padding if siglip and isinstance(padding, int) else tokenizer.eos_token_id
