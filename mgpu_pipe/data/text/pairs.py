"""Pairs of source and target text, each pair a sample of its own. Imports neither torch nor transformers.

In the token file a pair lies as a document: the source, the target, each ended by the end-of-sequence token; the loss
mask marks the target's tokens. So tokenising, caching and the held-out split are those of all text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import Progress, digest_of, read_manifest
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.text.prepared_rows import PreparedRows, documents_of, prepare_rows
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class PreparedPairs(PreparedRows):
    """All that a worker needs to load batches of pairs; made by :func:`prepare_pairs`. Its rows are padded sources."""

    kind: ClassVar[str] = "pairs"

    target_len: int
    """Tokens of a padded target."""
    num_pairs: int
    """Of both splits."""
    num_tokens: int
    """Tokens of both splits, end-of-sequence tokens included."""

    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> SampleSet:
        from mgpu_pipe.data.text.pair_samples import PairSamples

        store = TokenStore.open(self.folder_of(split))
        pairs = pairs_of(store, self.documents(split))
        return PairSamples(store, pairs, (self.seq_len, self.target_len), self.padding_token_id, reopen)

    def amounts(self) -> list[tuple[int, str]]:
        return [(self.num_pairs, "pairs"), (self.num_tokens, "tokens")]


@dataclass(frozen=True)
class Pairs:
    """Where the pairs of one split lie in their token store; every array has shape ``(pairs,)``."""

    start: NDArray[np.int64]
    source_tokens: NDArray[np.int64]
    """Of each pair's source, its end included; the target begins behind it."""
    target_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)


def pairs_of(store: TokenStore, chosen: NDArray[np.int64]) -> Pairs:
    """The ``chosen`` pairs of ``store``."""
    assert store.loss_mask is not None
    start = store.offsets[:-1]
    targets = np.add.reduceat(store.loss_mask, start, dtype=np.int64)
    sources = np.diff(store.offsets) - targets
    return Pairs(start[chosen], sources[chosen], targets[chosen])


def prepare_pairs(config: RunConfig, progress: Progress | None = None) -> PreparedPairs:
    """Make the pairs of ``config`` ready, or find them ready; as :func:`mgpu_pipe.data.text.prepare.prepare`.

    Raises:
        ConfigError: as there, or ``data.seq_len`` or ``data.target_len`` is too short for a pair.
        DataError: as there.
    """
    data, rows = config.data, prepare_rows(config, progress)
    folder, held_folder, fraction = rows.folder, rows.held_out_folder, rows.fraction
    train, held = (len(documents_of(folder, held_folder, fraction, split)) for split in ("train", "validation"))
    for one in rows.names:
        _check_lengths(config, one)
    if not train:
        raise DataError(f"data.source={data.source}: there is nothing to train on: all pairs are held out; add some")
    manifests = [manifest for manifest in map(read_manifest, rows.names) if manifest]
    sizes = (data.seq_len, data.target_tokens())
    return PreparedPairs(
        **vars(rows),
        seq_len=sizes[0],
        target_len=sizes[1],
        num_pairs=sum(manifest["documents"] for manifest in manifests),
        num_tokens=sum(manifest["tokens"] for manifest in manifests),
        train_samples=train,
        held_out_samples=held,
        validation_samples=min(held, data.validation_max_samples or held),
        digest=digest_of("pairs", folder.name, fraction, *sizes),
        validation_digest=digest_of("pairs", held_folder.name, *sizes) if data.validation_paths else "",
    )


def _check_lengths(config: RunConfig, folder: Path) -> None:
    """Raise where a text is longer than its place: cut, it would be another text."""
    store = TokenStore.open(folder)
    pairs = pairs_of(store, np.arange(store.num_documents))
    for key, what, lengths, room in (
        ("data.seq_len", "source", pairs.source_tokens, config.data.seq_len),
        ("data.target_len", "target", pairs.target_tokens, config.data.target_tokens()),
    ):
        if (too_long := int((lengths > room).sum())) > 0:
            most, at = int(lengths.max()), int(lengths.argmax()) + 1
            reason = f"{too_long} of {len(lengths)} {what}s are longer, the longest (of pair {at}) has {most} tokens"
            raise ConfigError(key, room, f"use at least {most}, or leave those pairs out", reason)
