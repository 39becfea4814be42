"""Prepares texts, or pairs of texts, with classes: JSON lines for sequence classification.

A sample is a row of at most ``data.seq_len`` tokens. ``data.on_too_long`` drops a longer text or cuts its end; of a
pair it cuts the longer text.

The cache has a token store (:mod:`mgpu_pipe.data.text.prepare_text`) with two more arrays: ``labels.npy``, the class of
each document as an index into the manifest's names, and ``seconds.npy``, where its second text begins. Only the texts
decide the held-out split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import OR_SKIP, LengthLimit, rows_of_files, rule_of
from mgpu_pipe.data.cache import Progress, build_once, digest_of, no_progress, read_manifest, run_cache
from mgpu_pipe.data.classes import class_fields, class_names, classes_in_digest
from mgpu_pipe.data.data_source import held_out_data
from mgpu_pipe.data.earlier_tables import marks_of_tables
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, fingerprints, forget
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.data.prepared_splits import held_out_share, majority_accuracy, store_labels, stored_classes, stored_names
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.tables import row_lines
from mgpu_pipe.data.text.document_encoder import EncodedBatch
from mgpu_pipe.data.text.documents import Document, Source
from mgpu_pipe.data.text.file_source import Row, contents_of, row_of, unusable_or_raise
from mgpu_pipe.data.text.notes import Notes, notes_of, report_bad
from mgpu_pipe.data.text.pair_template import RowEncoder
from mgpu_pipe.data.text.prepared_rows import PreparedRows, RowSamples
from mgpu_pipe.data.text.token_store import TokenStore, load_array, save_array, write_tokens
from mgpu_pipe.data.text.tokenizer import TokenizerInfo, resolve_tokenizer
from mgpu_pipe.errors import DataError

SOURCE = "labelled_jsonl"
_FORMAT = 1
_AT_ONCE = 1024
"""Texts encoded at once."""


class LabelledSamples(RowSamples):
    """Labelled texts of one split."""

    def __init__(self, prepared: PreparedLabelled, split: Split, reopen: Any) -> None:
        super().__init__(prepared, split, reopen)
        self._second, self._labels = load_array(self.folder / "seconds.npy")[self.documents], prepared.labels(split)

    def arrays(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """int64 arrays: ``input_ids`` and ``token_type_ids``, (rows, seq_len); ``lengths`` and ``labels``, (rows,)."""
        place, lengths = np.arange(self.seq_len), self.length[indices]
        inside = place < lengths[:, None]
        return {
            "input_ids": np.where(inside, self.tokens_at(self.start[indices][:, None] + place), self.padding_token_id),
            "token_type_ids": (inside & (place >= self._second[indices][:, None])).astype(np.int64),
            "lengths": lengths,
            "labels": self._labels[indices],
        }


@dataclass(frozen=True, kw_only=True)
class PreparedLabelled(PreparedRows):
    """Everything a worker needs to load labelled texts; :func:`prepare_labelled` makes it."""

    kind: ClassVar[str] = "labelled_text"
    what: ClassVar[str] = "texts"
    samples_class = LabelledSamples

    classes: list[str]
    """Class names in the order of their numbers."""
    num_documents: int
    majority_accuracy: float | None = None
    """Accuracy of always predicting the most frequent training class, on the evaluated samples."""

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Class of each sample of a split, in the order of :meth:`documents`."""
        return stored_classes(self.folder_of(split), self.classes)[self.documents(split)]

    def limits(self, folder: Path) -> list[tuple[LengthLimit, NDArray[np.int64]]]:
        return [(limit, load_array(_long(folder) / "needs.npy")) for limit, _ in super().limits(folder)]

    @property
    def digest_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (), ()

    def model_fields(self) -> dict[str, Any]:
        return class_fields(self.classes)

    def amounts(self) -> list[tuple[int, str]]:
        return [(self.num_documents, "texts"), (len(self.classes), "classes"), *self.left_out()]


def prepare_labelled(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, progress: Progress | None = None
) -> PreparedLabelled:
    """Prepares the texts of ``data``, or finds them cached; see :func:`mgpu_pipe.data.text.prepare_text.prepare`.

    Raises:
        ConfigError: a path, tokenizer or list of classes that cannot work.
        DataError: a line is broken or lacks a text or class; or there is no training sample.
    """
    with run_cache(data) as cache:
        report = progress or no_progress
        source = held_source = _LabelledFiles(data, cache, "data.paths", report)
        tokenizer = resolve_tokenizer(model, data, objective, [(data, source.as_text())], cache, report)
        folder = held_folder = source.encode(tokenizer)
        if data.validation_paths:
            held_data = held_out_data(data)
            held_source = _LabelledFiles(held_data, cache, "data.validation_paths", report)
            held_folder = held_source.encode(tokenizer)
        source.measure(folder, tokenizer)
        held_source.measure(held_folder, tokenizer)
    padding, stores = model_field(model, "pad_token_id"), {folder, held_folder}
    trained, evaluated = (set(stored_names(store)) for store in (folder, held_folder))
    known = PreparedLabelled(
        folder=folder,
        held_out_folder=held_folder,
        fraction=held_out_share(data, folder, held_folder),
        tokenizer_folder=tokenizer.folder,
        padding_token_id=padding if isinstance(padding, int) else tokenizer.eos_token_id,
        seq_len=data.seq_len,
        classes=class_names(model, data, trained, evaluated),
        num_documents=sum(TokenStore.open(store).num_documents for store in stores),
        on_too_long=rule_of(data),
        bad_samples=notes_of(map(read_manifest, stores)).bad,
    )
    # Cutting rows was the only rule of earlier versions, so it adds nothing to the identity.
    ruled = [known.on_too_long] if known.on_too_long != "truncate" and known.count_long() else []
    classes = classes_in_digest(model, data, known.classes, trained | evaluated)
    identity = (_FORMAT, classes, known.seq_len, known.padding_token_id, *ruled)
    accuracy = majority_accuracy(known.labels("train"), known.labels("validation"), data)
    return known.with_samples(data, identity, is_apart=known.is_apart, majority_accuracy=accuracy)


def _long(folder: Path) -> Path:
    """Folder next to a folder of rows, with ``needs.npy``: the tokens of each row's whole texts."""
    return folder.with_name(f"{folder.name}.needs")


class _LabelledFiles:
    """Rows of some files, and their tokens in the cache."""

    def __init__(self, data: DataConfig, cache: Path, key: str, progress: Progress) -> None:
        self._data, self._cache, self._progress = data, cache, progress
        self._paths = files.expand_paths(self._data.paths, key)
        self._unusable = unusable_or_raise(self._paths, self._data.on_bad_sample)
        usable = [path for path in self._paths if path not in self._unusable]
        self._known: Mapping[Path, Fingerprint] = fingerprints(usable, cache, progress)
        columns = (self._data.text_column, self._data.second_text_column, self._data.label_column)
        contents = contents_of(self._paths, self._unusable, self._known)
        self.identity = digest_of("labelled", columns, contents, *marks_of_tables(contents, self._known, cache))
        self._size = sum(content.size for content in self._known.values())

    def rows(self, notes: Notes | None = None) -> Iterator[Row]:
        """Yields the usable rows, ``notes`` counts others; DataError with ``data.on_bad_sample=stop``."""

        def read(path: Path) -> Iterator[tuple[str, str, int]]:
            return row_lines(path, self._known[path])

        def make(line: str, origin: str, size: int) -> Row:
            return row_of(self._data, line, origin, size)

        try:
            for row in rows_of_files(self._paths, self._unusable, read, make):
                if isinstance(row, Row):
                    yield row
                elif self._data.on_bad_sample == "stop":
                    raise DataError(f"{row.message}{OR_SKIP}")
                elif notes is not None:
                    notes.add_bad(row)
        except ChangedFileError:
            forget(self._paths, self._cache)
            raise

    def as_text(self) -> Source:
        """Source of the texts, to train a tokenizer."""

        def documents() -> Iterator[Document]:
            return (Document(row.whole_text, row.origin, row.size) for row in self.rows())

        return Source(SOURCE, self.identity, self._size, documents)

    def encode(self, tokenizer: TokenizerInfo) -> Path:
        """Builds or finds the folder of the rows' tokens."""
        identity = {
            "source": self.identity,
            "tokenizer": tokenizer.digest,
            "seq_len": self._data.seq_len,
            "format": _FORMAT,
        }
        folder = self._cache / "tokens" / digest_of("labelled", identity)

        def build(out: Path) -> dict[str, Any]:
            encoder, labels, seconds = RowEncoder(tokenizer, self._data.seq_len), list[str](), list[int]()
            notes = Notes()

            def batches() -> Iterator[EncodedBatch]:
                waiting = self.rows(notes)
                while rows := list(islice(waiting, _AT_ONCE)):
                    labels.extend(row.label for row in rows)
                    batch, begins = encoder.encode(rows)
                    seconds.extend(begins)
                    yield batch
                yield encoder.encode([])[0]._replace(notes=notes)

            meta = write_tokens(out, batches(), {"name": SOURCE, **identity}, self._size, self._progress)
            names = store_labels(out, labels)
            save_array(out / "seconds.npy", np.array(seconds, np.int64))
            return {**meta, "labels": names}

        report_bad(build_once(folder, build), self._data.on_bad_sample, ("a text", "texts"))
        return folder

    def measure(self, folder: Path, tokenizer: TokenizerInfo) -> None:
        """Writes the lengths of the rows in ``folder``; encodes full rows again, as they may be cut."""

        def build(out: Path) -> dict[str, Any]:
            needs = TokenStore.open(folder).lengths.copy()
            full = np.flatnonzero(needs == self._data.seq_len)
            if len(full):
                encoder, chosen = RowEncoder(tokenizer, self._data.seq_len), set(full.tolist())
                rows = (row for index, row in enumerate(self.rows()) if index in chosen)
                lengths = list[int]()
                while some := list(islice(rows, _AT_ONCE)):
                    lengths += encoder.lengths(some)
                needs[full] = lengths
            save_array(out / "needs.npy", needs)
            return {"full": len(full)}

        build_once(_long(folder), build)
