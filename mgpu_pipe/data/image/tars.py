"""Pictures in tar files as WebDataset writes them: members of one name up to its first dot are a sample. No torch.

A tar file is gone through once. Where each picture lies in it, what it holds and what is said of it are its index,
which the cache keeps by the file's own hash. A picture is read from its place; nothing is unpacked into a folder.

Format: https://github.com/webdataset/webdataset and POSIX.1-2001's ``pax``.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.blocks import BLOCK_BYTES, block_hash
from mgpu_pipe.data.cache import Progress, build_once, digest_of, write_json
from mgpu_pipe.data.fingerprint import Fingerprint, fingerprints, open_data
from mgpu_pipe.data.image.decode import SUFFIXES
from mgpu_pipe.data.listed import Entry, Part
from mgpu_pipe.data.text.labelled_row import label_of
from mgpu_pipe.errors import DataError

TARS = ("image_tar", "captioned_tar")
TOLD = {"label_column": "cls", "caption_column": "txt"}
"""The ending of the member that holds what a column does."""
INDEX = "index.json"
PACK = "pack it again"
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_FORMAT = 1
_LONGEST = 1 << 20
"""Bytes of what is said of a picture."""


class Member(NamedTuple):
    """A regular file in a tar file."""

    sample: str
    ending: str
    offset: int
    size: int

    @property
    def is_picture(self) -> bool:
        return f".{self.ending}" in SUFFIXES


def tar_entries(
    data: DataConfig, patterns: list[str], key: str, told: tuple[str, str], cache: Path, progress: Progress
) -> list[Entry]:
    """The pictures of the tar files that ``patterns`` name, in their order there.

    Args:
        told: the key of ``data`` that names what is said of a picture, and what that is.

    Raises:
        ConfigError: a pattern that matches no file.
        DataError: a file that is no whole tar file, or holds what is no sample.
    """
    found, paths = list[Entry](), files.expand_paths(patterns, key)
    prints, column = fingerprints(paths, cache, progress), str(getattr(data, told[0]))
    for path in paths:
        folder = cache / "tars" / digest_of(_FORMAT, prints[path].digest, column, *told)
        build_once(folder, partial(_build, path, prints[path], column, told))
        rows = json.loads((folder / INDEX).read_text(encoding="utf-8"))["rows"]
        for sample, label, offset, size, blocks in rows:
            found.append(Entry(path, label, f"{path}: {sample}", Part(offset, Fingerprint(size, tuple(blocks)))))
    return found


def check_tars(patterns: list[str], key: str) -> None:
    """Each file begins as a tar file; raises as :func:`tar_entries`."""
    for path in files.expand_paths(patterns, key):
        with open_data(path) as file, _opened(path, file) as tar:
            tar.next()


def _build(path: Path, expected: Fingerprint, column: str, told: tuple[str, str], out: Path) -> dict[str, Any]:
    rows = []
    with open_data(path, expected) as file:
        for sample, members in groupby(_members(path, file, expected.size), lambda member: member.sample):
            origin, parts = f"{path}: {sample}", list(members)
            pictures = [one for one in parts if one.is_picture]
            if len(pictures) != 1:
                raise DataError(f"{origin}: holds {len(pictures)} pictures, not one; {PACK}")
            label = _told(parts, file, column, told, origin)
            raw = _read(file, pictures[0])
            blocks = [block_hash(raw[at : at + BLOCK_BYTES]) for at in range(0, len(raw), BLOCK_BYTES)]
            rows.append([sample, label, pictures[0].offset, pictures[0].size, blocks])
    if not rows:
        raise DataError(f"{path}: holds no sample; {PACK}, or leave it out of the data's paths")
    write_json(out / INDEX, {"rows": rows})
    return {"samples": len(rows)}


def _members(path: Path, file: IO[bytes], size: int) -> Iterator[Member]:
    """The members that have an ending, in order; others belong to no sample."""
    with _opened(path, file) as tar:
        for member in tar:
            origin = f"{path}: {member.name!r}"
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise DataError(f"{origin}: is a link or no plain file; {PACK} without it")
            if member.name.startswith("/") or ".." in member.name.split("/"):
                raise DataError(f"{origin}: leads out of the tar file; {PACK} without it")
            if member.offset_data + member.size > size:
                raise DataError(f"{origin}: is cut short; {files.REPLACE}")
            named = _NAME.fullmatch(member.name)
            if named:
                yield Member(named[1], named[2].lower(), member.offset_data, member.size)
        file.seek(tar.offset)  # a header that cannot be read would pass for the end
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise DataError(f"{path}: breaks off at byte {tar.offset}; {files.REPLACE}")


@contextmanager
def _opened(path: Path, file: IO[bytes]) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            yield tar
    except (tarfile.TarError, ValueError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())[:100]
        raise DataError(f"{path}: is no whole, uncompressed tar file ({reason}); {files.REPLACE}") from error


def _told(parts: list[Member], file: IO[bytes], column: str, told: tuple[str, str], origin: str) -> str:
    by_ending = {one.ending: one for one in parts}
    key, what = told
    member = by_ending.get(TOLD[key]) or by_ending.get("json")
    if member is None:
        raise DataError(f"{origin}: has no member that ends with .{TOLD[key]} or .json; {PACK}")
    if member.size > _LONGEST:
        raise DataError(f"{origin}: its {what} has {member.size} bytes; {PACK}")
    text = files.decode(_read(file, member), origin)
    if member.ending != "json":
        return label_of({column: text.strip()}, column, origin, what)
    row = files.json_row(text, origin, column)
    if column not in row:
        raise files.missing_column(origin, f"data.{key}", column, list(row))
    return label_of(row, column, origin, what)


def _read(file: IO[bytes], member: Member) -> bytes:
    file.seek(member.offset)
    return file.read(member.size)
