"""Rows of text, each a document of a token store, and their preparation from files.

A kind of row has a subclass of :class:`PreparedRows`, which stores facts next to a token store and knows which rows
fit, and a subclass of :class:`RowSamples`, which makes arrays of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.paths import cache_folder
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.bad_samples import LengthLimit, describe_too_long, refuse_too_long
from mgpu_pipe.data.cache import Progress, build_once, digest_of, no_progress, read_manifest, run_cache
from mgpu_pipe.data.data_source import held_out_data, open_shipped
from mgpu_pipe.data.prepared_splits import PreparedSplits, held_out_share
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.text.document_encoder import TRAINED
from mgpu_pipe.data.text.documents import Document, Source
from mgpu_pipe.data.text.notes import Notes, notes_of
from mgpu_pipe.data.text.prepare_text import tokenise
from mgpu_pipe.data.text.token_store import TokenStore, load_array, save_array
from mgpu_pipe.data.text.tokenizer import resolve_tokenizer

if TYPE_CHECKING:
    import torch

Rows = TypeVar("Rows", bound="PreparedRows")


@dataclass(frozen=True, kw_only=True)
class PreparedRows(PreparedSplits):
    """Everything a worker needs to load rows of text, each a document of a token store; a subclass is a kind of row."""

    what: ClassVar[str]
    """Name of the rows, in the plural."""
    auto_rule: ClassVar[str] = "drop"
    """Rule of ``data.on_too_long=auto``."""
    samples_class: ClassVar[type[RowSamples]]

    tokenizer_folder: Path
    padding_token_id: int
    seq_len: int
    """Tokens of a padded row."""
    on_too_long: str = "drop"

    @classmethod
    def write_facts(cls, folder: Path) -> None:
        """Writes facts about the rows next to a token store."""

    def samples(
        self, seed: int, model: ModelConfig, data: DataConfig, split: Split, reopen: Callable[[], Any]
    ) -> SampleSet:
        return self.samples_class(self, split, reopen)

    def limits(self, folder: Path) -> list[tuple[LengthLimit, NDArray[np.int64]]]:
        """Limits of a row, each with lengths of a folder, (rows,); 0 for a row that is left out anyway."""
        return [(LengthLimit("data.seq_len", self.seq_len, self.what), TokenStore.open(folder).lengths)]

    def long_documents(self, folder: Path) -> NDArray[np.bool_]:
        """Which documents of a folder do not fit, (documents,)."""
        long: NDArray[np.bool_] = np.any([lengths > limit.value for limit, lengths in self.limits(folder)], axis=0)
        return long

    def documents(self, split: Split) -> NDArray[np.int64]:
        """Indices of a split's used documents in its folder."""
        folder = self.folder_of(split)
        chosen = self.in_split(split, TokenStore.open(folder).hashes)
        return np.flatnonzero(chosen & ~self.long_documents(folder) if self.on_too_long == "drop" else chosen)

    def count(self) -> tuple[int, int]:
        """Documents and tokens of both splits."""
        offsets = [TokenStore.open(folder).offsets for folder in self.folders]
        return sum(len(each) - 1 for each in offsets), sum(int(each[-1]) for each in offsets)

    def count_long(self) -> int:
        """Number of documents of both splits that do not fit."""
        return sum(int(self.long_documents(folder).sum()) for folder in self.folders)

    def limit(self) -> str:
        """Keys and values of the limits of a row."""
        return f"data.seq_len={self.seq_len}"

    def too_long(self, data: DataConfig) -> str:
        return describe_too_long(self.too_long_samples, self.what, self.on_too_long, self.limit())

    def with_samples(
        self, data: DataConfig, identity: Sequence[object], is_apart: bool | None = None, also: str = "", **facts: Any
    ) -> Self:
        """Refuses rows that do not fit where this is the rule; adds counts and digests.

        Args:
            identity: what decides the samples, after the token store.
            is_apart: whether the held-out rows have a digest; None: where they have files.
            also: a further reason why there may be nothing to train on.

        Raises:
            ConfigError: a row does not fit, and the rule is refuse.
            DataError: there is no training sample.
        """
        for limit, lengths in (each for folder in self.folders for each in self.limits(folder)):
            if data.on_too_long == "refuse":
                refuse_too_long(limit, lengths)
        long = self.count_long()
        train, held_out = (len(self.documents(split)) for split in get_args(Split))
        is_apart = bool(data.validation_paths) if is_apart is None else is_apart and held_out > 0
        names, held_names = self.digest_names
        return self.with_counts(
            data,
            train,
            held_out,
            f"{also}{long:,} {self.what} are longer than {self.limit()}, {held_out:,} are held out; lower "
            "data.validation_fraction, or raise the limit",
            too_long_samples=long,
            digest=digest_of(*names, self.folder.name, self.fraction, *identity),
            validation_digest=digest_of(*held_names, self.held_out_folder.name, *identity) if is_apart else "",
            **facts,
        )

    @property
    def digest_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """First parts of the digests of both splits."""
        return (self.kind,), ()


class RowSamples(ABC):
    """Rows of one split, a :class:`mgpu_pipe.data.samples.SampleSet`; a subclass makes arrays of them.

    Args:
        reopen: opens the same samples in another process, which maps the files itself; picklable.

    Attributes:
        store: of the split's folder.
        documents: of the split, in the store, (rows,).
        start: position of each row in the token file, (rows,).
        length: tokens of each row, (rows,).
    """

    def __init__(self, prepared: PreparedRows, split: Split, reopen: Callable[[], SampleSet]) -> None:
        self.folder, self._reopen = prepared.folder_of(split), reopen
        self.store, self.documents = TokenStore.open(self.folder), prepared.documents(split)
        self.start = self.store.offsets[self.documents]
        self.length = self.store.offsets[self.documents + 1] - self.start
        self.seq_len, self.padding_token_id = prepared.seq_len, prepared.padding_token_id

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, ()

    def __len__(self) -> int:
        return len(self.documents)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return len(indices)

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * self.seq_len

    def padding(self, indices: NDArray[np.int64]) -> int:
        return self.positions(indices) - int(self.length[indices].sum())

    def tokens_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens at these positions of the token file; those after its end are the last."""
        return self.store.tokens.take(positions, mode="clip").astype(np.int64)

    def is_trained(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the loss mask counts the tokens at these positions of the token file."""
        assert self.store.loss_mask is not None
        counts: NDArray[np.bool_] = self.store.loss_mask.take(positions, mode="clip") & TRAINED != 0
        return counts

    @abstractmethod
    def arrays(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Arrays of the rows ``indices``, whose first dimension is ``rows``; see :class:`SampleSet`."""

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        import torch

        arrays = self.arrays(indices, numbers)
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}


def prepare_rows(
    kind: type[Rows],
    model: ModelConfig,
    data: DataConfig,
    objective: ObjectiveConfig,
    progress: Progress | None = None,
    summarize: Callable[[Notes], str] = Notes.summary,
    **facts: Any,
) -> Rows:
    """Tokenises the rows of ``data``, or finds them cached; :meth:`PreparedRows.with_samples` adds the counts.

    Args:
        summarize: the rows' notes in a line.
        facts: fields of the kind.

    Raises:
        ConfigError, DataError: see :func:`mgpu_pipe.data.text.prepare_text.prepare`.
    """
    report = progress or no_progress
    with run_cache(data) as cache:
        source, opened = open_shipped(data, cache, report), list[tuple[DataConfig, Source]]()
        if data.validation_paths:
            held_data = held_out_data(data)
            opened.append((held_data, open_shipped(held_data, cache, report, "data.validation_paths")))
        tokenizer = resolve_tokenizer(model, data, objective, [(data, source)], cache, report)
        folders = [tokenise(*each, tokenizer, cache, report) for each in [(data, source), *opened]]
    folder, held_folder = folders[0], folders[-1]
    for store in dict.fromkeys(folders):
        kind.write_facts(store)
    notes = notes_of(map(read_manifest, dict.fromkeys(folders)))
    fields: dict[str, Any] = {"padding_token_id": tokenizer.eos_token_id, "told": summarize(notes), **facts}
    return kind(
        folder=folder,
        held_out_folder=held_folder,
        fraction=held_out_share(data, folder, held_folder),
        tokenizer_folder=tokenizer.folder,
        seq_len=data.seq_len,
        on_too_long=kind.auto_rule if data.on_too_long == "auto" else data.on_too_long,
        bad_samples=notes.bad,
        **fields,
    )


def prepare_values(
    data: DataConfig,
    known: PreparedRows,
    name: str,
    values_of: Callable[[Iterable[Document]], Sequence[float]],
    progress: Progress | None = None,
) -> None:
    """Reads the rows a second time and writes their values, once for each token store; :func:`open_values` reads them.

    Args:
        name: of the values.
        values_of: a value for each document, or several one after another.

    Raises:
        DataError: a row has no value.
    """
    settings = {known.folder: (data, "data.paths")}
    if data.validation_paths:
        settings.setdefault(known.held_out_folder, (held_out_data(data), "data.validation_paths"))
    for folder, (chosen, key) in settings.items():

        def build(out: Path, chosen: DataConfig = chosen, key: str = key, folder: Path = folder) -> dict[str, Any]:
            values = np.array(values_of(stored_documents(chosen, folder, key, progress)), np.float64)
            save_array(out / f"{name}.npy", values)
            return {"rows": len(values)}

        build_once(_values(folder, name), build)


def stored_documents(
    data: DataConfig, folder: Path, key: str = "data.paths", progress: Progress | None = None
) -> Iterator[Document]:
    """Reads the documents of ``data.paths`` again: those in the token store ``folder``, in its order.

    Args:
        key: that named the paths, for errors.
    """
    usable, cache = TokenStore.open(folder).usable, cache_folder(data.cache_dir).absolute()
    documents = open_shipped(data, cache, progress or no_progress, key).documents()
    return (document for index, document in enumerate(documents) if usable is None or usable[index])


def open_values(folder: Path, name: str) -> NDArray[np.float64]:
    """The values of a token store's rows, in the order of the rows, (values,)."""
    values: NDArray[np.float64] = load_array(_values(folder, name) / f"{name}.npy")
    return values


def _values(folder: Path, name: str) -> Path:
    """Folder next to a token store."""
    return folder.with_name(f"{folder.name}.{name}")
