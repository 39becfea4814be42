"""Prepares text whose samples are rows, each a document of a token store."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import Progress, no_progress, writing_to_cache
from mgpu_pipe.data.data_source import open_source, validation_source_config
from mgpu_pipe.data.prepared_splits import PreparedSplits, held_out_share
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.text.document_encoder import EncodedBatch, library_threads, token_dtype
from mgpu_pipe.data.text.heldout_split import document_hash
from mgpu_pipe.data.text.label_rows import Row
from mgpu_pipe.data.text.prepare_text import tokenise
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.data.text.tokenizer import TokenizerInfo, resolve_tokenizer
from mgpu_pipe.errors import ConfigError


class RowEncoder:
    """Encodes texts and pairs as rows of at most ``seq_len`` tokens, each with an end token.

    A tokenizer that separates the texts of a pair ([CLS] a [SEP] b [SEP]) does so; otherwise the end-of-sequence token
    separates them.

    Raises:
        ConfigError: ``seq_len`` leaves no room for a text's token.
    """

    def __init__(self, tokenizer: TokenizerInfo, seq_len: int) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._eos, self._dtype, self._seq_len = tokenizer.eos_token_id, token_dtype(tokenizer.vocab_size), seq_len
        self._ends = 0 if self._tokenizer.encode("a").ids[-1:] == [self._eos] else 1
        self._pairs = self._tokenizer.num_special_tokens_to_add(True) > self._tokenizer.num_special_tokens_to_add(False)
        least = self._tokenizer.num_special_tokens_to_add(True) + 2 * self._ends + 2
        if seq_len < least:
            raise ConfigError("data.seq_len", seq_len, f"use at least {least}", "a row holds its texts and their ends")

    def encode(self, rows: Sequence[Row]) -> tuple[EncodedBatch, list[int]]:
        """Encodes rows; returns also where each second text begins: at the row's end without one."""
        encoded = [self._joined(row.texts) if len(row.texts) > 1 and not self._pairs else None for row in rows]
        self._tokenizer.enable_truncation(self._seq_len - self._ends)
        alone = (row.texts for row, encoded_row in zip(rows, encoded, strict=True) if encoded_row is None)
        inputs = [texts if len(texts) > 1 else texts[0] for texts in alone]
        with library_threads(True):
            results = iter(self._tokenizer.encode_batch(inputs))
        self._tokenizer.no_truncation()
        pairs = [self._own_end(next(results)) if encoded_row is None else encoded_row for encoded_row in encoded]
        return EncodedBatch(
            tokens=np.array([token for ids, _ in pairs for token in ids], self._dtype),
            lengths=np.array([len(ids) for ids, _ in pairs], np.int64),
            hashes=np.array([document_hash(row.joined) for row in rows], np.uint64),
            loss_mask=None,
            size=sum(row.size for row in rows),
        ), [second for _, second in pairs]

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Tokens that each row's whole texts need."""
        with library_threads(True):
            if self._pairs or all(len(row.texts) == 1 for row in rows):
                inputs = [row.texts if len(row.texts) > 1 else row.texts[0] for row in rows]
                return [len(encoding.ids) + self._ends for encoding in self._tokenizer.encode_batch(inputs)]
            texts = [text for row in rows for text in row.texts]
            tokens = iter([len(encoding.ids) + 1 for encoding in self._tokenizer.encode_batch(texts)])
        return [sum(next(tokens) for _ in row.texts) for row in rows]

    def _own_end(self, encoding: Any) -> tuple[list[int], int]:
        ids = [*encoding.ids, self._eos][: len(encoding.ids) + self._ends]
        kinds = encoding.type_ids
        return ids, kinds.index(1) if 1 in kinds else len(ids)

    def _joined(self, texts: tuple[str, ...]) -> tuple[list[int], int]:
        first, second = (self._tokenizer.encode(text).ids for text in texts)
        room = self._seq_len - 2
        head = first[: max(room - len(second), room - room // 2)]
        ids = [*head, self._eos, *second[: room - len(head)], self._eos]
        return ids, len(head) + 1


@dataclass(frozen=True, kw_only=True)
class PreparedRows(PreparedSplits):
    """Everything a worker needs to load rows of text, each a document of a token store; a subclass reads them."""

    tokenizer_folder: Path
    padding_token_id: int
    seq_len: int
    """Tokens of a padded row."""
    on_too_long: str = "drop"

    @abstractmethod
    def long_documents(self, folder: Path) -> NDArray[np.bool_]:
        """Which documents of a folder do not fit, (documents,)."""

    def documents(self, split: Split) -> NDArray[np.int64]:
        """Indices of a split's used documents in its folder."""
        folder = self.folder_of(split)
        chosen = self.in_split(split, TokenStore.open(folder).hashes)
        return np.flatnonzero(chosen & ~self.long_documents(folder) if self.on_too_long == "drop" else chosen)

    def count_long(self) -> int:
        """Number of documents of both splits that do not fit."""
        return sum(int(self.long_documents(folder).sum()) for folder in self.folders)


@dataclass(frozen=True)
class RowFolders:
    """Folders of a run's rows, as fields of :class:`PreparedRows`."""

    folder: Path
    held_out_folder: Path
    fraction: float
    tokenizer_folder: Path
    padding_token_id: int

    @property
    def names(self) -> list[Path]:
        """Token stores, each once."""
        return list(dict.fromkeys((self.folder, self.held_out_folder)))


def prepare_rows(config: RunConfig, progress: Progress | None = None) -> RowFolders:
    """Prepares the rows of ``config``, or finds them cached; see :func:`mgpu_pipe.data.text.prepare_text.prepare`.

    Raises:
        ConfigError, DataError: see there.
    """
    data, cache, report = config.data, cache_folder(config.data.cache_dir).absolute(), progress or no_progress
    with writing_to_cache(cache):
        private_folder(cache)
        held_config = validation_source_config(config) if data.validation_paths else None
        source = open_source(config, cache, report)
        held_source = open_source(held_config, cache, report, "data.validation_paths") if held_config else None
        tokenizer = resolve_tokenizer(config, [(config, source)], cache, report)
        folder = tokenise(config, source, tokenizer, cache, report)
        held_folder = tokenise(held_config, held_source, tokenizer, cache, report) if held_config else folder
    fraction = held_out_share(data, folder, held_folder)
    return RowFolders(folder, held_folder, fraction, tokenizer.folder, tokenizer.eos_token_id)
