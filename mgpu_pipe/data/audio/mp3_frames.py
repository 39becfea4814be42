"""Frames of MP3 files: their number decides how much libsndfile reads (ISO/IEC 11172-3, 2.4.1; 13818-3, 2.4.2)."""

from __future__ import annotations

import re

from mgpu_pipe.data.audio.decode_container import id3_bytes
from mgpu_pipe.data.bad_samples import BadSampleError

_START = re.compile(rb"ID3|\xff[\xe2-\xff]")
_SYNC = re.compile(rb"\xff[\xe2-\xff]")
_TAG = re.compile(rb"(?:Xing|Info)(.{4})(.{4})(.{4})", re.DOTALL)
_KBITS = {
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0),
}
"""Kilobits a second of layer III by its index, for MPEG-1 and for MPEG-2."""
_RATES = (44100, 48000, 32000, 0)
_MONO = 3
_WAVE_FORMAT_MP3 = b"\x55\0"
_CHAIN = 3
"""Frames in a row, each where the last one ends, that chance does not make."""


def is_mp3(raw: bytes) -> bool:
    """Whether the file begins as an MP3 file does: with a frame or an ID3 tag."""
    return _START.match(raw) is not None


def mp3_in_wav(raw: bytes) -> bytes:
    """Returns the MP3 file in a WAV file; any other file unchanged. libsndfile takes its end for a cut."""
    offset, is_layer3 = 12, False
    while raw[:4] == b"RIFF" and offset + 8 <= len(raw):
        size, start = int.from_bytes(raw[offset + 4 : offset + 8], "little"), offset + 8
        if raw[offset : offset + 4] == b"fmt ":
            is_layer3 = raw[start : start + 2] == _WAVE_FORMAT_MP3
        elif raw[offset : offset + 4] == b"data":
            return raw[start : start + size] if is_layer3 else raw
        offset = start + size + size % 2
    return raw


def stated_frames(raw: bytes) -> tuple[int, int] | None:
    """Frames and bytes that the first frame of an MP3 file states (Xing's VBR header); None without one."""
    start = id3_bytes(raw)
    tag = _TAG.search(raw, start, start + 256)
    if tag is None or tag[1][3] & 3 != 3:
        return None
    frames, size = (int.from_bytes(tag[number], "big") for number in (2, 3))
    return (frames, size) if frames else None


def with_frame_count(raw: bytes, samples: int) -> bytes:
    """Returns an MP3 file whose first frame states the number of frames, where libsndfile expects too few ``samples``.

    Without a stated number libsndfile guesses it from the first frame's bits, and reads no further. A file that was
    joined of several states the number of its first part.

    Raises:
        BadSampleError: a part has other samples a second, which libsndfile would leave out.
    """
    start, stated = id3_bytes(raw), stated_frames(raw)
    offset, count, first = start, 0, b""
    while offset + 4 <= len(raw):
        head = raw[offset : offset + 4]
        size = _frame_bytes(head)
        if size == 0 or (first and not _alike(first, head)):
            if size and _begins_chain(raw, offset):
                raise BadSampleError("changes its samples a second")
            sync = _SYNC.search(raw, offset + 1)
            offset = len(raw) if sync is None else sync.start()
            continue
        first = first or head
        count += offset + size <= len(raw)
        offset += size
    if not first or (count * _samples(first) <= samples if stated is None else count <= stated[0] + 1):
        return raw
    return _counting_frame(first, count, len(raw) - start) + raw[start:]


def _begins_chain(raw: bytes, offset: int) -> bool:
    first = raw[offset : offset + 4]
    for _ in range(_CHAIN):
        head = raw[offset : offset + 4]
        if len(head) < 4 or not _alike(first, head) or not (size := _frame_bytes(head)):
            return False
        offset += size
    return True


def _is_mpeg1(head: bytes) -> bool:
    return head[1] & 0x18 == 0x18


def _samples(head: bytes) -> int:
    return 1152 if _is_mpeg1(head) else 576


def _frame_bytes(head: bytes) -> int:
    """Length of the frame of layer III that begins with these four bytes; 0 where none does."""
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    if head[0] != 0xFF or head[1] < 0xE0 or version == 1 or layer != 1:
        return 0
    rate = _RATES[head[2] >> 2 & 3] >> {3: 0, 2: 1, 0: 2}[version]
    bits = 1000 * _KBITS[_is_mpeg1(head)][head[2] >> 4]
    return _samples(head) // 8 * bits // rate + (head[2] >> 1 & 1) if bits and rate else 0


def _alike(head: bytes, other: bytes) -> bool:
    """Whether two frames have the same version and samples a second."""
    return head[1] & 0xFE == other[1] & 0xFE and head[2] & 0x0C == other[2] & 0x0C


def _counting_frame(head: bytes, count: int, size: int) -> bytes:
    """A silent frame with Xing's header: ``count`` frames and ``size`` bytes follow it."""
    header = bytes((0xFF, head[1] | 1, 0x90 | head[2] & 0x0C, head[3]))  # no checksum, 128 or 80 kbit/s
    mono = head[3] >> 6 == _MONO
    side = (17 if mono else 32) if _is_mpeg1(head) else (9 if mono else 17)
    frame = header + bytes(side) + b"Xing" + (3).to_bytes(4, "big") + count.to_bytes(4, "big")
    length = _frame_bytes(header)
    return (frame + (size + length).to_bytes(4, "big")).ljust(length, b"\0")
