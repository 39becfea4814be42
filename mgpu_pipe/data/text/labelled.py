"""Texts, or pairs of texts, each with its class: JSON lines made ready for sequence classification. No torch.

A sample is one row of at most ``data.seq_len`` tokens: a longer text is cut at its end, of a pair the longer one. In
the cache a source is a token store like any other's (:mod:`mgpu_pipe.data.text.prepare`), with two more arrays:
``labels.npy``, the class of each document among the names in the manifest, and ``seconds.npy``, where its second text
begins. What is held out is decided by the texts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.cache import Progress, build_once, digest_of, no_progress, read_manifest, writing_to_cache
from mgpu_pipe.data.classes import class_names, class_number, in_order
from mgpu_pipe.data.compressed import identity_of
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, fingerprints, forget
from mgpu_pipe.data.samples import Split, evaluated_samples
from mgpu_pipe.data.text.documents import Document, Source
from mgpu_pipe.data.text.encode import EncodedBatch
from mgpu_pipe.data.text.labelled_row import Row, row_of
from mgpu_pipe.data.text.prepared_rows import PreparedRows
from mgpu_pipe.data.text.row_encoder import RowEncoder
from mgpu_pipe.data.text.sources import validation_source_config
from mgpu_pipe.data.text.token_store import TokenStore, load_array, save_array, write_tokens
from mgpu_pipe.data.text.tokenizer import TokenizerInfo, model_field, resolve_tokenizer
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    from mgpu_pipe.data.text.labelled_samples import LabelledSamples

SOURCE = "labelled_jsonl"
_FORMAT = 1
_AT_ONCE = 1024
"""Texts that are encoded together."""


@dataclass(frozen=True, kw_only=True)
class PreparedLabelled(PreparedRows):
    """All that a worker needs to load labelled texts; made by :func:`prepare_labelled`."""

    kind: ClassVar[str] = "labelled_text"

    classes: list[str]
    """Their names, in the order of their numbers."""
    num_documents: int
    majority_accuracy: float | None
    """What saying the training data's most frequent class every time reaches on the evaluated samples."""

    def labels(self, split: Split) -> NDArray[np.int64]:
        """The class of each sample of a split, in the order of :meth:`documents`."""
        folder = self.folder_of(split)
        numbers = np.array([class_number(name, self.classes) for name in _names(folder)], np.int64)
        return numbers[load_array(folder / "labels.npy")[self.documents(split)]]

    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> LabelledSamples:
        from mgpu_pipe.data.text.labelled_samples import LabelledSamples

        return LabelledSamples(self, split, reopen)

    def model_fields(self) -> dict[str, Any]:
        return {
            "id2label": {str(number): name for number, name in enumerate(self.classes)},
            "label2id": {name: number for number, name in enumerate(self.classes)},
        }

    def amounts(self) -> list[tuple[int, str]]:
        return [(self.num_documents, "texts"), (len(self.classes), "classes")]


def prepare_labelled(config: RunConfig, progress: Progress | None = None) -> PreparedLabelled:
    """Make the texts of ``config`` ready, or find them ready; as :func:`mgpu_pipe.data.text.prepare.prepare`.

    Raises:
        ConfigError: a path, tokenizer or list of classes that cannot work.
        DataError: a line that is broken, or has no text or class; no training sample.
    """
    cache, data = cache_folder(config.data.cache_dir).absolute(), config.data
    with writing_to_cache(cache):
        private_folder(cache)
        told = progress or no_progress
        source = _LabelledFiles(config, cache, "data.paths", told)
        tokenizer = resolve_tokenizer(config, [(config, source.as_text())], cache, told)
        folder = source.encoded(tokenizer)
        held = folder
        if data.validation_paths:
            held = _LabelledFiles(validation_source_config(config), cache, "data.validation_paths", told).encoded(
                tokenizer
            )
    fraction = float(held == folder) if data.validation_paths else data.validation_fraction
    padding = model_field(config.model, "pad_token_id")
    known = PreparedLabelled(
        folder=folder,
        held_out_folder=held,
        fraction=fraction,
        tokenizer_folder=tokenizer.folder,
        padding_token_id=padding if isinstance(padding, int) else tokenizer.eos_token_id,
        seq_len=data.seq_len,
        classes=class_names(config, {name for one in (folder, held) for name in _names(one)}),
        num_documents=sum(TokenStore.open(one).num_documents for one in {folder, held}),
        train_samples=0,
        held_out_samples=0,
        validation_samples=0,
        majority_accuracy=None,
        digest="",
        validation_digest="",
    )
    return _counted(known, config)


def _counted(known: PreparedLabelled, config: RunConfig) -> PreparedLabelled:
    """With its samples, its figures and its identity."""
    train, held = known.labels("train"), known.labels("validation")
    if not len(train):
        raise DataError(f"data.source={SOURCE}: there is nothing to train on; lower data.validation_fraction")
    evaluated = min(len(held), config.data.validation_max_samples or len(held))
    majority = None
    if evaluated:
        chosen = held[evaluated_samples(len(held), evaluated)]
        majority = float((chosen == np.bincount(train).argmax()).mean())
    identity = (_FORMAT, known.classes, known.seq_len, known.padding_token_id)
    apart = known.held_out_folder != known.folder
    return replace(
        known,
        train_samples=len(train),
        held_out_samples=len(held),
        validation_samples=evaluated,
        majority_accuracy=majority,
        digest=digest_of(known.folder.name, known.fraction, *identity),
        validation_digest=digest_of(known.held_out_folder.name, *identity) if apart and evaluated else "",
    )


def _names(folder: Path) -> list[str]:
    """The names of the classes in a folder, by their numbers in its ``labels.npy``."""
    manifest = read_manifest(folder)
    assert manifest is not None
    return list(manifest["labels"])


class _LabelledFiles:
    """The rows of some files, and their tokens in the cache."""

    def __init__(self, config: RunConfig, cache: Path, key: str, progress: Progress) -> None:
        self._data, self._cache, self._progress = config.data, cache, progress
        self._paths = files.expand_paths(self._data.paths, key)
        self._known: Mapping[Path, Fingerprint] = fingerprints(self._paths, cache, progress)
        columns = (self._data.text_column, self._data.second_text_column, self._data.label_column)
        self.identity = digest_of("labelled", columns, [identity_of(path, self._known[path]) for path in self._paths])
        self._size = sum(self._known[path].size for path in self._paths)

    def rows(self) -> Iterator[Row]:
        try:
            for path in self._paths:
                for line, origin, size in files.read_lines(path, self._known[path]):
                    yield row_of(self._data, line, origin, size)
        except ChangedFileError:
            forget(self._paths, self._cache)
            raise

    def as_text(self) -> Source:
        """What a tokenizer is trained on."""

        def documents() -> Iterator[Document]:
            return (Document(row.joined, row.origin, row.size) for row in self.rows())

        return Source(SOURCE, self.identity, self._size, documents)

    def encoded(self, tokenizer: TokenizerInfo) -> Path:
        """The folder of their tokens, made if it is not there."""
        identity = {
            "source": self.identity,
            "tokenizer": tokenizer.digest,
            "seq_len": self._data.seq_len,
            "format": _FORMAT,
        }
        folder = self._cache / "tokens" / digest_of("labelled", identity)

        def build(out: Path) -> dict[str, Any]:
            encoder, labels, seconds = RowEncoder(tokenizer, self._data.seq_len), list[str](), list[int]()

            def batches() -> Iterator[EncodedBatch]:
                waiting = self.rows()
                while rows := list(islice(waiting, _AT_ONCE)):
                    labels.extend(row.label for row in rows)
                    batch, begins = encoder.encode(rows)
                    seconds.extend(begins)
                    yield batch

            meta = write_tokens(out, batches(), {"name": SOURCE, **identity}, self._size, self._progress)
            names = sorted(set(labels), key=in_order)
            numbers = {name: number for number, name in enumerate(names)}
            save_array(out / "labels.npy", np.array([numbers[name] for name in labels], np.int64))
            save_array(out / "seconds.npy", np.array(seconds, np.int64))
            return {**meta, "labels": names}

        build_once(folder, build)
        return folder
