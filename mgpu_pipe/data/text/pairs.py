"""Prepares pairs of source and target text; each pair is a sample.

In the token file a pair is a document: source and target, each with the end-of-sequence token at its end; the loss mask
marks the target's tokens. So pairs share tokenising, caching and the held-out split with all text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.data.bad_samples import LengthLimit, describe_too_long, refuse_too_long, rule_of
from mgpu_pipe.data.cache import Progress, digest_of, read_manifest
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.text.notes import notes_of
from mgpu_pipe.data.text.prepared_rows import PreparedRows, prepare_rows
from mgpu_pipe.data.text.token_store import TokenStore


@dataclass(frozen=True, kw_only=True)
class PreparedPairs(PreparedRows):
    """Everything a worker needs to load pairs; :func:`prepare_pairs` makes it. Its rows are padded sources."""

    kind: ClassVar[str] = "pairs"

    target_len: int
    """Tokens of a padded target."""
    num_pairs: int
    """Pairs of both splits."""
    num_tokens: int
    """Tokens of both splits, end-of-sequence tokens included."""

    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> SampleSet:
        from mgpu_pipe.data.text.row_tensors import PairSamples

        store = TokenStore.open(self.folder_of(split))
        pairs = pairs_of(store, self.documents(split))
        return PairSamples(store, pairs, (self.seq_len, self.target_len), self.padding_token_id, reopen)

    def long_documents(self, folder: Path) -> NDArray[np.bool_]:
        store = TokenStore.open(folder)
        pairs = pairs_of(store, np.arange(store.num_documents))
        long: NDArray[np.bool_] = (pairs.source_tokens > self.seq_len) | (pairs.target_tokens > self.target_len)
        return long

    def too_long(self, data: DataConfig) -> str:
        limit = f"data.seq_len={self.seq_len} or data.target_len={self.target_len}"
        return describe_too_long(self.too_long_samples, "pairs", self.on_too_long, limit)

    def amounts(self) -> list[tuple[int, str]]:
        return [(self.num_pairs, "pairs"), (self.num_tokens, "tokens"), *self.left_out()]


@dataclass(frozen=True)
class Pairs:
    """Positions of one split's pairs in their token store; every array has shape ``(pairs,)``."""

    start: NDArray[np.int64]
    source_tokens: NDArray[np.int64]
    """Tokens of each source, its end included; the target follows it."""
    target_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)


def pairs_of(store: TokenStore, chosen: NDArray[np.int64]) -> Pairs:
    """Finds the ``chosen`` pairs of ``store``."""
    assert store.loss_mask is not None
    start = store.offsets[:-1]
    targets = np.add.reduceat(store.loss_mask, start, dtype=np.int64)
    sources = np.diff(store.offsets) - targets
    return Pairs(start[chosen], sources[chosen], targets[chosen])


def prepare_pairs(config: RunConfig, progress: Progress | None = None) -> PreparedPairs:
    """Prepares the pairs of ``config``, or finds them cached; see :func:`mgpu_pipe.data.text.prepare_text.prepare`.

    Raises:
        ConfigError: see there; or a pair does not fit and ``data.on_too_long=refuse``.
        DataError: see there; or no pair is left.
    """
    data, rows = config.data, prepare_rows(config, progress)
    folder, held_folder, fraction = rows.folder, rows.held_out_folder, rows.fraction
    if data.on_too_long == "refuse":
        for name in rows.names:
            _refuse_long(config.data, name)
    manifests = [manifest for manifest in map(read_manifest, rows.names) if manifest]
    sizes = (data.seq_len, data.target_tokens())
    known = PreparedPairs(
        **vars(rows),
        seq_len=sizes[0],
        target_len=sizes[1],
        num_pairs=sum(manifest["documents"] for manifest in manifests),
        num_tokens=sum(manifest["tokens"] for manifest in manifests),
        bad_samples=notes_of(manifests).bad,
        on_too_long=rule_of(data),
    )
    long = known.count_long()
    train, held_out = (len(known.documents(split)) for split in ("train", "validation"))
    limits = f"data.seq_len={sizes[0]}, data.target_len={sizes[1]}"
    identity = (*sizes, *([known.on_too_long] if long else []))
    return known.with_counts(
        config.data,
        train,
        held_out,
        f"{long:,} of {known.num_pairs:,} pairs do not fit ({limits}), {held_out:,} are held out",
        too_long_samples=long,
        digest=digest_of("pairs", folder.name, fraction, *identity),
        validation_digest=digest_of("pairs", held_folder.name, *identity) if data.validation_paths else "",
    )


def _refuse_long(data: DataConfig, folder: Path) -> None:
    store = TokenStore.open(folder)
    pairs = pairs_of(store, np.arange(store.num_documents))
    refuse_too_long(LengthLimit("data.seq_len", data.seq_len, "sources"), pairs.source_tokens)
    refuse_too_long(LengthLimit("data.target_len", data.target_tokens(), "targets"), pairs.target_tokens)
