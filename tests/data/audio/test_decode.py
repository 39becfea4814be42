"""Sound files and containers: whole, cut, of a pipe, spoiled. Oracles: Python's wave, libsndfile, encoded samples."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import wave
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.audio import decode_container
from mgpu_pipe.data.audio.decode_audio import decode
from mgpu_pipe.data.bad_samples import BadSampleError
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.errors import ConfigError
from tests.support.fuzzing import changed
from tests.support.needs import need_speech
from tests.support.sounds import tones

HELLO = Path("/usr/share/asterisk/sounds/en_US_f_Allison/hello-world.wav")
RATE = 8000
FORMATS = (
    *(("WAV", part) for part in ("PCM_16", "PCM_24", "FLOAT", "ULAW", "IMA_ADPCM", "MS_ADPCM", "GSM610", "G721_32")),
    *(("AIFF", "PCM_16"), ("AU", "PCM_16"), ("AU", "G721_32"), ("CAF", "PCM_16"), ("CAF", "ALAC_16")),
    *(("RF64", "PCM_16"), ("W64", "PCM_16"), ("W64", "GSM610"), ("WAVEX", "FLOAT"), ("NIST", "PCM_16")),
    *(("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS")),
)


def spoken() -> NDArray[np.float32]:
    """A recording that a person spoke; 1.4 s at :data:`RATE`."""
    need_speech()
    if not HELLO.is_file():
        pytest.skip("a person's recording comes with Debian: apt-get install asterisk-core-sounds-en-wav")
    with wave.open(str(HELLO)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def stored(values: NDArray[np.float32], form: str, part: str) -> bytes:
    import soundfile

    content = io.BytesIO()
    soundfile.write(content, values, RATE, format=form, subtype=part)
    return content.getvalue()


def fault(raw: bytes) -> str:
    with pytest.raises(BadSampleError) as found:
        decode(raw, RATE, 30)
    return str(found.value)


@pytest.mark.parametrize(("form", "part"), FORMATS)
def test_each_format_is_read_whole_and_refused_where_it_is_cut(form: str, part: str) -> None:
    values = spoken()
    raw = stored(values, form, part)
    heard = decode(raw, RATE, 30)
    assert len(values) <= len(heard) < len(values) + 640, "codecs of blocks fill the last one up"
    if part != "OPUS":  # which keeps no phases
        assert np.corrcoef(values, heard[: len(values)])[0, 1] > 0.95
    for size in (len(raw) // 2, 9 * len(raw) // 10, len(raw) - 8):
        said = fault(raw[:size])
        assert said == "is cut short" or (form == "FLAC" and "lost sync" in said), (size, said)


def test_an_ogg_file_that_is_cut_between_two_pages_is_refused() -> None:
    raw = stored(np.tile(spoken(), 6), "OGG", "VORBIS")
    pages = [at for at in range(len(raw)) if raw[at : at + 4] == b"OggS"]
    assert len(pages) > 4
    assert fault(raw[: pages[-1]]) == "is cut short"
    assert len(decode(raw + raw, RATE, 30)) >= len(decode(raw, RATE, 30)), "one stream after another"


@pytest.mark.parametrize("size", [0, 0x7FFFF000, 0x80000000, 0xFFFFFFFF])
def test_a_wav_file_of_a_pipe_is_read_to_its_end(size: int) -> None:
    """sox, arecord, ffmpeg and others state such sizes, for they cannot go back."""
    values = spoken()
    for part in ("PCM_16", "GSM610"):
        raw = bytearray(stored(values, "WAV", part))
        at = raw.index(b"data")
        whole = decode(bytes(raw), RATE, 30)
        for total in (size, min(size + at, 0xFFFFFFFF)):
            raw[4:8], raw[at + 4 : at + 8] = total.to_bytes(4, "little"), size.to_bytes(4, "little")
            if total == 0 or total >= 0x7FFFF000:
                assert np.array_equal(decode(bytes(raw), RATE, 30), whole), (part, hex(total))


@pytest.mark.parametrize(
    "command",
    [
        ("sox", "{}", "-t", "wav", "-"),
        ("sox", "{}", "-t", "aiff", "-"),
        *(("ffmpeg", "-v", "error", "-i", "{}", "-f", form, "-") for form in ("wav", "flac", "ogg", "mp3", "au")),
        *(
            ("ffmpeg", "-v", "error", "-i", "{}", "-c:a", codec, "-f", form, "-")
            for codec, form in (("flac", "ogg"), ("libspeex", "ogg"), ("libmp3lame", "wav"))
        ),
    ],
)
def test_what_programs_write_to_a_pipe_is_read(command: tuple[str, ...]) -> None:
    values = spoken()
    if which(command[0]) is None:
        pytest.skip(f"it writes to the pipe: apt-get install {command[0]}")
    filled = [str(HELLO) if word == "{}" else word for word in command]
    raw = subprocess.run(filled, stdout=subprocess.PIPE, check=True).stdout
    heard = decode(raw, RATE, 30)
    assert len(values) <= len(heard) < len(values) + 1600
    if "ogg" in command:
        assert fault(raw[: len(raw) // 2]) == "is cut short"


@pytest.mark.parametrize("order", [1, -1])
def test_an_mp3_file_that_states_no_number_of_frames_is_read_to_its_end(order: int) -> None:
    """libsndfile guesses their number from the bits of the first: too many or too few. Oracle: the stated number."""
    values = np.concatenate([tones("abab", 3), np.zeros(3 * RATE, np.float32)])[::order]
    counted = io.BytesIO()
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(counted, values, RATE, format="MP3", bitrate_mode="VARIABLE", compression_level=0.5)
    raw = counted.getvalue()
    first = raw.index(raw[:2], raw.index(b"LAME"))  # after Xing's frame
    for tag in (b"", b"ID3\3\0\0\0\0\0\x10" + bytes(16)):
        heard = decode(tag + raw[first:], RATE, 60)
        assert len(values) <= len(heard) < len(values) + 3000
        whole = decode(raw, RATE, 60)
        shifts = [np.abs(heard[shift:][: len(whole)] - whole[: len(heard) - shift]).max() for shift in range(3000)]
        assert min(shifts) < 1e-4
    assert len(decode(raw + raw, RATE, 60)) >= 2 * len(whole), "files that were joined"
    other = io.BytesIO()
    soundfile.write(other, values, 2 * RATE, format="MP3")
    for both in (raw + other.getvalue(), other.getvalue() + raw):
        assert fault(both) == "changes its samples a second"


def test_an_mp3_file_in_a_wav_file_is_read() -> None:
    """As recorders and ffmpeg write it, without a number of frames. Oracle: the MP3 file."""
    content = io.BytesIO()
    pytest.importorskip("soundfile").write(content, tones("abab", 3), RATE, format="MP3")
    counted = content.getvalue()
    frames = counted[counted.index(counted[:2], counted.index(b"LAME")) :]
    form = struct.pack("<HHIIHHHHIHHH", 0x55, 1, RATE, 4000, 1, 0, 12, 1, 2, 576, 1, 1393)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form
    chunks += b"fact" + struct.pack("<II", 4, 1 << 20) + b"data" + struct.pack("<I", len(frames)) + frames
    raw = b"RIFF" + struct.pack("<I", len(chunks)) + chunks
    assert np.array_equal(decode(raw, RATE, 30), decode(frames, RATE, 30))
    assert fault(raw[:-40]) == "is cut short"


def test_channels_that_are_opposites_are_no_silence() -> None:
    """As a cable with one pole turned round gives them."""
    values = spoken()
    for right in (-values, -0.7 * values):
        both = np.stack([values, right], 1)
        heard = decode(stored(both, "WAV", "FLOAT"), RATE, 30)
        assert np.corrcoef(values, heard)[0, 1] > 0.99 and np.abs(heard).max() > 0.8 * np.abs(values).max()
    other = tones("ab", 1)[: len(values)]
    apart = np.stack([values[: len(other)], other], 1)
    assert np.allclose(decode(stored(apart, "WAV", "FLOAT"), RATE, 30), apart.mean(1), atol=1e-6), "others are averaged"


def test_files_of_rare_formats_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    values = spoken()
    for form, part in (("XI", "DPCM_16"), ("IRCAM", "PCM_16"), ("MAT4", "PCM_16"), ("PAF", "PCM_16")):
        assert fault(stored(values, form, part)).startswith("is no sound that can be read (no WAV, FLAC"), form
    assert fault(b"fLaC".ljust(500)).startswith("is no sound that can be read (")
    assert capfd.readouterr().err == ""


def test_spoiled_mp3_files_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    need_speech()
    whole = stored(tones("abab", 1), "MP3", "MPEG_LAYER_III")
    refused = 0
    for number in range(200):
        try:
            decode(changed([whole], number), RATE, 30)
        except BadSampleError:
            refused += 1
    assert 20 < refused < 200
    assert capfd.readouterr().err == ""


def list_of_spoiled(folder: Path, number: int) -> Path:
    files = [stored(np.tile(spoken(), 2), form, part) for form, part in FORMATS] + [HELLO.read_bytes()]
    lines = ["path,text"]
    for index in range(number):
        (folder / f"{index}").write_bytes(changed(files, index))
        lines.append(f"{index},hello world")
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    return folder / "list.csv"


def read_spoiled(folder: Path, number: int) -> Any:
    given = (f"data.paths=[{list_of_spoiled(folder, number)}]", f"data.cache_dir={folder / 'cache'}")
    usual = ("objective=ctc", "data=audio_list", "model=wav2vec2_tiny", "data.on_bad_sample=skip")
    return prepare(compose([*usual, *given])[0])


def test_spoiled_recordings_never_end_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepared = read_spoiled(tmp_path, 300)
    assert 100 < prepared.bad_samples < 250
    assert prepared.train_samples + prepared.held_out_samples + prepared.bad_samples == 300
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.exhaustive
def test_ten_thousand_spoiled_recordings_never_end_a_run(tmp_path: Path) -> None:
    prepared = read_spoiled(tmp_path, 10_000)
    assert prepared.train_samples + prepared.held_out_samples + prepared.bad_samples == 10_000


CONTAINERS = {
    "m4a": ("mp4", "aac", 16000),
    "alac": ("mp4", "alac", 8000),
    "3gp": ("3gp", "aac", 8000),
    "aac": ("adts", "aac", 16000),
    "webm": ("webm", "libopus", 48000),
    "wma": ("asf", "wmav2", 44100),
    "mov": ("mov", "pcm_s16le", 8000),
    "wav": ("wav", "adpcm_yamaha", 8000),
    "caf": ("caf", "alac", 8000),
    "avi": ("avi", "pcm_s16le", 8000),
    "flv": ("flv", "aac", 16000),
    "ts": ("mpegts", "mp2", 16000),
}
LAYOUTS = {1: "mono", 2: "stereo", 7: "6.1", 8: "7.1"}


def encoded(values: NDArray[np.float32], name: str, channels: int = 1) -> bytes:
    """The values at :data:`RATE` as a file, by ffmpeg."""
    import av

    container, codec, rate = CONTAINERS[name]
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


@pytest.mark.parametrize("name", CONTAINERS)
def test_each_container_is_read_whole_and_refused_where_it_is_cut(name: str) -> None:
    pytest.importorskip("av", reason="pip install av")
    values = spoken()
    raw = encoded(values, name)
    heard = decode(raw, RATE, 30)
    assert abs(len(heard) - len(values)) < RATE / 4, "encoders fill blocks"
    assert likeness(values, heard) > (0.999 if name in ("alac", "mov", "caf", "avi") else 0.9)
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
    for file in (
        boxes,
        *(stored(spoken(), *form) for form in (("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("AIFF", "PCM_16"))),
    ):
        assert (decode(b"ID3\x03\0\0\0\0\0\x14" + bytes(20) + file, RATE, 30) == decode(file, RATE, 30)).all()


def test_the_channels_of_an_amigas_recording_lie_one_after_the_other() -> None:
    pytest.importorskip("av", reason="pip install av")
    values = (spoken() * 100).astype(np.int8)
    head = (
        b"VHDR"
        + struct.pack(">IIIIHBBI", 20, len(values), 0, 0, RATE, 1, 0, 1 << 16)
        + b"CHAN"
        + struct.pack(">II", 4, 6)
    )
    body = values.tobytes() + bytes(len(values))
    form = b"8SVX" + head + b"BODY" + struct.pack(">I", len(body)) + body
    heard = decode(b"FORM" + struct.pack(">I", len(form)) + form, RATE, 30)
    assert np.allclose(heard, values / 256, atol=1e-6), "the mean of the sound and silence"
    assert fault(b"FORM" + struct.pack(">I", len(form)) + form[:-9]) == "is cut short"


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
