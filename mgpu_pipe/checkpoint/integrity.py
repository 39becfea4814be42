"""Is a step's folder whole? Torch-free, so that the launcher can ask."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from mgpu_pipe.checkpoint import files
from mgpu_pipe.checkpoint.chunks import ChunkedFile, FileRecord, check_bytes, size_fault
from mgpu_pipe.checkpoint.layout import FORMAT_VERSION, STATE
from mgpu_pipe.checkpoint.manifest import Manifest, read_manifest
from mgpu_pipe.checkpoint.strict_json import as_object, parse
from mgpu_pipe.errors import CheckpointError

Verify = Literal["full", "size", "off"]

MAX_SMALL_FILE_BYTES = 64 * 1024 * 1024
"""Limit of state.json and config.yaml, which are read whole."""

_MAX_HASHING_THREADS = 8


def check_folder(folder: Path, verify: Verify) -> Manifest:
    """Check a step's folder as a whole.

    Args:
        verify: ``full``: every chunk of every file has its hash; ``size``: every file is there with its size;
            ``off``: the manifest alone is valid.

    Raises:
        CheckpointError: names the file and, with ``full``, the chunk.
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
    """Threads that read and hash files beside one another; hashlib releases the interpreter's lock while it works."""
    return ThreadPoolExecutor(min(_MAX_HASHING_THREADS, os.cpu_count() or 1), thread_name_prefix="checkpoint-hash")


def _check_file(path: Path, record: FileRecord) -> None:
    with ChunkedFile(path, record) as file:
        file.check()


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Every file of the manifest is there, a plain file, and of its size.

    Raises:
        CheckpointError: the first that is not.
    """
    for name, record in sorted(manifest.files.items()):
        descriptor, size = files.open_regular(folder / name)
        os.close(descriptor)
        if size != record.size:
            raise CheckpointError(size_fault(folder / name, size, record))


def read_small_file(folder: Path, name: str, manifest: Manifest, verify: Verify) -> bytes:
    """The bytes of state.json or config.yaml, checked as ``verify`` says."""
    data = files.read_file(folder / name, MAX_SMALL_FILE_BYTES)
    if verify == "full":
        check_bytes(data, manifest.files[name], folder / name)
    return data


def read_state(folder: Path, manifest: Manifest, verify: Verify) -> dict[str, Any]:
    """The content of state.json.

    Raises:
        CheckpointError: it is damaged, of another format version, or of another step than the manifest.
    """
    where = str(folder / STATE)
    state = as_object(parse(read_small_file(folder, STATE, manifest, verify), where), where)
    for key, expected in (("format_version", FORMAT_VERSION), ("step", manifest.step)):
        if state.get(key) != expected:
            raise CheckpointError(f"{where}: {key} is {state.get(key)!r}, the manifest says {expected}")
    return state
