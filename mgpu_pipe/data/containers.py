"""Containers by their headers only: members of tar files, boxes of MP4, M4A, HEIC and others, sizes of video files.

Time and memory are bounded by the size of the file.

Python's ``tarfile`` loops forever on a member of negative size (CVE-2025-8194) and recurses for every header that
extends another. This reader refuses a size beyond the file and a chain of such headers.

Formats: POSIX.1-1988 ``ustar``, POSIX.1-2001 ``pax``, and GNU tar's long names and binary numbers
(https://www.gnu.org/software/tar/manual/html_node/Standard.html); boxes: ISO/IEC 14496-12, section 4.2;
Matroska and WebM: RFC 8794 and RFC 9559.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import IO, NamedTuple

BLOCK = 512
LONGEST_HEADER = 1 << 20
"""Largest extension header in bytes: a name, or a list of attributes."""
MOST_HEADERS = 8
"""Most extension headers before one member; programs write at most three."""
_ZERO = bytes(BLOCK)
_FILE, _FOLDER = (b"0", b"\0", b"7"), b"5"
_LONG_NAME, _LONG_LINK, _LOCAL, _GLOBAL = b"L", b"K", (b"x", b"X"), b"g"
_EXTENDING = (_LONG_NAME, _LONG_LINK, *_LOCAL, _GLOBAL)
_RECORD = re.compile(rb"(\d{1,7}) ([^=]+)=")


class BadTarError(Exception):
    """A tar file cannot be read further."""


class TarMember(NamedTuple):
    """A member of a tar file.

    Attributes:
        name: as it is written; bytes that are no UTF-8 are escaped.
        is_file, is_folder: a link, a device or a sparse file is neither.
        offset, size: of its content in the file, in bytes.
        archive: number of the archive in the file, which may hold several, one after another.
    """

    name: str
    is_file: bool
    is_folder: bool
    offset: int
    size: int
    archive: int


def tar_members(file: IO[bytes], size: int) -> Iterator[TarMember]:
    """Yields the members of all archives in a file, without contents; BadTarError at a header that is invalid or leads
    beyond."""
    offset, archive, ended = 0, 0, False
    while offset < size:
        block = _read(file, offset, BLOCK, size)
        if block == _ZERO[: len(block)] and (offset or len(block) == BLOCK):
            offset, ended = offset + BLOCK, True
            continue
        member, offset = _member(file, offset, size, archive + ended)
        archive, ended = member.archive, False
        yield member
    if not ended:
        raise BadTarError(f"breaks off at byte {offset}")


def _member(file: IO[bytes], offset: int, size: int, archive: int) -> tuple[TarMember, int]:
    """Reads the member whose first header begins at ``offset``; returns it and the next one's offset."""
    attributes: dict[str, bytes] = {}
    for _ in range(MOST_HEADERS + 1):
        block = _read(file, offset, BLOCK, size)
        kind, length = _check(block, offset)
        start = offset + BLOCK
        if kind in _EXTENDING:
            if length > LONGEST_HEADER:
                raise BadTarError(f"has a header of {length} bytes at byte {offset}")
            content = _read(file, start, length, size)
            if len(content) < length:
                raise BadTarError(f"breaks off at byte {offset}")
            if kind == _LONG_NAME:
                attributes["path"] = content.partition(b"\0")[0]
            elif kind in _LOCAL:
                attributes.update(_records(content, offset))
            offset = start + _pad(length)
            continue
        if "size" in attributes:
            length = _decimal(attributes["size"], offset)
        name = attributes.get("path", _name(block)).decode(errors="backslashreplace")
        plain = kind in _FILE and not any(key.startswith("GNU.sparse") for key in attributes)
        folder = kind == _FOLDER or (kind == b"\0" and name.endswith("/"))
        length = length if kind in _FILE else 0
        if start + length > size:
            raise BadTarError(f"breaks off at byte {offset}: {name!r} is cut short")
        return TarMember(name, plain and not folder, folder, start, length, archive), start + _pad(length)
    raise BadTarError(f"has more than {MOST_HEADERS} headers for one member at byte {offset}")


def _check(block: bytes, offset: int) -> tuple[bytes, int]:
    """Checks a header; returns its kind and its size field."""
    if len(block) < BLOCK or block == _ZERO:
        raise BadTarError(f"breaks off at byte {offset}")
    stated = _number(block[148:156])
    others = block[:148] + b" " * 8 + block[156:]
    total = sum(others)
    # Some programs sum the bytes as signed numbers.
    if stated not in (total, total - 256 * sum(byte > 127 for byte in others if stated != total)):
        raise BadTarError(
            f"breaks off at byte {offset}: what stands there is no header" if offset else "is no tar file"
        )
    length = _number(block[124:136])
    if length is None or length < 0:
        raise BadTarError(f"has a member of no possible size at byte {offset}")
    return block[156:157], length


def _number(field: bytes) -> int | None:
    """Parses an octal number, or GNU's binary one, which may be negative; None for neither."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    digits = field.partition(b"\0")[0].strip()
    return int(digits or b"0", 8) if re.fullmatch(b"[0-7]*", digits) else None


def _decimal(digits: bytes, offset: int) -> int:
    if not re.fullmatch(rb"\d{1,19}", digits):
        raise BadTarError(f"has a member of no possible size at byte {offset}")
    return int(digits)


def _name(block: bytes) -> bytes:
    name, prefix = block[:100].partition(b"\0")[0], block[345:500].partition(b"\0")[0]
    # GNU tar, whose magic ends in a space, has times instead of the prefix.
    return prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name


def _records(content: bytes, offset: int) -> Iterator[tuple[str, bytes]]:
    """Yields the attributes of a pax header, ``"<length> <key>=<value>\\n"`` each."""
    place = 0
    while place < len(content) and content[place]:
        record = _RECORD.match(content, place)
        end = place + int(record[1]) if record else 0
        if record is None or not record.end() < end <= len(content) or content[end - 1] != 10:
            raise BadTarError(f"has a pax header at byte {offset} that cannot be read")
        yield record[2].decode(errors="backslashreplace"), content[record.end() : end - 1]
        place = end


def _pad(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def _read(file: IO[bytes], offset: int, length: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(max(0, min(length, size - offset)))


BOX_TYPES = (b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"meta", b"free", b"skip", b"wide", b"uuid", b"sidx", b"mfra")
"""Types of outer boxes. Phones and editors of tags append other bytes after the last one."""


def brands_of(head: bytes) -> tuple[bytes, ...]:
    """The major brand, then the compatible ones, by the first bytes of a file; none if it is no file of boxes."""
    if head[4:8] != b"ftyp":
        return ()
    end = min(int.from_bytes(head[:4], "big"), len(head))
    return (head[8:12], *(head[offset : offset + 4] for offset in range(16, end - 3, 4)))


def outer_boxes(file: IO[bytes]) -> Iterator[tuple[bytes, int, int]]:
    """The type of each outer box, and where it begins and ends."""
    start, size = 0, file.seek(0, os.SEEK_END)
    while start + 8 <= size:
        file.seek(start)
        head = file.read(16)
        kind, length = head[4:8], int.from_bytes(head[:4], "big")
        if kind not in BOX_TYPES:
            return
        if length == 1:
            length = int.from_bytes(head[8:16], "big")
        end = start + length if length >= 8 else size  # 0: to the end of the file
        yield kind, start, end
        start = end


_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
UNKNOWN_SIZE = 0x7F000000
"""Programs that write to a pipe state sizes above this (0x7ffff000, 0x80000000, 0xffffffff), or 0."""


def is_cut_short(file: IO[bytes]) -> bool:
    """Whether an outer box, Matroska's segment or an AVI file's first list ends after the end of the file."""
    size, _ = file.seek(0, os.SEEK_END), file.seek(0)
    head = file.read(BLOCK)
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        stated = int.from_bytes(head[4:8], "little")
        return stated < UNKNOWN_SIZE and stated + 8 > size + 1
    if head[:4] == _EBML:
        offset, length = _element_size(head, 4)
        if head[offset + length : offset + length + 4] != _SEGMENT:
            return False
        offset, length = _element_size(head, offset + length + 4)
        return offset + length > size
    return any(end > size for _, _, end in outer_boxes(file))


def _element_size(head: bytes, offset: int) -> tuple[int, int]:
    """Offset of a Matroska element's content, and its length; 0 where it states none."""
    width = 9 - head[offset].bit_length() if offset < len(head) else 1
    length = int.from_bytes(head[offset : offset + width], "big") & ((1 << 7 * width) - 1)
    return offset + width, 0 if length == (1 << 7 * width) - 1 else length
