"""Prepares preference pairs: two answers to one prompt; each pair is a sample.

In the token file a pair is a document: the conversation with the chosen answer, then that with the rejected one, each
with the end-of-sequence token at its end. The loss mask's first bit marks the answers' tokens, its second bit the
second conversation. The prompt decides the held-out split. Pairs of equal conversations teach nothing, and cutting
pairs longer than ``data.seq_len`` would change them: both are counted and left out, unless ``data.on_too_long=refuse``.
For objectives that read margins a column ``margin`` is read: by how much the chosen answer is better.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.bad_samples import LengthLimit, refuse_too_long
from mgpu_pipe.data.cache import Progress, build_once, digest_of, read_manifest
from mgpu_pipe.data.files import FIX
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.text.document_encoder import REJECTED
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.notes import notes_of
from mgpu_pipe.data.text.prepared_rows import PreparedRows, prepare_rows
from mgpu_pipe.data.text.row_values import open_values, prepare_values
from mgpu_pipe.data.text.token_store import TokenStore, load_array, save_array
from mgpu_pipe.errors import DataError

_LENGTHS, _EQUAL = "chosen_lengths.npy", "equal.npy"
MARGIN, MARGINS = "margin", "margins"
"""Column of a pair's margin; name of the margins beside a token store."""


@dataclass(frozen=True, kw_only=True)
class PreparedPreferences(PreparedRows):
    """Everything a worker needs to load preference pairs; :func:`prepare_preferences` makes it."""

    kind: ClassVar[str] = "preferences"

    num_pairs: int
    """Used pairs of both splits."""
    num_tokens: int
    """Tokens of all pairs of both splits."""
    equal_pairs: int
    """Pairs left out because their conversations are equal."""
    with_margins: bool = False
    """Whether the pairs' margins are prepared."""

    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> SampleSet:
        from mgpu_pipe.data.text.row_tensors import PreferenceSamples

        store, documents = TokenStore.open(self.folder_of(split)), self.documents(split)
        chosen = load_array(_halves(self.folder_of(split)) / _LENGTHS)[documents]
        length = np.diff(store.offsets)[documents]
        margins = None
        if self.with_margins:
            margins = open_values(self.folder_of(split), MARGINS)[documents]
        return PreferenceSamples(
            store, store.offsets[documents], chosen, length, self.seq_len, self.padding_token_id, reopen, margins
        )

    def documents(self, split: Split) -> NDArray[np.int64]:
        documents = super().documents(split)
        return documents[~equal_pairs(self.folder_of(split))[documents]]

    def long_documents(self, folder: Path) -> NDArray[np.bool_]:
        return (TokenStore.open(folder).lengths > self.seq_len) & ~equal_pairs(folder)

    def amounts(self) -> list[tuple[int, str]]:
        left = [(self.equal_pairs, "equal pairs left out")] if self.equal_pairs else []
        return [(self.num_pairs, "pairs"), (self.num_tokens, "tokens"), *left, *self.left_out()]


def equal_pairs(folder: Path) -> NDArray[np.bool_]:
    """Which pairs of a token store have equal conversations, (pairs,)."""
    equal: NDArray[np.bool_] = load_array(_halves(folder) / _EQUAL)
    return equal


def prepare_preferences(config: RunConfig, progress: Progress | None = None) -> PreparedPreferences:
    """Prepares the pairs of ``config``, or finds them cached; see :func:`mgpu_pipe.data.text.prepare_text.prepare`.

    Raises:
        ConfigError, DataError: see there; or no pair is left.
    """
    data, rows = config.data, prepare_rows(config, progress)
    for folder in rows.names:
        build_once(_halves(folder), partial(_find_halves, TokenStore.open(folder)))
    with_margins = description(config.objective.name).reads_margins
    if with_margins:
        prepare_values(config, rows, MARGINS, margins_of, progress)
    equal = sum(int(equal_pairs(folder).sum()) for folder in rows.names)
    stores = [TokenStore.open(folder) for folder in rows.names]
    notes = notes_of(map(read_manifest, rows.names))
    known = PreparedPreferences(
        **vars(rows),
        seq_len=data.seq_len,
        num_pairs=0,
        num_tokens=sum(int(store.offsets[-1]) for store in stores),
        equal_pairs=equal,
        told=notes.summary(),
        with_margins=with_margins,
        bad_samples=notes.bad,
        digest=digest_of("preferences", rows.folder.name, rows.fraction, data.seq_len),
        validation_digest=digest_of(rows.held_out_folder.name, data.seq_len) if data.validation_paths else "",
    )
    long = known.count_long()
    if data.on_too_long == "refuse":
        for store, folder in zip(stores, rows.names, strict=True):
            limit = LengthLimit("data.seq_len", data.seq_len, "pairs")
            refuse_too_long(limit, np.where(equal_pairs(folder), 0, store.lengths))
    train, held_out = (len(known.documents(split)) for split in ("train", "validation"))
    return known.with_counts(
        config.data,
        train,
        held_out,
        f"{equal} pairs are equal, {long} longer than data.seq_len={data.seq_len}, {held_out} held out",
        num_pairs=sum(store.num_documents for store in stores) - equal - long,
        too_long_samples=long,
    )


def _halves(folder: Path) -> Path:
    """Folder next to a token store with facts about its pairs."""
    return folder.with_name(f"{folder.name}.halves")


def margins_of(documents: Iterable[Document]) -> list[float]:
    """Margin of each pair; all 0 where no row has one.

    Raises:
        DataError: a margin is no finite number, or only some rows have one.
    """
    margins, first = list[float](), None
    for document in documents:
        value = json.loads(document.text).get(MARGIN)
        first = value if not margins else first
        if (value is None) is not (first is None):
            raise DataError(f"{document.origin}: only some rows have a column '{MARGIN}'; {FIX}")
        try:
            margins.append(0.0 if value is None else float(value))
        except (TypeError, ValueError):
            margins.append(math.nan)
        if not math.isfinite(margins[-1]):
            raise DataError(f"{document.origin}: column '{MARGIN}' holds {value!r}, not a number; {FIX}")
    return margins


def _find_halves(store: TokenStore, out: Path) -> dict[str, Any]:
    """Writes the lengths of the chosen conversations, and which pairs are equal."""
    assert store.loss_mask is not None
    start, end = store.offsets[:-1], store.offsets[1:]
    rejected = np.add.reduceat(store.loss_mask & REJECTED != 0, start, dtype=np.int64)
    chosen = end - start - rejected
    equal = chosen == rejected
    for pair in np.flatnonzero(equal):
        first, second = np.split(store.tokens[start[pair] : end[pair]], 2)
        equal[pair] = np.array_equal(first, second)
    save_array(out / _LENGTHS, chosen)
    save_array(out / _EQUAL, equal)
    return {"pairs": len(chosen), "equal": int(equal.sum())}
