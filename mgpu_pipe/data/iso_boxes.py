"""Files of boxes: MP4, M4A, HEIC and others (ISO/IEC 14496-12, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterator

TYPES = (b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"meta", b"free", b"skip", b"wide", b"uuid", b"sidx", b"mfra")
"""Types of outer boxes. What else stands after the last one was appended, as by phones and editors of tags."""


def brands_of(head: bytes) -> tuple[bytes, ...]:
    """The major brand, then the compatible ones, by the first bytes of a file; none if it is no file of boxes."""
    if head[4:8] != b"ftyp":
        return ()
    end = min(int.from_bytes(head[:4], "big"), len(head))
    return (head[8:12], *(head[offset : offset + 4] for offset in range(16, end - 3, 4)))


def outer_boxes(raw: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The type of each outer box, and where it begins and ends."""
    start = 0
    while start + 8 <= len(raw):
        kind, size = raw[start + 4 : start + 8], int.from_bytes(raw[start : start + 4], "big")
        if kind not in TYPES:
            return
        if size == 1:
            size = int.from_bytes(raw[start + 8 : start + 16], "big")
        end = start + size if size >= 8 else len(raw)  # 0: to the end of the file
        yield kind, start, end
        start = end


def is_cut_short(raw: bytes) -> bool:
    """Whether a box ends after the end of the file."""
    return any(end > len(raw) for _, _, end in outer_boxes(raw))
