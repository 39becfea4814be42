"""Prepares text whose samples are rows, each a document of a token store."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import Progress, no_progress, writing_to_cache
from mgpu_pipe.data.samples import Prepared, SampleSet, Split, evaluated_samples
from mgpu_pipe.data.source import open_source, validation_source_config
from mgpu_pipe.data.text.encode import EncodedBatch, library_threads, token_dtype
from mgpu_pipe.data.text.heldout_split import document_hash, held_out, held_out_groups
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


FOLDERS = ("folder", "held_out_folder", "tokenizer_folder")


@dataclass(frozen=True, kw_only=True)
class PreparedRows(Prepared):
    """Everything a worker needs to load rows of text; a subclass reads them."""

    folder: Path
    """Token store of the training documents."""
    held_out_folder: Path
    """Token store of the held-out documents; the same where a share is held out."""
    fraction: float
    """Held-out share; 1 means all of the held-out folder, which is then also the training folder."""
    tokenizer_folder: Path
    padding_token_id: int
    seq_len: int
    """Tokens of a padded row."""
    train_samples: int
    held_out_samples: int
    """Held-out samples; an evaluation takes ``validation_samples`` of them."""
    validation_samples: int
    digest: str
    validation_digest: str
    unigram_perplexity: float | None = None
    too_long_samples: int = 0
    bad_samples: int = 0
    on_too_long: str = "drop"

    @abstractmethod
    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> SampleSet:
        """Opens the samples of a nonempty split; ``reopen`` opens them in another process."""

    def open(self, config: RunConfig, split: Split) -> SampleSet:
        if split == "validation" and not self.held_out_samples:
            raise ValueError("this data holds nothing out")
        return self.samples(config, split, partial(self.open, config, split))

    def folder_of(self, split: Split) -> Path:
        return self.folder if split == "train" else self.held_out_folder

    def documents(self, split: Split) -> NDArray[np.int64]:
        """Indices of a split's used documents in its folder."""
        documents = documents_of(self.folder, self.held_out_folder, self.fraction, split)
        if self.on_too_long != "drop":
            return documents
        return documents[~self.long_documents(self.folder_of(split))[documents]]

    @abstractmethod
    def long_documents(self, folder: Path) -> NDArray[np.bool_]:
        """Which documents of a folder do not fit, (documents,)."""

    def evaluated_samples(self) -> NDArray[np.int64]:
        return evaluated_samples(self.held_out_samples, self.validation_samples)

    @property
    def folders(self) -> list[Path]:
        """Token stores, each once."""
        return list(dict.fromkeys((self.folder, self.held_out_folder)))

    def count_long(self) -> int:
        """Number of documents of both splits that do not fit."""
        return sum(int(self.long_documents(folder).sum()) for folder in self.folders)

    def is_here(self) -> bool:
        return self.folder.exists()

    def as_dict(self) -> dict[str, Any]:
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {"kind": self.kind, **plain}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        fields = {name: entry for name, entry in value.items() if name != "kind"}
        return cls(**{**fields, **{name: Path(fields[name]) for name in FOLDERS}})


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
    fraction = float(held_folder == folder) if held_config else data.validation_fraction
    return RowFolders(folder, held_folder, fraction, tokenizer.folder, tokenizer.eos_token_id)


def documents_of(
    folder: Path, held_out_folder: Path, fraction: float, split: Split, leaders: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Chooses the documents of a split: all of its folder, or by their hashes.

    Args:
        leaders: see :func:`held_out_groups`; None without groups.
    """
    if held_out_folder != folder or fraction == 1:
        return np.arange(TokenStore.open(folder if split == "train" else held_out_folder).num_documents)
    hashes = TokenStore.open(folder).hashes
    chosen = held_out(hashes, fraction) if leaders is None else held_out_groups(hashes, fraction, leaders)
    return np.flatnonzero(chosen if split == "validation" else ~chosen)
