"""Writes safetensors files as a stream and reads them by ranges.

The format is https://github.com/huggingface/safetensors#format: eight bytes of little-endian header length, a JSON
header of ``name -> {dtype, shape, data_offsets}``, then the raw little-endian data without holes. The writer takes
bytes and the reader fills them, so this module needs no torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

from mgpu_pipe.checkpoint import file_operations as files
from mgpu_pipe.checkpoint.chunks import CHUNK_BYTES, ChunkedFile, ChunkHasher, FileRecord
from mgpu_pipe.checkpoint.strict_json import as_list, as_object, as_size, as_sizes, as_text, parse
from mgpu_pipe.errors import CheckpointError

ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Size in bytes of one element, by safetensors dtype."""

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

HASHING_THREADS = 2
"""Threads that hash next to the writing thread; with SHA instructions one keeps up with most disks."""

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its name there, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def file_order(entries: Iterable[Entry]) -> list[Entry]:
    """The order of the data in a file: wide elements first, so that each tensor is aligned to its elements."""
    return sorted(entries, key=lambda entry: (-ITEM_BYTES[entry.dtype], entry.name))


def encode_header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file with ``entries`` in this order, padded to a multiple of 8 bytes."""
    header: dict[str, object] = {_METADATA: dict(metadata)}
    position = 0
    for entry in entries:
        end = position + entry.nbytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [position, end]}
        position = end
    if len(header) != len(entries) + 1:
        raise ValueError("two tensors of one file have the same name")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes is above the format's limit of {MAX_HEADER_BYTES}")
    return _LENGTH.pack(len(text)) + text


def write_tensor_file(
    path: Path, entries: Sequence[Entry], metadata: Mapping[str, str], data: Iterable[files.Buffer]
) -> FileRecord:
    """Write a new file as a stream, hash it while writing, and flush it to the disk.

    Args:
        path: the file, which must not exist.
        entries: the tensors, in the order of their data.
        metadata: the header's text-to-text metadata.
        data: the tensors' host bytes in order, split anywhere.

    Raises:
        OSError: the disk is full, the folder cannot be written, ...; the error names the path.
    """
    header, size = encode_header(entries, metadata), sum(entry.nbytes for entry in entries)
    hasher = ChunkHasher(HASHING_THREADS if size > CHUNK_BYTES else 0)
    with files.naming(path):
        descriptor = files.create(path)
        try:
            written = flushed = 0
            for part in _parts(chain((header,), data)):
                hasher.update(part)
                files.write(descriptor, part)
                written += part.nbytes
                del part  # before the next is made
                if written - flushed >= CHUNK_BYTES:
                    files.begin_flush(descriptor, flushed, written - flushed)
                    flushed = written
            files.sync(descriptor)
            record = hasher.record()
            if record.size != len(header) + size:
                raise ValueError(f"{path}: has {record.size - len(header)} bytes of data, its header says {size}")
        finally:
            hasher.close()
            files.close(descriptor)
    return record


def _parts(data: Iterable[files.Buffer]) -> Iterator[memoryview]:
    """The bytes in parts of at most a chunk, so that one is hashed while another is written."""
    for buffer in data:
        rest = memoryview(buffer)
        while rest.nbytes:
            yield rest[:CHUNK_BYTES]
            rest = rest[CHUNK_BYTES:]
        del buffer, rest


@dataclass(frozen=True)
class StoredEntry:
    """A tensor with its absolute ``start`` in the file, in bytes."""

    entry: Entry
    start: int


class TensorFile:
    """A safetensors file for reading ranges, with a checked header.

    Args:
        path: the file.
        expected: hashes to check reads against; None checks nothing.

    Raises:
        CheckpointError: the file is missing or damaged, or its header does not describe it.
    """

    def __init__(self, path: Path, expected: FileRecord | None) -> None:
        self.path = path
        self.data = ChunkedFile(path, expected)
        try:
            self.metadata, self.entries = _read_header(self.data)
        except BaseException:
            self.data.close()
            raise

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from the absolute ``offset`` on."""
        self.data.read_into(offset, target)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.data.close()


def _read_header(file: ChunkedFile) -> tuple[dict[str, str], dict[str, StoredEntry]]:
    where = f"{file.path}: header"
    if file.size < _LENGTH.size:
        raise CheckpointError(f"{file.path}: has {file.size} bytes, too few for a safetensors file")
    length_bytes = bytearray(_LENGTH.size)
    file.read_into(0, memoryview(length_bytes))
    (length,) = _LENGTH.unpack(length_bytes)
    available = file.size - _LENGTH.size
    if length > min(available, MAX_HEADER_BYTES):
        raise CheckpointError(f"{where}: claims {length} bytes of the file's {file.size}")
    text = bytearray(length)
    file.read_into(_LENGTH.size, memoryview(text))
    header = as_object(parse(bytes(text), where), where)
    raw_metadata = as_object(header.pop(_METADATA, {}), f"{where}: {_METADATA}")
    metadata = {name: as_text(value, f"{where}: {_METADATA}") for name, value in raw_metadata.items()}
    spans = [_parse_entry(name, value, f"{where}: {name}") for name, value in header.items()]
    return metadata, _place(spans, _LENGTH.size + length, available - length, where)


def _parse_entry(name: str, value: object, where: str) -> tuple[int, int, Entry]:
    fields = as_object(value, where, ("dtype", "shape", "data_offsets"))
    dtype = as_text(fields["dtype"], where)
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where}: unknown dtype {dtype[:40]!r}")
    entry = Entry(name, dtype, as_sizes(fields["shape"], where))
    offsets = as_list(fields["data_offsets"], where)
    if len(offsets) != 2:
        raise CheckpointError(f"{where}: data_offsets are not a pair")
    begin, end = as_size(offsets[0], where), as_size(offsets[1], where)
    if end - begin != entry.nbytes:
        raise CheckpointError(f"{where}: {end - begin} bytes for {entry.nbytes} of {dtype} {list(entry.shape)}")
    return begin, end, entry


def _place(spans: list[tuple[int, int, Entry]], start: int, size: int, where: str) -> dict[str, StoredEntry]:
    """The entries' places in the file, after a check that they fill its data without overlap or hole."""
    position = 0
    placed: dict[str, StoredEntry] = {}
    for begin, end, entry in sorted(spans, key=lambda span: span[:2]):
        if begin != position:
            fault = "overlaps the tensor before it" if begin < position else "leaves a hole before it"
            raise CheckpointError(f"{where}: {entry.name} {fault}")
        placed[entry.name] = StoredEntry(entry, start + begin)
        position = end
    if position != size:
        raise CheckpointError(f"{where}: describes {position} bytes of data, the file has {size}")
    return placed
