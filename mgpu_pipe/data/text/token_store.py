"""The token store: concatenated documents of a source, memory-mapped, with their offsets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.text.document_encoder import EncodedBatch
from mgpu_pipe.data.text.notes import NOTES, Notes
from mgpu_pipe.errors import DataError

_TOKENS, _MASK = "tokens.bin", "loss_mask.bin"
_OFFSETS, _HASHES, _KEPT = "offsets.npy", "document_hashes.npy", "kept.npy"


@dataclass(frozen=True)
class TokenStore:
    """Tokens of a source on disk."""

    tokens: NDArray[np.unsignedinteger]
    """All tokens, shape ``(tokens,)``; uint16 where the vocabulary allows, else uint32."""
    loss_mask: NDArray[np.uint8] | None
    """1 where a token counts as a label; None where all do."""
    offsets: NDArray[np.int64]
    """Document ``d`` is ``tokens[offsets[d] : offsets[d + 1]]``; shape ``(documents + 1,)``."""
    hashes: NDArray[np.uint64]
    """Hashes that decide the held-out split; shape ``(documents,)``."""
    usable: NDArray[np.bool_] | None = None
    """Which of the source's documents are here, shape ``(documents of the source,)``; None for all."""

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Maps a complete folder (see :func:`mgpu_pipe.data.cache.read_manifest`) into memory."""
        offsets = load_array(folder / _OFFSETS)
        count = int(offsets[-1])
        size = (folder / _TOKENS).stat().st_size
        dtype = np.uint16 if size == 2 * count else np.uint32
        mask = _map(folder / _MASK, np.uint8) if (folder / _MASK).exists() else None
        kept_documents = load_array(folder / _KEPT) if (folder / _KEPT).exists() else None
        return cls(_map(folder / _TOKENS, dtype), mask, offsets, load_array(folder / _HASHES), kept_documents)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, (documents,)."""
        return np.diff(self.offsets)

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


def load_array(path: Path) -> NDArray[Any]:
    """Maps an array file into memory, read-only; refuses pickled content."""
    array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array.view(np.ndarray)


def save_array(path: Path, array: NDArray[Any]) -> None:
    np.save(path, array, allow_pickle=False)


def _map(path: Path, dtype: type[np.unsignedinteger]) -> NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def write_tokens(
    folder: Path, encoded: Iterable[EncodedBatch], meta: Mapping[str, Any], total: int, progress: Progress
) -> dict[str, Any]:
    """Writes a token store into the empty ``folder`` as batches arrive; returns its manifest's entries.

    Memory holds one batch, and 16 bytes a document.

    Args:
        meta: further entries of the manifest, with the source's ``name``.
        total: sum of the batches' ``size``, for the progress; 0 if unknown.

    Raises:
        DataError: there is no document.
    """
    lengths: list[NDArray[np.int64]] = []
    hashes: list[NDArray[np.uint64]] = []
    kept_documents: list[NDArray[np.bool_]] = []
    done = learned = 0
    notes = Notes()
    with open(folder / _TOKENS, "wb") as tokens, open(folder / _MASK, "wb") as mask:
        for batch in encoded:
            tokens.write(batch.tokens.data)
            if batch.loss_mask is not None:
                mask.write(batch.loss_mask.data)
                learned += int((batch.loss_mask & 1).sum())
            lengths.append(batch.lengths)
            hashes.append(batch.hashes)
            kept_documents.append(np.ones(len(batch.lengths), np.bool_) if batch.usable is None else batch.usable)
            done += batch.size
            if batch.notes is not None:
                notes.add(batch.notes)
            progress("tokenise", done, total)
    if not sum(map(len, lengths)):
        raise DataError(f"data.source={meta['name']}: {notes.none_usable() or 'gives no documents'}")
    masked = (folder / _MASK).stat().st_size > 0
    if not masked:
        (folder / _MASK).unlink()
    offsets = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
    save_array(folder / _OFFSETS, offsets)
    save_array(folder / _HASHES, np.concatenate(hashes))
    if not np.concatenate(kept_documents).all():
        save_array(folder / _KEPT, np.concatenate(kept_documents))
    return {
        **meta,
        "documents": len(offsets) - 1,
        "tokens": int(offsets[-1]),
        "learned_tokens": learned if masked else int(offsets[-1]),
        NOTES: notes.as_dict(),
    }
