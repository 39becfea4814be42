"""Prepares text before any worker starts: tokenises, splits, packs and caches it.

The cache folder has:

    fingerprints/   hashes of source files, with the sizes and times that show changes
    tokenizers/     tokenizer folders
    tokens/<key>/   one source under one tokenizer: tokens, document borders, loss mask, manifest
    tokens/<key>.packs-<key>/   its training or held-out samples at one length

Every name is a hash of all inputs of the content, so a stale folder is never used; a damaged one is rebuilt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.data_sources import makes_tokens
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.data.bad_samples import LengthLimit, describe_too_long, refuse_too_long, rule_of
from mgpu_pipe.data.cache import Progress, answer_once, build_once, digest_of, no_progress, read_manifest, run_cache
from mgpu_pipe.data.data_source import held_out_data, open_source
from mgpu_pipe.data.model_field import resolve_packing
from mgpu_pipe.data.samples import Prepared, SampleSet, Split, evaluated_samples
from mgpu_pipe.data.text import packing
from mgpu_pipe.data.text.document_encoder import EncoderSpec, token_dtype
from mgpu_pipe.data.text.documents import Source
from mgpu_pipe.data.text.earlier_versions import is_rendered_anew
from mgpu_pipe.data.text.encode_source import encode_all
from mgpu_pipe.data.text.generated import synthetic_batches
from mgpu_pipe.data.text.heldout_split import held_out
from mgpu_pipe.data.text.notes import notes_of, report_bad
from mgpu_pipe.data.text.token_store import TokenStore, load_array, save_array, write_tokens
from mgpu_pipe.data.text.tokenizer import CONVERSATIONS_FORMAT, TokenizerInfo, encoder_spec, resolve_tokenizer
from mgpu_pipe.data.text.tokenizer_folder import token_bytes
from mgpu_pipe.errors import DataError
from mgpu_pipe.system.hardware import cpu_cores

_FORMAT = 1
NAMES = {
    **dict.fromkeys(("chat", "unpaired"), ("a conversation", "conversations")),
    **dict.fromkeys(("pairs", "preferences", "text_groups"), ("a pair", "pairs")),
}
"""Names of one document and of several, by the kind of source."""
PIECES_LOOKED_AT = 1_000_000
"""Pieces that a mean is taken over at most, at even distances, as they are sorted."""


@dataclass(frozen=True)
class SplitFiles:
    """Folders and amounts of one split's samples."""

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
    """Everything a worker needs to load packed text; :func:`prepare` makes it."""

    kind: ClassVar[str] = "packed_text"

    folder: Path
    """Token store of the training documents."""
    tokenizer_folder: Path
    """Folder of tokenizer.json and tokenizer_config.json; ``transformers.AutoTokenizer`` loads it."""
    vocab_size: int
    """The tokenizer's vocabulary size: its largest id plus one. The model's may be larger."""
    eos_token_id: int
    """Token that ends every document and pads a sample."""
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
    """Held-out samples of an evaluation, at most ``data.validation_max_samples``."""
    train_tokens: int
    """Valid tokens of one epoch of training."""
    validation_tokens: int
    """Valid tokens of one evaluation."""
    unigram_perplexity: float | None
    """Perplexity of the evaluated tokens under add-one-smoothed training counts; None where nothing is held out."""
    digest: str
    """Identity of the training data: content, tokenizer, split, sample length and packing."""
    validation_digest: str = ""
    """Identity of separate held-out files; empty where the training data decides the split."""
    validation_bytes: int = 0
    """Bytes of the text of the tokens of an evaluation; 0 where the tokenizer is not byte-level."""
    too_long_samples: int = 0
    on_too_long: str = "split"
    bad_samples: int = 0
    told: str = ""
    """Notices about the conversations (:mod:`mgpu_pipe.data.text.notes`)."""

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

    def evaluated_text(self) -> tuple[int, int]:
        return self.validation_tokens, self.validation_bytes

    def evaluated_samples(self) -> NDArray[np.int64]:
        return evaluated_samples(self.validation.samples if self.validation else 0, self.validation_samples)

    def open(self, config: RunConfig, split: Split) -> SampleSet:
        return self.samples(split)

    def samples(self, split: Split) -> SampleSet:
        from mgpu_pipe.data.text.packed_dataset import PackedDataset

        return PackedDataset.open(self, split)

    def context(self, data: DataConfig) -> float:
        lengths = packing.open_packs(self.train.packs)[0].pieces.length
        some = lengths[:: max(1, len(lengths) // PIECES_LOOKED_AT)].astype(np.float64)
        return float((some**2).sum() / some.sum())

    def is_here(self) -> bool:
        return self.folder.exists()

    def too_long(self, data: DataConfig) -> str:
        what = "conversations" if data.holds_conversations() else "documents"
        limit = f"data.seq_len={self.seq_len}"
        return describe_too_long(self.too_long_samples, what, self.on_too_long, limit)

    def amounts(self) -> list[tuple[int, str]]:
        return [(self.num_documents, "documents"), (self.num_tokens, "tokens"), *self.left_out()]


def prepare(config: RunConfig, progress: Progress | None = None) -> PreparedData:
    """Prepares the data of ``config``, or finds it in the cache.

    Idempotent; concurrent processes, on one machine or a shared file system with locks, do the work once.

    Args:
        progress: called with ``(stage, done, total)``; stages are hash, train tokenizer, tokenise, pack; total 0 means
            unknown.

    Raises:
        ConfigError: a source, path, tokenizer or size that cannot work, or a cache that cannot be written.
        DataError: a file that is missing, empty, broken or not UTF-8; no training sample.
        ModelFolderError: a model folder without a tokenizer, or with a smaller vocabulary.
    """
    report = progress or no_progress
    with run_cache(config.data) as cache:
        opened = OpenedSource.from_config(config, cache, report)
        known = [] if opened.source is None else [(config.data, opened.source)]
        tokenizer = resolve_tokenizer(config.model, config.data, config.objective, known, cache, report)
        return prepare_opened(opened, tokenizer, cache, report)


@dataclass(frozen=True)
class OpenedSource:
    """The source of a run, and a separate source of held-out documents if there is one."""

    config: RunConfig
    source: Source | None
    """None for ``data=synthetic``."""
    held_data: DataConfig | None
    held_source: Source | None

    @classmethod
    def from_config(cls, config: RunConfig, cache: Path, progress: Progress) -> OpenedSource:
        held_config = replace(config, data=held_out_data(config.data)) if config.data.validation_paths else None
        source = None if makes_tokens(config.data.source) else open_source(config, cache, progress)
        held_source = open_source(held_config, cache, progress, "data.validation_paths") if held_config else None
        return cls(config, source, held_config.data if held_config else None, held_source)


def prepare_opened(opened: OpenedSource, tokenizer: TokenizerInfo, cache: Path, progress: Progress) -> PreparedData:
    """Tokenises, splits and packs."""
    config, source, data = opened.config, opened.source, opened.config.data
    packed = resolve_packing(config.model, data, config.objective)
    if source is None:
        folder = _draw(config.seed, data, tokenizer, cache, progress)
    else:
        folder = tokenise(data, source, tokenizer, cache, progress)
    pack = partial(_pack, data, packed, tokenizer=tokenizer, progress=progress)
    train = pack(folder, "train", 0.0 if opened.held_data else data.validation_fraction)
    if not train.samples or not train.valid_tokens:
        long = int((TokenStore.open(folder).lengths > data.seq_len).sum())
        dropped = rule_of(data, data.holds_conversations()) == "drop" and long
        which = f" ({long:,} longer than data.seq_len={data.seq_len} are left out)" if dropped else ""
        raise DataError(
            f"data.source={data.source}: there is nothing to train on: {train.documents} training documents{which} "
            f"give no token to learn; add documents, or lower data.validation_fraction"
        )
    validation: SplitFiles | None = None
    if opened.held_data is not None and opened.held_source is not None:
        held_folder = tokenise(opened.held_data, opened.held_source, tokenizer, cache, progress)
        validation = pack(held_folder, "validation", 1.0)
    elif data.validation_fraction > 0:
        validation = pack(folder, "validation", data.validation_fraction)
    if validation is not None and not validation.valid_tokens:
        validation = None
    return _describe_splits(data, packed, folder, tokenizer, train, validation)


def _describe_splits(
    data: DataConfig,
    packed: str,
    folder: Path,
    tokenizer: TokenizerInfo,
    train: SplitFiles,
    validation: SplitFiles | None,
) -> PreparedData:
    """The prepared data of both splits: where their files lie, and the counts of their samples, tokens and faults."""
    evaluated, perplexity, held_tokens, held_bytes = 0, None, 0, 0
    if validation is not None:
        evaluated = min(validation.samples, data.validation_max_samples or validation.samples)
        chosen = evaluated_samples(validation.samples, evaluated)
        packs, valid = packing.open_packs(validation.packs)
        held_tokens = int(valid[chosen].sum())
        training = load_array(train.packs / "label_counts.npy")
        counts = packing.label_counts(TokenStore.open(validation.tokens), packs, len(training), chosen)
        perplexity = packing.perplexity(training, counts)
        lengths = token_bytes(tokenizer.folder, len(counts))
        held_bytes = 0 if lengths is None else int(counts @ lengths)
    stores = dict.fromkeys((folder, validation.tokens if validation else folder))
    opened = [TokenStore.open(store) for store in stores]
    manifests = [manifest for manifest in map(read_manifest, stores) if manifest]
    notes = notes_of(manifests)
    return PreparedData(
        folder=folder,
        tokenizer_folder=tokenizer.folder,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        seq_len=data.seq_len,
        packing=packed,
        train=train,
        validation=validation,
        num_documents=sum(manifest["documents"] for manifest in manifests),
        num_tokens=sum(manifest["tokens"] for manifest in manifests),
        train_samples=train.samples,
        validation_samples=evaluated,
        train_tokens=train.valid_tokens,
        validation_tokens=held_tokens,
        validation_bytes=held_bytes,
        unigram_perplexity=perplexity,
        digest=digest_of(train.packs.name),
        too_long_samples=sum(int((store.lengths > data.seq_len).sum()) for store in opened),
        on_too_long=rule_of(data, data.holds_conversations()),
        bad_samples=notes.bad,
        told=notes.summary(),
        validation_digest=digest_of(validation.packs.name) if validation and validation.tokens != folder else "",
    )


def tokenise(
    data: DataConfig,
    source: Source,
    tokenizer: TokenizerInfo,
    cache: Path,
    progress: Progress,
    places: tuple[str, ...] = (),
    placeholders: tuple[str, ...] = (),
) -> Path:
    """Builds or finds the folder of the source's tokens; see :func:`encoder_spec`."""
    spec = encoder_spec(data, tokenizer, source, places, placeholders)
    identity = {"source": source.identity, "tokenizer": tokenizer.digest, "format": _FORMAT}
    if spec.chat_template is not None:
        identity["conversations"] = CONVERSATIONS_FORMAT
        if answer_once(cache, ["rendered anew", identity], lambda: _is_rendered_anew(spec, source)):
            identity["rendered"] = "anew"
    folder = cache / "tokens" / digest_of(identity)
    configured = data.tokenize_workers
    workers = 1 if source.kind == "tokens" else cpu_cores() if configured == "auto" else configured
    manifest = build_once(
        folder,
        lambda out: write_tokens(
            out, encode_all(spec, source.documents(), workers), {"name": source.name, **identity}, source.size, progress
        ),
    )
    report_bad(manifest, data.on_bad_sample, NAMES.get(source.kind, ("a document", "documents")))
    return folder


def _is_rendered_anew(spec: EncoderSpec, source: Source) -> bool:
    template = spec.template()
    lines = (document.text for document in source.documents() if document.fault is None)
    return template is not None and is_rendered_anew(template, lines, spec.messages_column)


def _draw(seed: int, data: DataConfig, tokenizer: TokenizerInfo, cache: Path, progress: Progress) -> Path:
    shape = data.synthetic
    identity = {"source": ["synthetic", asdict(shape), seed], "tokenizer": tokenizer.digest, "format": _FORMAT}
    folder = cache / "tokens" / digest_of(identity)
    dtype = token_dtype(tokenizer.vocab_size)
    batches = synthetic_batches(shape, seed, tokenizer.vocab_size, tokenizer.eos_token_id, dtype)
    build_once(
        folder, lambda out: write_tokens(out, batches, {"name": "synthetic", **identity}, shape.num_documents, progress)
    )
    return folder


def _pack(
    data: DataConfig,
    packed: str,
    tokens: Path,
    split: Split,
    fraction: float,
    tokenizer: TokenizerInfo,
    progress: Progress,
) -> SplitFiles:
    """Packs the samples of one split, the held-out share ``fraction`` of documents or the rest; 1 holds out all."""
    store = TokenStore.open(tokens)
    masked, long = store.loss_mask is not None, bool((store.lengths > data.seq_len).any())
    rule = rule_of(data, data.holds_conversations())
    if rule == "refuse":
        what = "conversations" if data.holds_conversations() else "documents"
        refuse_too_long(LengthLimit("data.seq_len", data.seq_len, what), store.lengths)
    # If all documents fit, or plain text is split, the rule adds nothing to the name, as in earlier versions.
    ruled = [rule] if long and (masked or rule != "split") else []
    key = digest_of(_FORMAT, split, fraction, data.seq_len, packed, *ruled)
    folder = tokens.with_name(f"{tokens.name}.packs-{key}")

    def build(out: Path) -> dict[str, Any]:
        progress("pack", 0, 1)
        chosen = np.ones(store.num_documents, np.bool_) if fraction == 1 else held_out(store.hashes, fraction)
        if split == "train":
            chosen = ~chosen
        documents = np.flatnonzero(chosen)
        start = store.offsets[documents]
        length = store.offsets[documents + 1] - start
        packs = packing.pack(start, length, data.seq_len, packed, rule, store.loss_mask)
        valid = packing.valid_tokens(packs, store.loss_mask)
        for name, array in (
            ("offsets", packs.offsets),
            ("start", packs.pieces.start),
            ("length", packs.pieces.length),
            ("continues", packs.pieces.continues),
            ("valid_tokens", valid),
        ):
            save_array(out / f"{name}.npy", array)
        if split == "train":
            counts = packing.label_counts(store, packs, tokenizer.vocab_size)
            save_array(out / "label_counts.npy", counts)
        progress("pack", 1, 1)
        filled = int(packs.pieces.length.sum())
        return {
            "split": split,
            "documents": len(documents),
            "samples": packs.num_samples,
            "valid_tokens": int(valid.sum()),
            "filled": filled / max(packs.num_samples * data.seq_len, 1),
        }

    manifest = build_once(folder, build)
    return SplitFiles(tokens, folder, manifest["documents"], manifest["samples"], manifest["valid_tokens"])
