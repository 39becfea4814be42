"""``manifest.json``: contents and hashes of a checkpoint, written last and read first.

A folder without a valid manifest is not a checkpoint. The parser treats the manifest as hostile: no name may lead
outside the folder, and the tensor slices must tile their tensors before any byte is read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from mgpu_pipe.checkpoint import file_operations as files
from mgpu_pipe.checkpoint.chunks import CHUNK_BYTES, ChunkedFile, FileRecord, check_bytes, size_fault
from mgpu_pipe.checkpoint.layout import CONFIG, FORMAT_VERSION, KINDS, MANIFEST, STATE
from mgpu_pipe.checkpoint.strict_json import as_list, as_object, as_size, as_sizes, as_text, canonical, parse
from mgpu_pipe.checkpoint.tensor_file import ITEM_BYTES
from mgpu_pipe.checkpoint.tensor_slices import TensorSlice, tiling_fault
from mgpu_pipe.errors import CheckpointError

MAX_MANIFEST_BYTES = 1 << 30
"""Limit far above real manifests, which have about 100 bytes per tensor slice."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_HASH = re.compile(r"[0-9a-f]{64}")
_KEYS = ("format_version", "step", "tensors", "files", "root")


class OtherFormatError(CheckpointError):
    """The checkpoint is undamaged, but another version of this program wrote it."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's unsharded shape, its safetensors dtype, and the file of each of its tensor slices."""

    shape: tuple[int, ...]
    dtype: str
    tensor_slices: tuple[tuple[TensorSlice, str], ...]


@dataclass(frozen=True)
class Manifest:
    """The content of a committed checkpoint: ``tensors[kind][name]`` and ``files[file name]``."""

    step: int
    tensors: Mapping[str, Mapping[str, StoredTensor]]
    files: Mapping[str, FileRecord]

    def encode(self) -> bytes:
        """The manifest's bytes, with the root hash over the other fields."""
        body = self._body()
        return canonical({**body, "root": _root_hash(body)})

    @property
    def root(self) -> str:
        """SHA-256 over the whole content; checkpoints with equal roots are equal."""
        return _root_hash(self._body())

    def _body(self) -> dict[str, object]:
        return {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "tensors": {
                kind: {
                    name: {
                        "shape": list(tensor.shape),
                        "dtype": tensor.dtype,
                        "boxes": [
                            [list(tensor_slice.offsets), list(tensor_slice.shape), file]
                            for tensor_slice, file in tensor.tensor_slices
                        ],
                    }
                    for name, tensor in tensors.items()
                }
                for kind, tensors in self.tensors.items()
            },
            "files": {
                name: {"size": record.size, "sha256": list(record.sha256)} for name, record in self.files.items()
            },
        }


def _root_hash(body: Mapping[str, object]) -> str:
    return hashlib.sha256(canonical(body)).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a step's folder; CheckpointError if it is missing, changed or contradictory."""
    path = folder / MANIFEST
    if not path.is_symlink() and not path.exists():
        raise CheckpointError(f"{folder}: is not a checkpoint: it has no {MANIFEST}")
    return parse_manifest(files.read_file(path, MAX_MANIFEST_BYTES), str(path))


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in ``data``; ``where`` names it in errors.

    Raises:
        OtherFormatError: another version of this program wrote it.
        CheckpointError: something is missing, unknown, of a wrong type, unsafe or contradictory.
    """
    value = as_object(parse(data, where), where)
    version = value.get("format_version")
    root = as_text(value.pop("root", ""), f"{where}: root")
    unchanged = root == _root_hash(value)
    if type(version) is not int or version != FORMAT_VERSION:
        kind = OtherFormatError if unchanged else CheckpointError
        raise kind(f"{where}: format version {version!r}; this program reads version {FORMAT_VERSION}")
    as_object(value, where, _KEYS[:-1])
    if not unchanged:
        raise CheckpointError(f"{where}: its root hash differs, so the file changed after the save")
    records = {
        _safe_name(name, where): _parse_record(record, f"{where}: files: {name}")
        for name, record in as_object(value["files"], f"{where}: files").items()
    }
    for required in (STATE, CONFIG):
        if required not in records:
            raise CheckpointError(f"{where}: lists no {required}")
    kinds = as_object(value["tensors"], f"{where}: tensors", KINDS)
    tensors = {
        kind: {
            name: _parse_tensor(name, tensor, records, f"{where}: {kind}: {name}")
            for name, tensor in as_object(kinds[kind], f"{where}: {kind}").items()
        }
        for kind in KINDS
    }
    _check_room(tensors, records, where)
    return Manifest(as_size(value["step"], f"{where}: step"), tensors, records)


def _check_room(
    tensors: Mapping[str, Mapping[str, StoredTensor]], records: Mapping[str, FileRecord], where: str
) -> None:
    """Refuse slices that do not fit into their files, before memory is allocated for them."""
    needed: dict[str, int] = {}
    for tensor in (tensor for named in tensors.values() for tensor in named.values()):
        for tensor_slice, file in tensor.tensor_slices:
            needed[file] = needed.get(file, 0) + prod(tensor_slice.shape) * ITEM_BYTES[tensor.dtype]
    for file, size in needed.items():
        if size > records[file].size:
            raise CheckpointError(f"{where}: puts {size:,} bytes into {file}, which has {records[file].size:,}")


def _safe_name(name: str, where: str) -> str:
    if not _SAFE_NAME.fullmatch(name) or name == MANIFEST:
        raise CheckpointError(f"{where}: lists the file {name[:80]!r}, which is not a file name in this folder")
    return name


def _parse_record(value: object, where: str) -> FileRecord:
    fields = as_object(value, where, ("size", "sha256"))
    size = as_size(fields["size"], where)
    hashes = tuple(as_text(item, where) for item in as_list(fields["sha256"], where))
    if not all(_HASH.fullmatch(item) for item in hashes):
        raise CheckpointError(f"{where}: has a hash that is not SHA-256")
    if len(hashes) != -(-size // CHUNK_BYTES):
        raise CheckpointError(f"{where}: has {len(hashes)} chunk hashes for {size} bytes")
    return FileRecord(size, hashes)


def _parse_tensor(name: str, value: Any, records: Mapping[str, FileRecord], where: str) -> StoredTensor:
    fields = as_object(value, where, ("shape", "dtype", "boxes"))
    shape = as_sizes(fields["shape"], where)
    dtype = as_text(fields["dtype"], where)
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where}: unknown dtype {dtype[:40]!r}")
    tensor_slices: list[tuple[TensorSlice, str]] = []
    for item in as_list(fields["boxes"], where):
        parts = as_list(item, where)
        if len(parts) != 3:
            raise CheckpointError(f"{where}: has a slice that is not [offsets, shape, file]")
        file = as_text(parts[2], where)
        if file not in records or file in (STATE, CONFIG):
            raise CheckpointError(f"{where}: lies in {file[:80]!r}, which is not a tensor file of this checkpoint")
        tensor_slices.append((TensorSlice(name, as_sizes(parts[0], where), as_sizes(parts[1], where)), file))
    fault = tiling_fault(shape, [tensor_slice for tensor_slice, _ in tensor_slices])
    if fault:
        raise CheckpointError(f"{where}: {fault}")
    return StoredTensor(shape, dtype, tuple(tensor_slices))


Verify = Literal["full", "size", "off"]

MAX_SMALL_FILE_BYTES = 64 * 1024 * 1024
"""Limit in bytes of state.json and config.yaml, which are read whole."""

_MAX_HASHING_THREADS = 8


def check_folder(folder: Path, verify: Verify) -> Manifest:
    """Check a step's folder as a whole.

    Args:
        verify: ``full`` checks the hash of every chunk of every file; ``size`` checks that every file exists with its
            size; ``off`` checks only the manifest.

    Raises:
        CheckpointError: a check fails; the error names the file and, with ``full``, the chunk.
    """
    manifest = read_manifest(folder)
    if verify == "full":
        with hashing_pool() as pool:
            for _ in pool.map(lambda item: _check_file(folder / item[0], item[1]), sorted(manifest.files.items())):
                pass
    elif verify == "size":
        check_sizes(folder, manifest)
    return manifest


def hashing_pool() -> ThreadPoolExecutor:
    """Threads that read and hash files in parallel; hashlib releases the GIL."""
    return ThreadPoolExecutor(min(_MAX_HASHING_THREADS, os.cpu_count() or 1), thread_name_prefix="checkpoint-hash")


def _check_file(path: Path, record: FileRecord) -> None:
    with ChunkedFile(path, record) as file:
        file.check()


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError for the first file of the manifest that is no plain file of the recorded size."""
    for name, record in sorted(manifest.files.items()):
        descriptor, size = files.open_regular(folder / name)
        os.close(descriptor)
        if size != record.size:
            raise CheckpointError(size_fault(folder / name, size, record))


def read_small_file(folder: Path, name: str, manifest: Manifest, verify: Verify) -> bytes:
    """The bytes of state.json or config.yaml; ``verify="full"`` checks their hash."""
    data = files.read_file(folder / name, MAX_SMALL_FILE_BYTES)
    if verify == "full":
        check_bytes(data, manifest.files[name], folder / name)
    return data


def read_state(folder: Path, manifest: Manifest, verify: Verify) -> dict[str, Any]:
    """The content of state.json; CheckpointError if it is damaged, or of another format version or step."""
    where = str(folder / STATE)
    state = as_object(parse(read_small_file(folder, STATE, manifest, verify), where), where)
    for key, expected in (("format_version", FORMAT_VERSION), ("step", manifest.step)):
        if state.get(key) != expected:
            raise CheckpointError(f"{where}: {key} is {state.get(key)!r}, the manifest says {expected}")
    return state
