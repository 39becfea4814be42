"""Folders of derived data: built once under a lock, committed by a rename, checked before use.

A cached folder is complete when its ``manifest.json``, written last, has its own hash and lists every file with its
size and the hash of each 4 MiB. Readers take no lock: a folder appears under its final name only when it is
whole. Sizes are checked at each use, hashes once a machine and file: ``verified/<host>/`` remembers what was read since
the machine started, by inode, size and times.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.system.local_files import fix_of_writing, flush_folder, replace_file

BLOCK_BYTES = 4 << 20


def block_hash(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()


def hash_blocks(path: Path) -> list[str]:
    """Hashes the blocks of a file, in order; the last block may be short."""
    hashes: list[str] = []
    with open(path, "rb", buffering=0) as file:
        while block := read_block(file.fileno(), len(hashes)):
            hashes.append(block_hash(block))
    return hashes


def read_block(descriptor: int, index: int) -> bytes:
    """Reads a whole block of an open file, even where the kernel returns less; empty after the end."""
    parts: list[bytes] = []
    offset, size = index * BLOCK_BYTES, 0
    while size < BLOCK_BYTES and (part := os.pread(descriptor, BLOCK_BYTES - size, offset + size)):
        parts.append(part)
        size += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_HASH = "sha256"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UNWRITABLE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EFBIG,
}

Progress = Callable[[str, int, int], None]
"""Callback for ``(stage, done, total)``; ``total`` is 0 where it is unknown."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Progress callback that does nothing."""


def digest_of(*parts: object) -> str:
    """Names derived data: the first 16 hexadecimal digits of the SHA-256 of ``parts`` in JSON."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive advisory lock on ``path`` (created if missing); the kernel releases it if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def writing_to_cache(cache: Path) -> Iterator[None]:
    """Turns errors of writing to the cache into a ConfigError about ``data.cache_dir``."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        where = f" ({error.filename})" if error.filename else ""
        fix = fix_of_writing(str(error), "give a folder that can be written and has room, or set MGPU_PIPE_CACHE")
        reason = f"the cache cannot be written: {error.strerror}{where}"
        raise ConfigError("data.cache_dir", cache, fix, reason) from error


@contextmanager
def run_cache(data: DataConfig) -> Iterator[Path]:
    """Yields the run's cache folder, private to the user; raises like :func:`writing_to_cache`."""
    cache = cache_folder(data.cache_dir).absolute()
    with writing_to_cache(cache):
        private_folder(cache)
        yield cache


class EarlierVersion(ValueError):
    """A file of an earlier version, without its own hash."""


def write_manifest(folder: Path, meta: Mapping[str, Any]) -> None:
    """Flushes every file of ``folder`` to disk, then writes the manifest: ``meta``, each file's size and hashes."""
    listed = {}
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        listed[path.name] = {"size": path.stat().st_size, "sha256": hash_blocks(path)}
    write_hashed(folder / MANIFEST, {**meta, "files": listed})
    flush_folder(folder)


def read_manifest(folder: Path, tell: bool = False) -> dict[str, Any] | None:
    """Manifest of a complete folder; None if it or a file is missing or wrong, with a warning if ``tell``."""
    if not folder.exists():
        return None
    try:
        manifest = read_hashed(folder / MANIFEST)
        fault = _fault(folder, manifest["files"])
    except OSError as error:
        fault = f"{error.filename or folder}: cannot be read ({error.strerror})"
    except EarlierVersion:
        fault = f"{folder}: was written by an earlier version"
    except (ValueError, KeyError, TypeError, AttributeError):
        fault = f"{folder / MANIFEST}: is damaged"
    if fault and tell:
        _log.warning("%s; it is prepared again", fault)
    return None if fault else dict(manifest)


def _fault(folder: Path, listed: Mapping[str, Mapping[str, Any]]) -> str:
    """Finds damage of the listed files; compares hashes unless this machine has verified them."""
    for name, file in listed.items():
        size = (folder / name).stat().st_size
        if size != file["size"]:
            return f"{folder / name}: has {size} bytes, its manifest says {file['size']}"
    states = _states(folder, listed)
    if _recall(folder) == states:
        return ""
    for name, file in listed.items():
        for index, (got, wanted) in enumerate(zip(hash_blocks(folder / name), file["sha256"], strict=True)):
            if got != wanted:
                return f"{folder / name}: block {index} of {len(file['sha256'])} (of 4 MiB each) is damaged"
    _remember(folder, states)
    return ""


def _states(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Values that change when a file is written or this machine restarts."""
    states: dict[str, Any] = {"boot": _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""}
    for name in names:
        stat = (folder / name).stat()
        states[name] = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    return states


def _memory(folder: Path) -> Path:
    """File in the cache that records which folders this machine has verified."""
    return folder.parent.parent / "verified" / (os.uname().nodename or "host") / f"{folder.parent.name}-{folder.name}"


def _recall(folder: Path) -> object:
    try:
        return json.loads(_memory(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _remember(folder: Path, states: Mapping[str, Any]) -> None:
    with suppress(OSError):  # a read-only cache is verified each time
        _memory(folder).parent.mkdir(parents=True, exist_ok=True)
        write_json(_memory(folder), states)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes ``value`` to ``path`` atomically."""
    replace_file(path, json.dumps(value, indent=1), flush=True)


def write_hashed(path: Path, value: Mapping[str, Any]) -> None:
    """Writes ``value`` and its hash by :func:`write_json`."""
    write_json(path, {**value, _HASH: _hash_of(value)})


def read_hashed(path: Path) -> dict[str, Any]:
    """Reads a file of :func:`write_hashed`; OSError if it cannot be read, ValueError if its hash is another."""
    value = json.loads(path.read_bytes())
    if isinstance(value, dict) and _HASH not in value:
        raise EarlierVersion(f"{path}: has no hash")
    if not isinstance(value, dict) or value.pop(_HASH) != _hash_of(value):
        raise ValueError(f"{path}: is damaged")
    return value


def _hash_of(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def answer_once(cache: Path, identity: object, ask: Callable[[], bool]) -> bool:
    """Returns the answer to a question about the data of this identity; ``ask`` finds it if the cache has none."""
    folder = cache / "tokens" / f"answer-{digest_of(identity)}"
    try:
        return bool(build_once(folder, lambda out: {"answer": ask()})["answer"])
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        return ask()  # a read-only cache may still hold the data


def build_once(folder: Path, build: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the manifest of ``folder``; ``build`` fills it if it is missing or damaged.

    Concurrent processes wait for the first one and share its result.

    Args:
        folder: final name; its siblings ``<name>.lock`` and ``<name>.partial-*`` are used for the work.
        build: writes the files into an empty folder and returns the manifest's entries.
    """
    manifest = read_manifest(folder)
    if manifest is not None:
        return manifest
    with hold_lock(folder.with_name(folder.name + ".lock")):
        manifest = read_manifest(folder, tell=True)
        if manifest is not None:
            return manifest
        for abandoned in folder.parent.glob(folder.name + ".partial-*"):
            shutil.rmtree(abandoned)
        partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
        partial.mkdir()
        try:
            write_manifest(partial, build(partial))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
        flush_folder(folder.parent)
        listed = read_hashed(folder / MANIFEST)["files"]
        _remember(folder, _states(folder, listed))  # its hashes were just computed
    manifest = read_manifest(folder)
    if manifest is None:
        raise OSError(errno.EIO, "a folder that was just written cannot be read back", str(folder))
    return manifest
