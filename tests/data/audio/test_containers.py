"""Sound in the formats of phones and browsers: whole, cut, spoiled. Oracle: the samples that were encoded."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from mgpu_pipe.data.audio import decode_container
from mgpu_pipe.data.audio.decode_audio import decode
from mgpu_pipe.data.bad_samples import BadSampleError
from mgpu_pipe.errors import ConfigError
from tests.data.audio.test_decode import RATE, fault, spoken
from tests.support.fuzzing import changed

FORMATS = {
    "m4a": ("mp4", "aac", 16000),
    "alac": ("mp4", "alac", 8000),
    "3gp": ("3gp", "aac", 8000),
    "aac": ("adts", "aac", 16000),
    "webm": ("webm", "libopus", 48000),
    "wma": ("asf", "wmav2", 44100),
    "mov": ("mov", "pcm_s16le", 8000),
}
LAYOUTS = {1: "mono", 2: "stereo", 7: "6.1", 8: "7.1"}


def encoded(values: NDArray[np.float32], name: str, channels: int = 1) -> bytes:
    """The values at :data:`RATE` as a file, by ffmpeg."""
    import av

    container, codec, rate = FORMATS[name]
    file, layout = io.BytesIO(), LAYOUTS[channels]
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout, bit_rate=96_000)
        samples = np.repeat(values, channels)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="flt", layout=layout)
        frame.sample_rate = RATE
        fit = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate, frame_size=1024)
        for part in [*fit.resample(frame), *fit.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()


def likeness(values: NDArray[np.float32], heard: NDArray[np.float32]) -> float:
    """The largest correlation over all shifts: some encoders put silence before the sound."""
    size = len(values) + len(heard)
    product = np.fft.irfft(np.fft.rfft(values, size).conj() * np.fft.rfft(heard, size), size)
    return float(product.max() / np.linalg.norm(values) / np.linalg.norm(heard))


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read_whole_and_refused_where_it_is_cut(name: str) -> None:
    pytest.importorskip("av", reason="pip install av")
    values = spoken()
    raw = encoded(values, name)
    heard = decode(raw, RATE, 30)
    assert abs(len(heard) - len(values)) < RATE / 4, "encoders fill blocks"
    assert likeness(values, heard) > (0.999 if name in ("alac", "mov") else 0.9)
    for size in (len(raw) // 2, 4 * len(raw) // 5):
        said = fault(raw[:size])
        assert said == "is cut short" or said.startswith("is no sound that can be read ("), (size, said)
    assert likeness(heard, decode(encoded(values, name, channels=2), RATE, 30)) > 0.9
    with pytest.raises(BadSampleError, match=r"lasts .* s, longer than data.max_seconds=1"):
        decode(raw, RATE, 1)


@pytest.mark.parametrize(("name", "channels"), [("webm", 8), ("m4a", 8), ("mov", 7), ("mov", 8)])
def test_many_channels_are_read(name: str, channels: int) -> None:
    """In a process of its own: PyAV's planes of more than eight channels, and its orders of channels, ended it."""
    pytest.importorskip("av", reason="pip install av")
    program = "import sys; from mgpu_pipe.data.audio.decode_audio import decode; "
    program += f"print(len(decode(sys.stdin.buffer.read(), {RATE}, 30)))"
    done = subprocess.run(
        [sys.executable, "-c", program], input=encoded(spoken(), name, channels), stdout=subprocess.PIPE, check=True
    )
    assert int(done.stdout) > RATE


def test_tags_and_padding_around_a_recording_are_passed_over() -> None:
    pytest.importorskip("av", reason="pip install av")
    frames, boxes = encoded(spoken(), "aac"), encoded(spoken(), "m4a")
    tagged = b"ID3\x04\0\0\0\0\x01\x0a" + bytes(138) + frames
    assert (decode(tagged, RATE, 30) == decode(frames, RATE, 30)).all()
    assert (decode(frames + bytes(8), RATE, 30) == decode(frames, RATE, 30)).all()
    for tail in (b"\n", bytes(4), b"TAG" + b" " * 125, bytes(512)):
        assert (decode(boxes + tail, RATE, 30) == decode(boxes, RATE, 30)).all(), tail[:3]
    assert fault(tagged[:-3]) == "is cut short"


def test_voice_mail_is_read_by_frames() -> None:
    """AMR at 12.2 kbit/s; a frame of 20 ms has 32 bytes (RFC 4867, 5.3)."""
    pytest.importorskip("av", reason="pip install av")
    raw = b"#!AMR\n" + (b"\x3c" + bytes(31)) * 50
    assert len(decode(raw, RATE, 30)) == RATE
    assert fault(raw[:-1]) == "is cut short"


@pytest.mark.parametrize("name", ["m4a", "aac", "webm", "wma"])
def test_a_spoiled_file_is_a_bad_sample(name: str) -> None:
    pytest.importorskip("av", reason="pip install av")
    raw = encoded(spoken(), name)
    for number in range(40):
        try:
            assert np.isfinite(decode(changed([raw], number), RATE, 30)).all()
        except BadSampleError as error:
            assert "\n" not in str(error)


def test_without_pyav_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"M4A.*PyAV is not installed.*pip install 'mgpu_pipe\[audio\]'"):
        decode(b"\0\0\0\x18ftypM4A " + b"\0" * 12, RATE, 30)
    assert decode_container.container_of(b"\0\0\0\x18ftypM4A ") == "M4A"
