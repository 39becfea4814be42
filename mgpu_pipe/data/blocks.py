"""SHA-256 of every 4 MiB of a file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

BLOCK_BYTES = 4 << 20


def block_hash(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()


def hash_blocks(path: Path) -> list[str]:
    """The hash of each block of a file, in order; the last block may be short."""
    hashes: list[str] = []
    with open(path, "rb", buffering=0) as file:
        while block := read_block(file.fileno(), len(hashes)):
            hashes.append(block_hash(block))
    return hashes


def read_block(descriptor: int, index: int) -> bytes:
    """A block of an open file, whole also where the kernel gives less than was asked for; empty behind the end."""
    parts: list[bytes] = []
    offset, size = index * BLOCK_BYTES, 0
    while size < BLOCK_BYTES and (part := os.pread(descriptor, BLOCK_BYTES - size, offset + size)):
        parts.append(part)
        size += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
