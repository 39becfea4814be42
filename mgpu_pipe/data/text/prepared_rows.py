"""Text whose samples are rows, each a document of a token store. Imports neither torch nor transformers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
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
from mgpu_pipe.data.text.prepare import tokenise
from mgpu_pipe.data.text.sources import open_source, validation_source_config
from mgpu_pipe.data.text.split import held_out
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.data.text.tokenizer import resolve_tokenizer

FOLDERS = ("folder", "held_out_folder", "tokenizer_folder")


@dataclass(frozen=True, kw_only=True)
class PreparedRows(Prepared):
    """What a worker needs to load rows of text; a subclass says how it reads one."""

    folder: Path
    """The training documents' token store."""
    held_out_folder: Path
    """That of the held-out ones; the same where a share of the documents is held out."""
    fraction: float
    """That share; 1: all of the held-out folder, which is the training documents' own."""
    tokenizer_folder: Path
    padding_token_id: int
    seq_len: int
    """Tokens of a padded row."""
    train_samples: int
    held_out_samples: int
    """Of which an evaluation takes ``validation_samples``."""
    validation_samples: int
    digest: str
    validation_digest: str
    unigram_perplexity: float | None = None

    @abstractmethod
    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> SampleSet:
        """The samples of a split that holds some; ``reopen`` opens them in another process."""

    def open(self, config: RunConfig, split: Split) -> SampleSet:
        if split == "validation" and not self.held_out_samples:
            raise ValueError("this data holds nothing out")
        return self.samples(config, split, partial(self.open, config, split))

    def folder_of(self, split: Split) -> Path:
        return self.folder if split == "train" else self.held_out_folder

    def documents(self, split: Split) -> NDArray[np.int64]:
        """Those of a split, in its folder."""
        return documents_of(self.folder, self.held_out_folder, self.fraction, split)

    def evaluated_samples(self) -> NDArray[np.int64]:
        return evaluated_samples(self.held_out_samples, self.validation_samples)

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
    """Where the rows of a run lie; the fields are those of :class:`PreparedRows`."""

    folder: Path
    held_out_folder: Path
    fraction: float
    tokenizer_folder: Path
    padding_token_id: int

    @property
    def names(self) -> list[Path]:
        """The token stores, each once."""
        return list(dict.fromkeys((self.folder, self.held_out_folder)))


def prepare_rows(config: RunConfig, progress: Progress | None = None) -> RowFolders:
    """Make the rows of ``config`` ready, or find them ready; as :func:`mgpu_pipe.data.text.prepare.prepare`.

    Raises:
        ConfigError, DataError: as there.
    """
    data, cache, told = config.data, cache_folder(config.data.cache_dir).absolute(), progress or no_progress
    with writing_to_cache(cache):
        private_folder(cache)
        held_config = validation_source_config(config) if data.validation_paths else None
        source = open_source(config, cache, told)
        held_source = open_source(held_config, cache, told, "data.validation_paths") if held_config else None
        tokenizer = resolve_tokenizer(config, [(config, source)], cache, told)
        folder = tokenise(config, source, tokenizer, cache, told)
        held_folder = tokenise(held_config, held_source, tokenizer, cache, told) if held_config else folder
    fraction = float(held_folder == folder) if held_config else data.validation_fraction
    return RowFolders(folder, held_folder, fraction, tokenizer.folder, tokenizer.eos_token_id)


def documents_of(folder: Path, held_out_folder: Path, fraction: float, split: Split) -> NDArray[np.int64]:
    """The documents of a split: all of its folder, or of one folder by their hashes."""
    if held_out_folder != folder or fraction == 1:
        return np.arange(TokenStore.open(folder if split == "train" else held_out_folder).num_documents)
    chosen = held_out(TokenStore.open(folder).hashes, fraction)
    return np.flatnonzero(chosen if split == "validation" else ~chosen)
