"""Video files as cameras and screen recorders write them. Oracle: what the program ffmpeg shows, which turns frames."""

from __future__ import annotations

import io
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.videos import (
    ClipFacts,
    choose_frames,
    frames_in,
    frames_of,
    look,
    measure_rate,
    sample_frames,
)
from tests.support.needs import need_ffmpeg, need_pyav

TURNS = [(1, 0, 0, 1), (-1, 0, 0, 1), (1, 0, 0, -1), (-1, 0, 0, -1), (0, 1, 1, 0), (0, 1, -1, 0)]
TURNS += [(0, -1, 1, 0), (0, -1, -1, 0)]
"""The display matrices of the eight ways to hold a camera, and to look into a mirror."""


def ffmpeg(*arguments: str, given: bytes = b"") -> bytes:
    return subprocess.run(
        ["ffmpeg", "-v", "error", "-y", *arguments], input=given, capture_output=True, check=True
    ).stdout


def corners(path: Path, frames: int = 6, *options: str) -> Path:
    """Frames of 64 x 48 pixels with a colour in each corner, five a second."""
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:24, :32], picture[:24, 32:], picture[24:, :32], picture[24:, 32:] = (
        (250, 0, 0),
        (0, 250, 0),
        (0, 0, 250),
        (250, 250, 250),
    )
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", "64x48", "-r", "5", "-i", "-")
    ffmpeg(*raw, *options, "-pix_fmt", "yuv420p", str(path), given=picture.tobytes() * frames)
    return path


def turned(path: Path, matrix: tuple[int, int, int, int]) -> Path:
    """An MP4 file with another display matrix in its track's header (ISO/IEC 14496-12, 8.3.2)."""
    raw, (a, b, c, d) = bytearray(path.read_bytes()), (value << 16 for value in matrix)
    at = raw.index(b"tkhd") + 4 + 40
    raw[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("matrix", TURNS)
def test_frames_stand_upright_as_ffmpeg_shows_them(matrix: tuple[int, int, int, int], tmp_path: Path) -> None:
    need_pyav()
    need_ffmpeg()
    file = turned(corners(tmp_path / "phone.mp4"), matrix)
    shown = Image.open(io.BytesIO(ffmpeg("-i", str(file), "-frames:v", "1", "-f", "image2pipe", "-c:v", "png", "-")))
    (frame,), facts = frames_of(file, None, [0], 3), look(file)
    assert isinstance(facts, ClipFacts) and (facts.width, facts.height) == frame.size == shown.size
    assert np.abs(np.asarray(frame).astype(int) - np.asarray(shown.convert("RGB"))).mean() < 12


@pytest.mark.parametrize("form", ["mkv", "mp4", "avi"])
def test_frames_that_come_at_other_times_are_chosen_by_these(form: str, tmp_path: Path) -> None:
    """A screen recorder's file states 25 frames a second and holds one wherever something moved."""
    need_pyav()
    need_ffmpeg()
    times = [0, 1, 2, 3, 40, 41, 42, 80, 120, 160, 200, 240]  # 25ths of a second
    when = "+".join(f"eq(N,{number})*{time}" for number, time in enumerate(times))
    uneven = ("-vf", f"settb=1/25,setpts='{when}'", "-vsync", "vfr", "-enc_time_base", "1/25", "-c:v", "mpeg4")
    facts = look(corners(tmp_path / f"screen.{form}", len(times), *uneven))
    assert isinstance(facts, ClipFacts)
    assert facts.frames == len(times) and np.allclose(facts.moments, np.array(times) / 25, atol=2e-3)
    assert facts.rate == pytest.approx((len(times) - 1) / 9.6, rel=1e-3)
    data = PictureChatConfig(frames_per_second=1.0)
    seen = choose_frames(facts, data, 2, writes_times=False)
    wanted = np.arange(10) * (12 / facts.rate) / 10
    assert seen.seconds == pytest.approx(2 * wanted[1])
    assert seen.numbers == [max(at for at, time in enumerate(times) if time / 25 <= moment + 2e-3) for moment in wanted]
    told = choose_frames(facts, data, 2, writes_times=True)
    assert told.numbers == sorted(set(told.numbers)) and (told.numbers[0], told.numbers[-1]) == (0, 11)
    assert np.allclose(told.moments, np.array(times)[told.numbers] / 25, atol=2e-3)


@pytest.mark.parametrize("rate", [7, 25, 30000 / 1001, 60])
def test_at_a_constant_rate_frames_are_chosen_by_their_numbers(rate: float) -> None:
    """Times are rounded, jitter and begin anywhere, and the rate that a file states is not exact."""
    even, draw = np.arange(500) / rate, np.random.default_rng(1)
    for times in (even, even + 3.2, np.round(even, 3), even + draw.uniform(0, 0.4 / rate, 500), even * 1.003):
        assert measure_rate(times.tolist(), rate) == (rate, ())
    facts, data = ClipFacts(500, 8, 8, rate), PictureChatConfig()
    for told in (False, True):
        chosen, seconds = sample_frames(500, rate, data, 2, told)
        assert choose_frames(facts, data, 2, told) == (chosen.tolist(), seconds, tuple((chosen / rate).tolist()))
    odd: Any = [*even[:-1].tolist(), None]
    assert measure_rate(odd, rate) == measure_rate([0.0] * 9, rate) == (rate, ()), "nothing else is known"
    lost = np.delete(even, slice(100, 120)).tolist()
    assert len(measure_rate(lost, rate)[1]) == 480
    true, moments = measure_rate((even * 7).tolist(), rate)
    assert true == pytest.approx(rate / 7) and len(moments) == 500, "it states another rate"
    slow = ClipFacts(500, 8, 8, true, moments)
    assert choose_frames(slow, data, 2, False).numbers == sample_frames(500, true, data, 2)[0].tolist()


def test_files_of_before_are_read() -> None:
    assert ClipFacts.from_list([5, 8, 6, 2.0]) == ClipFacts(5, 8, 6, 2.0)
    uneven = ClipFacts(5, 8, 6, 2.0, (0.0, 1.0), True)
    assert ClipFacts.from_list([*uneven[:4], [0.0, 1.0], True]) == uneven


def test_a_folders_frames_are_in_the_order_that_ffmpeg_wrote_them(tmp_path: Path) -> None:
    for name in ("frame10.png", "frame2.png", "frame1.png", "._frame3.png", "notes.txt", "b 2/x.png", "frame09.PNG"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    assert [path.name for path in frames_in(tmp_path)] == ["frame1.png", "frame2.png", "frame09.PNG", "frame10.png"]
