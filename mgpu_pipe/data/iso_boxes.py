"""Files of boxes: MP4, M4A, HEIC and others (ISO/IEC 14496-12, section 4.2)."""

from __future__ import annotations


def brand_of(head: bytes) -> bytes | None:
    """The major brand by the first 12 bytes of a file; None if it is no file of boxes."""
    return head[8:12] if head[4:8] == b"ftyp" else None


def is_cut_short(raw: bytes) -> bool:
    """Whether the last box ends behind the end of the file."""
    at = 0
    while at < len(raw):
        if at + 8 > len(raw):
            return True
        size = int.from_bytes(raw[at : at + 4], "big")
        if size == 1:
            size = int.from_bytes(raw[at + 8 : at + 16], "big")
        if size < 8:  # 0: to the end of the file; others are no boxes, such as what phones append
            return False
        at += size
    return at > len(raw)
