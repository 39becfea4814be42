"""Decodes a sound file to one channel at the wanted rate. Needs soundfile; other formats than its own need PyAV."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.plugins import import_package
from mgpu_pipe.data.audio.decode_container import CUT, NAMES, container_of, decode_container, id3_bytes
from mgpu_pipe.data.audio.mp3_frames import is_mp3, mp3_in_wav, stated_frames, with_frame_count
from mgpu_pipe.data.bad_samples import LONGEST_REASON, BadSampleError, decoding
from mgpu_pipe.data.containers import UNKNOWN_SIZE, brands_of
from mgpu_pipe.errors import one_line
from mgpu_pipe.system.standard_streams import library_output

NO_SOUND = "is no sound that can be read"
FORMATS = f"WAV, FLAC, Ogg, MP3, AIFF, AU, CAF, W64, SPHERE, {NAMES}"
_TAGGED = (b"RIFF", b"RIFX", b"OggS", b"FORM", b".snd", b"caff", b"fLaC")
"""First bytes of files that some programs put after an ID3 tag, which belongs to MP3 and AAC."""
_W64 = b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\x00\x00"
_OGG_HEAD, _OGG_LAST = 27, 4
_SAMPLES = re.compile(rb"^(sample_count|sample_n_bytes|channel_count) -i (\d{1,12})\s*$", re.MULTILINE)


def whole_file(raw: bytes) -> bytes:
    """Returns a whole sound file, the sizes of a piped one corrected; BadSampleError if it is cut short or of no known
    end."""
    kind, length = raw[:4], len(raw)
    if kind in (b"RIFF", b"RIFX"):
        return _wav(raw, "little" if kind == b"RIFF" else "big")
    if kind == b"OggS":
        _check_pages(raw)
    elif kind == b".snd":
        start, size = (int.from_bytes(raw[offset : offset + 4], "big") for offset in (4, 8))
        _check(size == 0xFFFFFFFF or start + size <= length)
    elif kind == b"FORM":
        size = int.from_bytes(raw[4:8], "big")
        _check(size + 8 <= length + 1 or size >= UNKNOWN_SIZE)
    elif kind == b"RF64":
        size = int.from_bytes(raw[20:28], "little")
        _check(size in (0, 0xFFFFFFFFFFFFFFFF) or size + 8 <= length + 1)
    elif raw[:16] == _W64:
        _check(int.from_bytes(raw[16:24], "little") <= length)
    elif kind == b"caff":
        _check_caf(raw)
    elif raw[:7] == b"NIST_1A":
        stated = {name: int(value) for name, value in _SAMPLES.findall(raw[:1024])}
        size = stated.get(b"sample_count", 0) * stated.get(b"sample_n_bytes", 1) * stated.get(b"channel_count", 1)
        _check(1024 + size <= length)
    elif is_mp3(raw):
        tag = stated_frames(raw)
        _check(tag is None or tag[1] <= length)
    elif kind != b"fLaC":
        raise BadSampleError(f"{NO_SOUND} (no {FORMATS} file)")
    return raw


def _check(whole: bool) -> None:
    if not whole:
        raise BadSampleError(CUT)


def _wav(raw: bytes, order: Literal["little", "big"]) -> bytes:
    """:func:`whole_file` for WAV: the sizes of the file and of its samples may be a pipe's."""
    total, offset = int.from_bytes(raw[4:8], order), 12
    known = 0 < total < UNKNOWN_SIZE
    _check(not known or total + 8 <= len(raw) + 1)
    while offset + 8 <= len(raw):
        size, start = int.from_bytes(raw[offset + 4 : offset + 8], order), offset + 8
        if raw[offset : offset + 4] == b"data":
            if size >= UNKNOWN_SIZE or (size == 0 and not known):
                sizes = [count.to_bytes(4, order) for count in (len(raw) - 8, len(raw) - start)]
                return raw[:4] + sizes[0] + raw[8 : offset + 4] + sizes[1] + raw[start:]
            _check(start + size <= len(raw))
            return raw
        offset = start + size + size % 2
    return raw


def _check_pages(raw: bytes) -> None:
    """Checks that every page is whole and each stream has its last page."""
    offset, ended = 0, dict[bytes, bool]()
    while offset < len(raw):
        head = raw[offset : offset + _OGG_HEAD]
        if head[:4] != b"OggS":
            if not raw[offset:].strip(b"\0"):  # some programs pad a file
                break
            raise BadSampleError(f"has no Ogg page at byte {offset}, where one should begin")
        segments = raw[offset + _OGG_HEAD : offset + _OGG_HEAD + head[-1]] if len(head) == _OGG_HEAD else b""
        end = offset + _OGG_HEAD + len(segments) + sum(segments)
        _check(len(head) == _OGG_HEAD and len(segments) == head[-1] and end <= len(raw))
        ended[head[14:18]] = bool(head[5] & _OGG_LAST)
        offset = end
    _check(all(ended.values()))


def _check_caf(raw: bytes) -> None:
    offset = 8
    while offset < len(raw):
        size = int.from_bytes(raw[offset + 4 : offset + 12], "big", signed=True)
        if raw[offset : offset + 4] == b"data" and size == -1:
            return
        _check(size >= 0 and offset + 12 + size <= len(raw))
        offset += 12 + size


Wave = NDArray[np.float32]
LEAST_SECONDS = 0.025
"""Shortest recording that can hold a word: one frame of most models."""
RATES = (1000, 768000)
"""Bounds of samples a second; outside of them a header is wrong."""
LOUDEST = 1 << 31
"""Largest float value. The usual limit is 1, but some programs write unscaled integers of 16 to 32 bits."""
_UNKNOWN_FRAMES = 1 << 48
"""libsndfile's number of frames where a file does not state one is above this."""
_AT_ONCE = 1 << 16
"""Frames per read: a header may promise more than there is memory."""
_INVERTED_CORRELATION = -0.5
"""Correlation with the loudest channel below which a channel is the same sound with opposite sign."""


class _Bytes(io.BytesIO):
    """The file object that libsndfile reads. In a broken file it seeks before the start; a callback's exception would
    be printed."""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return -1


def soundfile() -> Any:
    """Imports the package soundfile; ConfigError if it is not installed."""
    return import_package("soundfile", "soundfile", "audio", "data.source", "recordings")


def decode(raw: bytes, rate: int, max_seconds: float) -> Wave:
    """Mean of a recording's channels at ``rate``, (samples,); BadSampleError if it is broken, empty, too long or not
    finite."""
    untagged = raw[id3_bytes(raw) :]
    raw = untagged if untagged.startswith(_TAGGED) or brands_of(untagged[:12]) else raw
    container = container_of(raw)
    with decoding(NO_SOUND):
        if container is None or (container == "CAF" and _is_libsndfiles(raw)):
            channels, before = _read_with_libsndfile(raw, max_seconds)
        else:
            raw = whole_file(raw) if raw.startswith((b"OggS", b"RIFF", b"FORM", b"caff")) else raw
            channels, before = decode_container(raw, container, max_seconds)
            _check_rate(before)
    if len(channels) > max_seconds * before:
        raise _too_long(len(channels) / before, max_seconds)
    if len(channels) < LEAST_SECONDS * before:
        raise BadSampleError(f"holds {len(channels)} samples, fewer than a word takes")
    if channels.dtype == np.int16:
        channels = channels * np.float32(1 / 32768)
    elif not np.isfinite(channels).all() or np.abs(channels).max() > LOUDEST:
        raise BadSampleError(f"has values that are no numbers, or above {LOUDEST}")
    return resample(mix_channels(channels), rate / before)


def _is_libsndfiles(raw: bytes) -> bool:
    """Whether libsndfile decodes a file. ffmpeg loses the end of ALAC that libsndfile wrote into CAF."""
    package = soundfile()
    try:
        package.SoundFile(_Bytes(whole_file(raw))).close()
    except package.LibsndfileError:
        return False
    return True


def _read_with_libsndfile(raw: bytes, max_seconds: float) -> tuple[NDArray[Any], int]:
    """Values of shape (samples, channels), int16 where the file holds these, and samples a second."""
    package = soundfile()
    with _libsndfile_errors(package):
        raw, certain = mp3_in_wav(whole_file(raw)), True
        if is_mp3(raw):
            with library_output(), package.SoundFile(_Bytes(raw)) as file:
                stating = with_frame_count(raw, int(file.frames))
            raw, certain = stating, stating is raw and stated_frames(raw) is not None
        with _quiet_mp3(raw), package.SoundFile(_Bytes(raw)) as file:
            file.seekable = lambda: False  # soundfile seeks after every read, which GSM and FLAC of a pipe cannot
            rate, stated = int(file.samplerate), int(file.frames) if certain else _UNKNOWN_FRAMES
            _check_rate(rate)
            if max_seconds * rate < stated < _UNKNOWN_FRAMES:
                raise _too_long(stated / rate, max_seconds)
            # Reading these as integers takes a third of the time; a float32 holds each of them.
            dtype = "int16" if file.subtype == "PCM_16" else "float32"
            parts, frames = list[NDArray[Any]](), 0
            while frames <= max_seconds * rate:
                part = file.read(_AT_ONCE, dtype=dtype, always_2d=True)
                parts.append(part)
                frames += len(part)
                if len(part) < _AT_ONCE:
                    break
    if frames < stated < _UNKNOWN_FRAMES and frames <= max_seconds * rate:
        raise BadSampleError(CUT)
    return np.concatenate(parts), rate


def _check_rate(rate: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise BadSampleError(f"states {rate} samples a second")


@contextmanager
def _libsndfile_errors(package: Any) -> Iterator[None]:
    try:
        yield
    except package.LibsndfileError as error:  # its message names our object
        raise BadSampleError(f"{NO_SOUND} ({one_line(error.error_string)[:LONGEST_REASON].strip()})") from error


def _quiet_mp3(raw: bytes) -> AbstractContextManager[object]:
    """Keeps from standard error what libmpg123 says of an MP3 file."""
    return library_output() if is_mp3(raw) else nullcontext()


def _too_long(seconds: float, most: float) -> BadSampleError:
    return BadSampleError(f"lasts {seconds:.1f} s, longer than data.max_seconds={most:g}")


def mix_channels(channels: NDArray[np.float32]) -> Wave:
    """The mean of channels, shape (samples, channels). A channel opposite to the loudest one changes its sign first:
    their sum would be silence."""
    if channels.shape[1] == 1:
        return channels[:, 0]
    products = channels.astype(np.float64).T @ channels
    energy = products.diagonal()
    loudest = int(energy.argmax())
    opposed = products[loudest] < _INVERTED_CORRELATION * np.sqrt(energy * energy[loudest])
    wave: Wave = (channels * np.where(opposed, np.float32(-1), np.float32(1))).mean(1, dtype=np.float32)
    return wave


def resample(wave: Wave, factor: float) -> Wave:
    """Resamples ``wave`` to ``factor`` times as many samples by the discrete Fourier transform (periodic). It drops
    frequencies above the lower rate's limit and keeps the rest."""
    length = max(1, round(len(wave) * factor))
    if length == len(wave):
        return wave
    spectrum, wanted = np.fft.rfft(wave), np.zeros(length // 2 + 1, np.complex64)
    shared = min(len(spectrum), len(wanted))
    wanted[:shared] = spectrum[:shared]
    return (np.fft.irfft(wanted, length) * (length / len(wave))).astype(np.float32)
