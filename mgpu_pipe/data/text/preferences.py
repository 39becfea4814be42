"""Preference pairs: two answers to one prompt, each pair a sample of its own. Imports neither torch nor transformers.

In the token file a pair lies as a document: the conversation with the chosen answer, then that with the rejected one,
each ended by the end-of-sequence token. The loss mask's first bit marks the answers' tokens, its second bit the second
conversation. What is held out is decided by the prompt. Pairs whose conversations are equal teach nothing, and those
that are longer than ``data.seq_len`` would be others if they were cut: both are left out, and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import Progress, build_once, digest_of
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.text.encode import REJECTED
from mgpu_pipe.data.text.prepared_rows import PreparedRows, prepare_rows
from mgpu_pipe.data.text.token_store import TokenStore, load_array, save_array
from mgpu_pipe.errors import DataError

_LENGTHS, _EQUAL = "chosen_lengths.npy", "equal.npy"


@dataclass(frozen=True, kw_only=True)
class PreparedPreferences(PreparedRows):
    """All that a worker needs to load batches of pairs; made by :func:`prepare_preferences`."""

    kind: ClassVar[str] = "preferences"

    num_pairs: int
    """Of both splits, those that are used."""
    num_tokens: int
    """Of both splits, of all pairs."""
    equal_pairs: int
    """Left out, as their conversations are equal."""
    long_pairs: int
    """Left out, as they are longer than ``seq_len``."""

    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> SampleSet:
        from mgpu_pipe.data.text.preference_samples import PreferenceSamples

        store, documents = TokenStore.open(self.folder_of(split)), self.documents(split)
        chosen = load_array(_halves(self.folder_of(split)) / _LENGTHS)[documents]
        length = np.diff(store.offsets)[documents]
        return PreferenceSamples(
            store, store.offsets[documents], chosen, length, self.seq_len, self.padding_token_id, reopen
        )

    def documents(self, split: Split) -> NDArray[np.int64]:
        documents, folder = super().documents(split), self.folder_of(split)
        equal, long = left_out(folder, self.seq_len)
        return documents[~(equal | long)[documents]]

    def amounts(self) -> list[tuple[int, str]]:
        left = [(self.equal_pairs, "equal pairs left out"), (self.long_pairs, "pairs above data.seq_len left out")]
        return [(self.num_pairs, "pairs"), (self.num_tokens, "tokens"), *[entry for entry in left if entry[0]]]


def left_out(folder: Path, seq_len: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which pairs of a token store are equal, and which others are too long; (pairs,) each."""
    equal = load_array(_halves(folder) / _EQUAL)
    return equal, (np.diff(TokenStore.open(folder).offsets) > seq_len) & ~equal


def prepare_preferences(config: RunConfig, progress: Progress | None = None) -> PreparedPreferences:
    """Make the pairs of ``config`` ready, or find them ready; as :func:`mgpu_pipe.data.text.prepare.prepare`.

    Raises:
        ConfigError, DataError: as there, or no pair is left.
    """
    data, rows = config.data, prepare_rows(config, progress)
    for folder in rows.names:
        build_once(_halves(folder), partial(_find_halves, TokenStore.open(folder)))
    found = [left_out(folder, data.seq_len) for folder in rows.names]
    equal, long = (sum(int(of[kind].sum()) for of in found) for kind in (0, 1))
    stores = [TokenStore.open(folder) for folder in rows.names]
    known = PreparedPreferences(
        **vars(rows),
        seq_len=data.seq_len,
        num_pairs=sum(store.num_documents for store in stores) - equal - long,
        num_tokens=sum(int(store.offsets[-1]) for store in stores),
        equal_pairs=equal,
        long_pairs=long,
        train_samples=0,
        held_out_samples=0,
        validation_samples=0,
        digest=digest_of("preferences", rows.folder.name, rows.fraction, data.seq_len),
        validation_digest=digest_of(rows.held_out_folder.name, data.seq_len) if data.validation_paths else "",
    )
    train, held = (len(known.documents(split)) for split in ("train", "validation"))
    if not train:
        left = f"{equal} pairs are equal, {long} longer than data.seq_len={data.seq_len}, {held} held out"
        raise DataError(f"data.source={data.source}: there is nothing to train on: {left}")
    evaluated = min(held, data.validation_max_samples or held)
    return replace(known, train_samples=train, held_out_samples=held, validation_samples=evaluated)


def _halves(folder: Path) -> Path:
    """Beside a token store, what is known of its pairs."""
    return folder.with_name(f"{folder.name}.halves")


def _find_halves(store: TokenStore, out: Path) -> dict[str, Any]:
    """Write the lengths of the chosen conversations, and which pairs are equal."""
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
