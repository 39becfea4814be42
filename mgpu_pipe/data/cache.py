"""Folders of derived data: built once under a lock, committed by a rename, checked by size before use.

A cached folder is complete when its ``manifest.json``, written last, lists every file with its size. Readers take no
lock: a folder appears under its final name only when it is whole.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mgpu_pipe.errors import ConfigError

MANIFEST = "manifest.json"
_UNWRITABLE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST, errno.ENOENT,
    errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip

Progress = Callable[[str, int, int], None]
"""Told ``(stage, done, total)``; ``total`` is 0 where it is not known beforehand."""


def no_progress(stage: str, done: int, total: int) -> None:
    """The progress callback of a caller that gave none."""


def digest_of(*parts: object) -> str:
    """A 16-digit hexadecimal SHA-256 prefix of the JSON form of ``parts``: the name of derived data."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive advisory lock on ``path`` (made if missing); released by the kernel if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def writing_to_cache(cache: Path) -> Iterator[None]:
    """Turn "cannot write here" into one line about ``data.cache_dir``.

    Raises:
        ConfigError: the cache folder cannot be written or its disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        where = f" ({error.filename})" if error.filename else ""
        raise ConfigError(
            "data.cache_dir", cache, "give a folder that can be written and has room, or set MGPU_PIPE_CACHE",
            f"the cache cannot be written: {error.strerror}{where}",
        ) from error


def write_manifest(folder: Path, meta: Mapping[str, Any]) -> None:
    """Flush every file of ``folder`` to disk, then write its manifest: ``meta`` and the size of each file."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        sizes[path.name] = path.stat().st_size
    write_json(folder / MANIFEST, {**meta, "files": sizes})


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a whole folder, or None where it is missing, broken, or a file has another size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, size in manifest["files"].items():
            if (folder / name).stat().st_size != size:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(manifest)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` to ``path`` so that a reader sees the old or the new file, never a part."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def build_once(folder: Path, build: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """The manifest of ``folder``, which ``build`` fills if it is missing or damaged.

    Processes that ask at the same time wait for the first one and share its result.

    Args:
        folder: final name; its siblings ``<name>.lock`` and ``<name>.partial-*`` are used for the work.
        build: writes the files into the empty folder it is given and returns the manifest's entries.
    """
    manifest = read_manifest(folder)
    if manifest is not None:
        return manifest
    with locked(folder.with_name(folder.name + ".lock")):
        manifest = read_manifest(folder)
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
        _flush_folder(folder.parent)
    manifest = read_manifest(folder)
    if manifest is None:
        raise OSError(errno.EIO, "a folder that was just written cannot be read back", str(folder))
    return manifest


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
