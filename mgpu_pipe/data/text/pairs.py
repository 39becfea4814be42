"""Pairs of source and target text, each pair a sample of its own. Imports neither torch nor transformers.

In the token file a pair lies as a document: the source, the target, each ended by the end-of-sequence token; the loss
mask marks the target's tokens. So tokenising, caching and the held-out split are those of all text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import Progress, digest_of, no_progress, read_manifest, writing_to_cache
from mgpu_pipe.data.samples import Prepared, SampleSet, Split, evaluated_samples
from mgpu_pipe.data.text.prepare import tokenise
from mgpu_pipe.data.text.sources import open_source, validation_source_config
from mgpu_pipe.data.text.split import held_out
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.data.text.tokenizer import resolve_tokenizer
from mgpu_pipe.errors import ConfigError, DataError


@dataclass(frozen=True)
class PreparedPairs(Prepared):
    """All that a worker needs to load batches of pairs; made by :func:`prepare_pairs`."""

    kind: ClassVar[str] = "pairs"
    folder: Path
    """The training pairs' token store."""
    held_out_folder: Path
    """The held-out pairs'; the same where they are a share of one store."""
    tokenizer_folder: Path
    padding_token_id: int
    seq_len: int
    """Tokens of a padded source."""
    target_len: int
    """Tokens of a padded target."""
    fraction: float
    """Share of the pairs that is held out, where both lie in one store."""
    num_pairs: int
    """Of both splits."""
    num_tokens: int
    """Tokens of both splits, end-of-sequence tokens included."""
    train_samples: int
    held_out_samples: int
    """Of which an evaluation takes ``validation_samples``."""
    validation_samples: int
    digest: str
    validation_digest: str = ""
    unigram_perplexity: float | None = None

    def as_dict(self) -> dict[str, Any]:
        plain = {name: str(entry) if isinstance(entry, Path) else entry for name, entry in asdict(self).items()}
        return {"kind": self.kind, **plain}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        fields = {name: entry for name, entry in value.items() if name != "kind"}
        folders = {name: Path(fields[name]) for name in ("folder", "held_out_folder", "tokenizer_folder")}
        return cls(**{**fields, **folders})

    def evaluated_samples(self) -> NDArray[np.int64]:
        return evaluated_samples(self.held_out_samples, self.validation_samples)

    def open(self, config: RunConfig, split: Split) -> SampleSet:
        from mgpu_pipe.data.text.pair_samples import PairSamples

        if split == "validation" and not self.held_out_samples:
            raise ValueError("this data holds nothing out")
        store = TokenStore.open(self.folder if split == "train" else self.held_out_folder)
        apart = self.held_out_folder != self.folder and split == "validation"
        pairs = pairs_of(store, chosen_pairs(store, split, 1.0 if apart else self.fraction))
        sizes = (self.seq_len, self.target_len)
        return PairSamples(store, pairs, sizes, self.padding_token_id, partial(self.open, config, split))

    def is_here(self) -> bool:
        return self.folder.exists()

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


def pairs_of(store: TokenStore, chosen: NDArray[np.bool_]) -> Pairs:
    """The pairs of ``store`` that are ``chosen``, in order."""
    assert store.loss_mask is not None
    start = store.offsets[:-1]
    targets = np.add.reduceat(store.loss_mask, start, dtype=np.int64)
    sources = np.diff(store.offsets) - targets
    return Pairs(start[chosen], sources[chosen], targets[chosen])


def chosen_pairs(store: TokenStore, split: Split, fraction: float) -> NDArray[np.bool_]:
    """Which pairs of ``store`` belong to a split; pairs of one key stay together. 1 holds out all."""
    out = np.ones(store.num_documents, np.bool_) if fraction == 1 else held_out(store.hashes, fraction)
    return out if split == "validation" else ~out


def prepare_pairs(config: RunConfig, progress: Progress | None = None) -> PreparedPairs:
    """Make the pairs of ``config`` ready, or find them ready; as :func:`mgpu_pipe.data.text.prepare.prepare`.

    Raises:
        ConfigError: as there, or ``data.seq_len`` or ``data.target_len`` is too short for a pair.
        DataError: as there.
    """
    cache, told = cache_folder(config.data.cache_dir).absolute(), progress or no_progress
    with writing_to_cache(cache):
        private_folder(cache)
        return _prepare(config, cache, told)


def _prepare(config: RunConfig, cache: Path, progress: Progress) -> PreparedPairs:
    data = config.data
    held_config = validation_source_config(config) if data.validation_paths else None
    source = open_source(config, cache, progress)
    held_source = open_source(held_config, cache, progress, "data.validation_paths") if held_config else None
    tokenizer = resolve_tokenizer(config, source, cache, progress)
    folder = tokenise(config, source, tokenizer, cache, progress)
    held_folder = tokenise(held_config, held_source, tokenizer, cache, progress) if held_config else folder
    fraction = 0.0 if held_config else data.validation_fraction
    available = {
        "train": int(chosen_pairs(TokenStore.open(folder), "train", fraction).sum()),
        "validation": int(
            chosen_pairs(TokenStore.open(held_folder), "validation", 1.0 if held_config else fraction).sum()
        ),
    }
    for one in dict.fromkeys((folder, held_folder)):
        _check_lengths(config, one)
    if not available["train"]:
        raise DataError(f"data.source={data.source}: there is nothing to train on: all pairs are held out; add some")
    manifests = [manifest for manifest in map(read_manifest, {folder, held_folder}) if manifest]
    sizes = (data.seq_len, data.target_tokens())
    return PreparedPairs(
        folder=folder,
        held_out_folder=held_folder,
        tokenizer_folder=tokenizer.folder,
        padding_token_id=tokenizer.eos_token_id,
        seq_len=sizes[0],
        target_len=sizes[1],
        fraction=fraction,
        num_pairs=sum(manifest["documents"] for manifest in manifests),
        num_tokens=sum(manifest["tokens"] for manifest in manifests),
        train_samples=available["train"],
        held_out_samples=available["validation"],
        validation_samples=min(available["validation"], data.validation_max_samples or available["validation"]),
        digest=digest_of("pairs", folder.name, fraction, *sizes),
        validation_digest=digest_of("pairs", held_folder.name, *sizes) if held_config else "",
    )


def _check_lengths(config: RunConfig, folder: Path) -> None:
    """Raise where a text is longer than its place: cut, it would be another text."""
    store = TokenStore.open(folder)
    pairs = pairs_of(store, np.ones(store.num_documents, np.bool_))
    for key, what, lengths, room in (
        ("data.seq_len", "source", pairs.source_tokens, config.data.seq_len),
        ("data.target_len", "target", pairs.target_tokens, config.data.target_tokens()),
    ):
        if (too_long := int((lengths > room).sum())) > 0:
            most, at = int(lengths.max()), int(lengths.argmax()) + 1
            reason = f"{too_long} of {len(lengths)} {what}s are longer, the longest (of pair {at}) has {most} tokens"
            raise ConfigError(key, room, f"use at least {most}, or leave those pairs out", reason)
