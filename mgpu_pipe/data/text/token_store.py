"""The token file: all documents of a source one after another, memory-mapped, with their borders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.text.encode import EncodedBatch
from mgpu_pipe.errors import DataError

_TOKENS, _MASK = "tokens.bin", "loss_mask.bin"
_OFFSETS, _HASHES = "offsets.npy", "document_hashes.npy"


@dataclass(frozen=True)
class TokenStore:
    """A source's tokens as they lie on disk."""

    tokens: NDArray[np.unsignedinteger]
    """All tokens, shape ``(tokens,)``; uint16 where the vocabulary allows, else uint32."""
    loss_mask: NDArray[np.uint8] | None
    """1 where a token counts as a label; None where all do."""
    offsets: NDArray[np.int64]
    """Document ``d`` is ``tokens[offsets[d] : offsets[d + 1]]``; shape ``(documents + 1,)``."""
    hashes: NDArray[np.uint64]
    """What the held-out split goes by; shape ``(documents,)``."""

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Map a complete folder (see :func:`mgpu_pipe.data.cache.read_manifest`) into memory."""
        offsets = load_array(folder / _OFFSETS)
        count = int(offsets[-1])
        size = (folder / _TOKENS).stat().st_size
        dtype = np.uint16 if size == 2 * count else np.uint32
        mask = _map(folder / _MASK, np.uint8) if (folder / _MASK).exists() else None
        return cls(_map(folder / _TOKENS, dtype), mask, offsets, load_array(folder / _HASHES))

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


def load_array(path: Path) -> NDArray[Any]:
    """An array file mapped into memory, read-only; pickled content is refused."""
    array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array.view(np.ndarray)


def save_array(path: Path, array: NDArray[Any]) -> None:
    np.save(path, array, allow_pickle=False)


def _map(path: Path, dtype: type[np.unsignedinteger]) -> NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def write_tokens(
    folder: Path, encoded: Iterable[EncodedBatch], meta: Mapping[str, Any], total: int, progress: Progress
) -> dict[str, Any]:
    """Write a token store into the empty ``folder`` as the batches come; returns its manifest's entries.

    Memory holds one batch, and 16 bytes a document.

    Args:
        meta: the manifest's further entries, ``name`` (the source's) among them.
        total: of the batches' ``size``, for the progress; 0 if unknown.

    Raises:
        DataError: there is no document.
    """
    lengths: list[NDArray[np.int64]] = []
    hashes: list[NDArray[np.uint64]] = []
    done = learned = odd = 0
    first_odd = ""
    with open(folder / _TOKENS, "wb") as tokens, open(folder / _MASK, "wb") as mask:
        for batch in encoded:
            tokens.write(batch.tokens.data)
            if batch.loss_mask is not None:
                mask.write(batch.loss_mask.data)
                learned += int((batch.loss_mask & 1).sum())
            lengths.append(batch.lengths)
            hashes.append(batch.hashes)
            done += batch.size
            odd += batch.odd
            first_odd = first_odd or batch.first_odd
            progress("tokenise", done, total)
    if not lengths:
        raise DataError(f"data.source={meta['name']}: gives no documents")
    masked = (folder / _MASK).stat().st_size > 0
    if not masked:
        (folder / _MASK).unlink()
    offsets = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
    save_array(folder / _OFFSETS, offsets)
    save_array(folder / _HASHES, np.concatenate(hashes))
    return {
        **meta,
        "documents": len(offsets) - 1,
        "tokens": int(offsets[-1]),
        "learned_tokens": learned if masked else int(offsets[-1]),
        "odd": odd,
        "first_odd": first_odd,
    }
