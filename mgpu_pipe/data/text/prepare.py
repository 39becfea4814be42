"""Data made ready before any worker starts: tokenised, split, packed, cached. Imports neither torch nor transformers.

In the cache folder:

    fingerprints/   hashes of source files, with the size and times by which they are known to be unchanged
    tokenizers/     tokenizer folders
    tokens/<key>/   one source under one tokenizer: tokens, document borders, loss mask, manifest
    tokens/<key>.packs-<key>/   its training or held-out samples at one length

Every name is a hash of what the content depends on, so a stale folder is never taken; a damaged one is rebuilt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.hardware import cpu_cores
from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import Progress, build_once, digest_of, no_progress, read_manifest, writing_to_cache
from mgpu_pipe.data.samples import Prepared, SampleSet, Split, evaluated_samples
from mgpu_pipe.data.text import packing, unigram
from mgpu_pipe.data.text.documents import Source
from mgpu_pipe.data.text.encode import encode_all, token_dtype
from mgpu_pipe.data.text.sources import open_source, validation_source_config
from mgpu_pipe.data.text.split import held_out
from mgpu_pipe.data.text.synthetic import synthetic_batches
from mgpu_pipe.data.text.token_store import TokenStore, load_array, save_array, write_tokens
from mgpu_pipe.data.text.tokenizer import TokenizerInfo, encoder_spec, resolve_tokenizer
from mgpu_pipe.errors import DataError

_FORMAT = 1
PIECES_LOOKED_AT = 1_000_000
"""Of all that a mean is taken over; they lie sorted, so every so many are."""


@dataclass(frozen=True)
class SplitFiles:
    """Where one split's samples lie."""

    tokens: Path
    """Folder of the token store."""
    packs: Path
    """Folder of the packs over it."""
    documents: int
    samples: int
    valid_tokens: int
    """Labels that count, over all samples."""


@dataclass(frozen=True)
class PreparedData(Prepared):
    """All that a worker needs to load batches of packed text; made by :func:`prepare`."""

    kind: ClassVar[str] = "packed_text"

    folder: Path
    """The training documents' token store."""
    tokenizer_folder: Path
    """Holds tokenizer.json and tokenizer_config.json; ``transformers.AutoTokenizer`` loads it."""
    vocab_size: int
    """The tokenizer's: its largest id plus one. The model's may be larger."""
    eos_token_id: int
    """Ends every document, and fills the rest of a sample."""
    seq_len: int
    packing: str
    train: SplitFiles
    validation: SplitFiles | None
    """None where nothing is held out."""
    num_documents: int
    """Documents of both splits."""
    num_tokens: int
    """Tokens of both splits, end-of-sequence tokens included."""
    train_samples: int
    validation_samples: int
    """Held-out samples that an evaluation takes, ``data.validation_max_samples`` respected."""
    train_tokens: int
    """Valid tokens of one epoch of training."""
    validation_tokens: int
    """Valid tokens of one evaluation."""
    unigram_perplexity: float | None
    """Of the evaluated tokens, under add-one-smoothed training counts; None where nothing is held out."""
    digest: str
    """Identity of the training data: content, tokenizer, split, sample length and packing."""
    validation_digest: str = ""
    """The same of held-out files of their own; empty where what is held out follows from the training data."""
    told: str = ""
    """Of conversations: the first of which something is left out, or whose turns are odd, and how many there are."""

    def as_dict(self) -> dict[str, Any]:
        """A form that JSON holds; :meth:`from_dict` reads it."""
        plain: dict[str, Any] = _plain(asdict(self))
        return {"kind": self.kind, **plain}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> PreparedData:
        fields = {name: entry for name, entry in value.items() if name != "kind"}
        for name in ("folder", "tokenizer_folder"):
            fields[name] = Path(fields[name])
        for name in ("train", "validation"):
            if fields[name] is not None:
                split = dict(fields[name])
                fields[name] = SplitFiles(**{**split, "tokens": Path(split["tokens"]), "packs": Path(split["packs"])})
        return cls(**fields)

    def evaluated_samples(self) -> NDArray[np.int64]:
        return evaluated_samples(self.validation.samples if self.validation else 0, self.validation_samples)

    def open(self, config: RunConfig, split: Split) -> SampleSet:
        from mgpu_pipe.data.text.packed_dataset import PackedDataset

        return PackedDataset.open(self, split)

    def context(self, config: RunConfig) -> float:
        lengths = packing.open_packs(self.train.packs)[0].pieces.length
        some = lengths[:: max(1, len(lengths) // PIECES_LOOKED_AT)].astype(np.float64)
        return float((some**2).sum() / some.sum())

    def is_here(self) -> bool:
        return self.folder.exists()

    def amounts(self) -> list[tuple[int, str]]:
        return [(self.num_documents, "documents"), (self.num_tokens, "tokens")]


def prepare(config: RunConfig, progress: Progress | None = None) -> PreparedData:
    """Make the data of ``config`` ready, or find it ready.

    Idempotent; processes that call it at once, on one machine or a shared file system with locks, do the work once.

    Args:
        progress: told ``(stage, done, total)`` with stages hash, train tokenizer, tokenise, pack; total 0 is unknown.

    Raises:
        ConfigError: a source, path, tokenizer or size that cannot work, or a cache that cannot be written.
        DataError: a file that is missing, empty, broken or not UTF-8; no training sample.
        ModelFolderError: a model folder without a tokenizer, or with a smaller vocabulary.
    """
    cache = cache_folder(config.data.cache_dir).absolute()
    told = progress or no_progress
    with writing_to_cache(cache):
        private_folder(cache)
        opened = Opened.of(config, cache, told)
        known = [] if opened.source is None else [(config, opened.source)]
        return prepare_opened(opened, resolve_tokenizer(config, known, cache, told), cache, told)


@dataclass(frozen=True)
class Opened:
    """A run's source, and that of its held-out documents where they have one of their own."""

    config: RunConfig
    source: Source | None
    """None: ``data=synthetic``."""
    held_config: RunConfig | None
    held_source: Source | None

    @classmethod
    def of(cls, config: RunConfig, cache: Path, progress: Progress) -> Opened:
        held = validation_source_config(config) if config.data.validation_paths else None
        source = None if config.data.source == "synthetic" else open_source(config, cache, progress)
        held_source = open_source(held, cache, progress, "data.validation_paths") if held else None
        return cls(config, source, held, held_source)


def prepare_opened(opened: Opened, tokenizer: TokenizerInfo, cache: Path, progress: Progress) -> PreparedData:
    """Tokenise, split and pack."""
    config, held_config, held_source = opened.config, opened.held_config, opened.held_source
    data, source = config.data, opened.source
    folder = tokenise(config, source, tokenizer, cache, progress)
    train = _pack(config, folder, "train", 0.0 if held_config else data.validation_fraction, tokenizer, progress)
    if not train.samples or not train.valid_tokens:
        raise DataError(
            f"data.source={data.source}: there is nothing to train on: {train.documents} training "
            f"documents give no token to learn; add documents, or lower data.validation_fraction"
        )
    validation: SplitFiles | None = None
    if held_config is not None:
        held_folder = tokenise(held_config, held_source, tokenizer, cache, progress)
        validation = _pack(config, held_folder, "validation", 1.0, tokenizer, progress)
    elif data.validation_fraction > 0:
        validation = _pack(config, folder, "validation", data.validation_fraction, tokenizer, progress)
    if validation is not None and not validation.valid_tokens:
        validation = None
    return _summary(config, folder, tokenizer, train, validation)


def _summary(
    config: RunConfig, folder: Path, tokenizer: TokenizerInfo, train: SplitFiles, validation: SplitFiles | None
) -> PreparedData:
    evaluated, perplexity, held_tokens = 0, None, 0
    if validation is not None:
        evaluated = min(validation.samples, config.data.validation_max_samples or validation.samples)
        chosen = evaluated_samples(validation.samples, evaluated)
        packs, counted = packing.open_packs(validation.packs)
        held_tokens = int(counted[chosen].sum())
        perplexity = unigram.perplexity(
            load_array(train.packs / "label_counts.npy"), TokenStore.open(validation.tokens), packs, chosen
        )
    stores = {folder, validation.tokens if validation else folder}
    manifests = [manifest for manifest in map(read_manifest, stores) if manifest]
    return PreparedData(
        folder=folder,
        tokenizer_folder=tokenizer.folder,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        seq_len=config.data.seq_len,
        packing=config.data.packing,
        train=train,
        validation=validation,
        num_documents=sum(manifest["documents"] for manifest in manifests),
        num_tokens=sum(manifest["tokens"] for manifest in manifests),
        train_samples=train.samples,
        validation_samples=evaluated,
        train_tokens=train.valid_tokens,
        validation_tokens=held_tokens,
        unigram_perplexity=perplexity,
        digest=digest_of(train.packs.name),
        told=next((_told(manifest) for manifest in manifests if manifest.get("odd")), ""),
        validation_digest=digest_of(validation.packs.name) if validation and validation.tokens != folder else "",
    )


def _told(manifest: Mapping[str, Any]) -> str:
    others = int(manifest["odd"]) - 1
    return f"{manifest['first_odd']}{f'; {others:,} more conversations are odd' if others else ''}"


def tokenise(
    config: RunConfig, source: Source | None, tokenizer: TokenizerInfo, cache: Path, progress: Progress
) -> Path:
    """The folder of the source's tokens, made if it is not there."""
    if source is None:
        return _draw(config, tokenizer, cache, progress)
    spec = encoder_spec(config, tokenizer, source)
    identity = {"source": source.identity, "tokenizer": tokenizer.digest, "format": _FORMAT}
    folder = cache / "tokens" / digest_of(identity)
    asked = config.data.tokenize_workers
    workers = 1 if source.kind == "tokens" else cpu_cores() if asked == "auto" else asked
    build_once(
        folder,
        lambda out: write_tokens(
            out, encode_all(spec, source.documents(), workers), {"name": source.name, **identity}, source.size, progress
        ),
    )
    return folder


def _draw(config: RunConfig, tokenizer: TokenizerInfo, cache: Path, progress: Progress) -> Path:
    shape = config.data.synthetic
    identity = {"source": ["synthetic", asdict(shape), config.seed], "tokenizer": tokenizer.digest, "format": _FORMAT}
    folder = cache / "tokens" / digest_of(identity)
    dtype = token_dtype(tokenizer.vocab_size)
    drawn = synthetic_batches(shape, config.seed, tokenizer.vocab_size, tokenizer.eos_token_id, dtype)
    build_once(
        folder, lambda out: write_tokens(out, drawn, {"name": "synthetic", **identity}, shape.num_documents, progress)
    )
    return folder


def _pack(
    config: RunConfig, tokens: Path, split: Split, fraction: float, tokenizer: TokenizerInfo, progress: Progress
) -> SplitFiles:
    """The samples of one split: of ``fraction`` the held-out documents, or the others; 1 holds out all."""
    data = config.data
    key = digest_of(_FORMAT, split, fraction, data.seq_len, data.packing)
    folder = tokens.with_name(f"{tokens.name}.packs-{key}")

    def build(out: Path) -> dict[str, Any]:
        progress("pack", 0, 1)
        store = TokenStore.open(tokens)
        chosen = np.ones(store.num_documents, np.bool_) if fraction == 1 else held_out(store.hashes, fraction)
        if split == "train":
            chosen = ~chosen
        documents = np.flatnonzero(chosen)
        start = store.offsets[documents]
        length = store.offsets[documents + 1] - start
        packs = packing.pack(start, length, data.seq_len, data.packing)
        counted = packing.valid_tokens(packs, store.loss_mask)
        for name, array in (
            ("offsets", packs.offsets),
            ("start", packs.pieces.start),
            ("length", packs.pieces.length),
            ("continues", packs.pieces.continues),
            ("valid_tokens", counted),
        ):
            save_array(out / f"{name}.npy", array)
        if split == "train":
            counts = unigram.label_counts(store, packs, tokenizer.vocab_size)
            save_array(out / "label_counts.npy", counts)
        progress("pack", 1, 1)
        filled = int(packs.pieces.length.sum())
        return {
            "split": split,
            "documents": len(documents),
            "samples": packs.num_samples,
            "valid_tokens": int(counted.sum()),
            "filled": filled / max(packs.num_samples * data.seq_len, 1),
        }

    manifest = build_once(folder, build)
    return SplitFiles(tokens, folder, manifest["documents"], manifest["samples"], manifest["valid_tokens"])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return str(value) if isinstance(value, Path) else value
