"""Decodes sound that libsndfile does not know, such as that of phones, browsers and voice mail. Needs PyAV.

Boxes or frames tell a whole file from a cut one (ADTS: ISO/IEC 13818-7, 6.2; AMR: RFC 4867, section 5). Otherwise the
stated duration does.
"""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.plugins import import_package
from mgpu_pipe.data.bad_samples import BadSampleError
from mgpu_pipe.data.containers import brands_of, is_cut_short, outer_boxes

CUT = "is cut short"
NAMES = "M4A, AAC, AMR, WebM, WMA, AVI, FLV, MPEG-TS, or Ogg of FLAC or Speex"
_OGG, _TS = "Ogg", "MPEG-TS"
_DEMUXERS = {
    **{"M4A": "mov,mp4,m4a,3gp,3g2,mj2", "WebM": "matroska,webm", "WMA": "asf"},
    **{"AAC": "aac", "AMR": "amr", _OGG: "ogg", "WAV": "wav", "CAF": "caf", "8SVX": "iff"},
    **{"AVI": "avi", "FLV": "flv", _TS: "mpegts"},
}
_WAV_CODECS = (0x01, 0x02, 0x03, 0x06, 0x07, 0x11, 0x31, 0x38, 0x40, 0x50, 0x55, 0xFFFE)
_CAF_CODECS = (b"lpcm", b"ulaw", b"alaw")
"""Codecs in WAV (RFC 2361) and CAF that libsndfile decodes, and MP3."""
_OGG_CODECS = (b"\x7fFLAC", b"Speex   ")
"""First bytes of Ogg's first packet. libsndfile knows no Speex, and only some programs' FLAC in Ogg."""
_AMR, _AMR_WIDE = b"#!AMR\n", b"#!AMR-WB\n"
_AMR_BYTES = {
    _AMR: (12, 13, 15, 17, 19, 20, 26, 31, 5, 0, 0, 0, 0, 0, 0, 0),
    _AMR_WIDE: (17, 23, 32, 36, 40, 46, 50, 58, 60, 5, 0, 0, 0, 0, 0, 0),
}
"""Bytes after a frame's first, by its type."""
_ADTS_HEAD = 7
_TS_PACKET = 188
_FLV_HEAD, _FLV_TAG = 13, 15
"""Bytes before the first tag of an FLV file, and those around a tag's content."""
_CHANNEL_ORDER = re.compile(rb"(\0\0..)(?:chan|chnl)", re.DOTALL)
_LACKING_SECONDS = 0.25
"""A stated duration may count what encoders put before and after the sound."""


def pyav() -> Any:
    """Imports PyAV; ConfigError if it is not installed."""
    return import_package("av", "PyAV", "audio", "data.source", f"recordings in {NAMES}")


def container_of(raw: bytes) -> str | None:
    """Name of the kind of container, a key of :data:`_DEMUXERS`; None for one that libsndfile decodes."""
    if brands_of(raw[:12]):
        return "M4A"
    if raw[:4] == b"\x1a\x45\xdf\xa3":
        return "WebM"
    if raw[:8] == b"\x30\x26\xb2\x75\x8e\x66\xcf\x11":
        return "WMA"
    if raw.startswith((_AMR, _AMR_WIDE)):
        return "AMR"
    if raw[:4] == b"FLV\x01":
        return "FLV"
    if raw[:4] == b"RIFF" and raw[8:12] == b"AVI ":
        return "AVI"
    if raw[: 3 * _TS_PACKET : _TS_PACKET] == b"GGG":
        return _TS
    if raw[:4] == b"OggS" and raw[28:36].startswith(_OGG_CODECS):
        return _OGG
    if raw[:4] == b"RIFF" and raw[8:12] == b"WAVE":
        start = raw.find(b"fmt ", 12) + 8
        return None if start < 8 or int.from_bytes(raw[start : start + 2], "little") in _WAV_CODECS else "WAV"
    if raw[:4] == b"FORM" and raw[8:12] == b"8SVX":  # libsndfile mixes up its channels
        return "8SVX"
    if raw[:4] == b"caff":
        return None if raw[28:32] in _CAF_CODECS else "CAF"
    return "AAC" if _starts_adts(raw[id3_bytes(raw) :][:2]) else None


def id3_bytes(raw: bytes) -> int:
    """Length of the ID3v2 tag at the beginning of a file."""
    if raw[:3] != b"ID3":
        return 0
    return 10 + sum((byte & 0x7F) << shift for byte, shift in zip(raw[6:10], (21, 14, 7, 0), strict=False))


def decode_container(raw: bytes, kind: str, max_seconds: float) -> tuple[NDArray[np.float32], int]:
    """Decodes the first sound of a file: shape (samples, channels), and its samples a second.

    It stops soon after ``max_seconds``.

    Raises:
        BadSampleError: the file is cut short, or holds no sound that can be decoded.
    """
    if kind == "M4A":
        raw = _without_channel_order(raw)
    elif kind == "AAC":
        raw = raw[id3_bytes(raw) :]
        end = _frames_end(raw, kind)
        raw = raw if raw[end:].strip(b"\0\r\n") else raw[:end]  # some programs pad a file
    if is_cut_short(io.BytesIO(raw)) if kind in ("M4A", "WebM", "AVI") else _frames_end(raw, kind) > len(raw):
        raise BadSampleError(CUT)
    av = pyav()
    options = {"format_whitelist": _DEMUXERS[kind], "protocol_whitelist": "none"}
    parts, frames, rate, last = list[NDArray[np.float32]](), 0, 0, 0.0
    with av.open(io.BytesIO(raw), container_options=options, metadata_errors="replace") as container:
        if not container.streams.audio:
            raise BadSampleError("has no sound")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise BadSampleError("has a codec that cannot be decoded here")
        # Packed: PyAV 18 reads the planes of more than eight channels from memory that is not theirs.
        packed = av.AudioResampler(format="flt")
        for frame in container.decode(stream):
            rate = rate or frame.sample_rate
            if frame.sample_rate != rate:
                raise BadSampleError("changes its samples a second")
            for part in packed.resample(frame):
                parts.append(part.to_ndarray().reshape(-1, part.layout.nb_channels))
                frames += len(parts[-1])
                if parts[-1].shape[1] != parts[0].shape[1]:
                    raise BadSampleError("changes its number of channels")
            last = max(last, (frame.time or 0.0) + frame.samples / rate, frames / rate)
            if frames > max_seconds * rate:
                break
        stated = _stated_seconds(container, stream, kind)
    if not parts:
        raise BadSampleError("has no sound")
    if stated is not None and frames <= max_seconds * rate and last < stated - _LACKING_SECONDS:
        raise BadSampleError(CUT)
    return np.concatenate(parts), rate


def _without_channel_order(raw: bytes) -> bytes:
    """The file without boxes of an order of channels, for which PyAV 18 frees memory twice; a mean needs no order."""
    for kind, start, end in outer_boxes(io.BytesIO(raw)):
        if kind == b"moov":
            raw = raw[:start] + _CHANNEL_ORDER.sub(rb"\1free", raw[start:end]) + raw[end:]
    return raw


def _stated_seconds(container: Any, stream: Any, kind: str) -> float | None:
    """The duration that the file states of its sound; of AAC, AMR and MPEG-TS, which state none, ffmpeg guesses it."""
    if kind in ("AAC", "AMR", _TS):
        return None
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return container.duration / 1e6 if container.duration is not None and len(container.streams) == 1 else None


def _frames_end(raw: bytes, kind: str) -> int:
    """End of the last frame, tag or packet, which lies after the end of a cut file; 0 for other kinds."""
    if kind == _TS:
        return -(-len(raw) // _TS_PACKET) * _TS_PACKET
    if kind == "FLV":
        end = _FLV_HEAD
        while end < len(raw):
            end += _FLV_TAG + int.from_bytes(raw[end + 1 : end + 4], "big")
        return end
    if kind not in ("AAC", "AMR"):
        return 0
    magic = _AMR_WIDE if raw.startswith(_AMR_WIDE) else _AMR
    offset = len(magic) if kind == "AMR" else 0
    while offset < len(raw):
        head = raw[offset : offset + 6]
        if kind == "AMR":
            offset += 1 + _AMR_BYTES[magic][head[0] >> 3 & 0xF]
        elif not _starts_adts(head):
            break  # a tag, or damage, which the decoder reports
        elif len(head) < 6:
            return len(raw) + 1
        else:
            offset += max(_ADTS_HEAD, (head[3] & 3) << 11 | head[4] << 3 | head[5] >> 5)
    return offset


def _starts_adts(head: bytes) -> bool:
    return len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0
