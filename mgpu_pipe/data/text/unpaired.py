"""Prepares conversations whose last answer is labelled desirable or not; each is a sample (for ``objective=kto``).

In the token file a sample is a conversation with the end-of-sequence token at its end. The loss mask's first bit marks
the answer's tokens, its second bit conversations with an undesirable answer. The prompt decides the held-out split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.bad_samples import LengthLimit, refuse_too_long
from mgpu_pipe.data.cache import Progress, digest_of, read_manifest
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.text.notes import notes_of
from mgpu_pipe.data.text.prepared_rows import PreparedRows, prepare_rows
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.data.text.unpaired_answers import is_desirable
from mgpu_pipe.errors import DataError


@dataclass(frozen=True, kw_only=True)
class PreparedUnpaired(PreparedRows):
    """Everything a worker needs to load labelled answers; :func:`prepare_unpaired` makes it."""

    kind: ClassVar[str] = "unpaired"

    num_samples: int
    """Used samples of both splits."""
    num_tokens: int
    """Tokens of all samples of both splits."""
    desirable: int
    """Desirable samples of the training split."""

    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> SampleSet:
        from mgpu_pipe.data.text.unpaired_tensors import UnpairedSamples

        store = TokenStore.open(self.folder_of(split))
        return UnpairedSamples(store, self.documents(split), self.seq_len, self.padding_token_id, reopen)

    def long_documents(self, folder: Path) -> NDArray[np.bool_]:
        return TokenStore.open(folder).lengths > self.seq_len

    def amounts(self) -> list[tuple[int, str]]:
        undesirable = self.train_samples - self.desirable
        parts = [(self.desirable, "desirable to train on"), (undesirable, "undesirable to train on")]
        return [(self.num_samples, "answers"), *parts, (self.num_tokens, "tokens"), *self.left_out()]


def prepare_unpaired(config: RunConfig, progress: Progress | None = None) -> PreparedUnpaired:
    """Prepares the samples of ``config``, or finds them cached; see :func:`mgpu_pipe.data.text.prepare_text.prepare`.

    Raises:
        ConfigError, DataError: see there; or the training samples are not of both labels.
    """
    data, rows = config.data, prepare_rows(config, progress)
    stores = [TokenStore.open(folder) for folder in rows.names]
    notes = notes_of(map(read_manifest, rows.names))
    known = PreparedUnpaired(
        **vars(rows),
        seq_len=data.seq_len,
        num_samples=0,
        num_tokens=sum(int(store.offsets[-1]) for store in stores),
        desirable=0,
        told=notes.summary(),
        bad_samples=notes.bad,
        digest=digest_of("unpaired", rows.folder.name, rows.fraction, data.seq_len),
        validation_digest=digest_of(rows.held_out_folder.name, data.seq_len) if data.validation_paths else "",
    )
    long = known.count_long()
    if data.on_too_long == "refuse":
        for store in stores:
            refuse_too_long(LengthLimit("data.seq_len", data.seq_len, "conversations"), store.lengths)
    documents, held_out = known.documents("train"), len(known.documents("validation"))
    desirable = int(is_desirable(stores[0], documents).sum()) if len(documents) else 0
    if len(documents) and desirable in (0, len(documents)):
        label = "every training sample is desirable" if desirable else "no training sample is desirable"
        raise DataError(f"data.source={data.source}: {label}; give answers of both labels")
    return known.with_counts(
        config.data,
        len(documents),
        held_out,
        f"{long} conversations are longer than data.seq_len={data.seq_len}, {held_out} held out",
        num_samples=sum(store.num_documents for store in stores) - long,
        desirable=desirable,
        too_long_samples=long,
    )
