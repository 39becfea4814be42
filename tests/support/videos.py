"""Videos for the tests: files and folders of frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.pictures import noise, stored


def frames_of(number: int, size: tuple[int, int] = (20, 24)) -> list[Image.Image]:
    """Each another one, of (height, width)."""
    draws = np.random.default_rng(number).integers(0, 256, (number, *size, 3), np.uint8)
    return [Image.fromarray(values) for values in draws]


def video_folder(root: Path, frames: list[Image.Image]) -> Path:
    root.mkdir(parents=True)
    for number, frame in enumerate(frames):
        (root / f"{number:03}.png").write_bytes(stored(frame))
    return root


def video_file(path: Path, frames: list[Image.Image], rate: int = 10) -> Path:
    """Frames in a lossless codec, so that each decoded one is known."""
    import av

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("ffv1", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return path


def silence(path: Path) -> Path:
    """A file that sounds and shows nothing."""
    import av

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def strange_videos(root: Path) -> dict[str, str]:
    """Videos that cannot be used, below ``root``, and what is said of each."""
    whole = video_file(root / "whole.mkv", frames_of(8)).read_bytes()
    (root / "text.mp4").write_bytes(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n")
    (root / "empty.mkv").write_bytes(b"")
    (root / "cut.mkv").write_bytes(whole[: len(whole) // 16])
    silence(root / "silent.mkv")
    video_file(root / "still.mkv", frames_of(1))
    video_folder(root / "alone", frames_of(1))
    video_folder(root / "uneven", [noise(1), noise(2, 16)])
    video_folder(root / "long", [Image.new("RGB", (402, 2))] * 2)
    video_folder(root / "broken", frames_of(3))
    (root / "broken" / "001.png").write_bytes(b"this is no picture\n")
    (root / "nothing").mkdir()
    return {
        "text.mp4": "text.mp4 is no video that can be read",
        "empty.mkv": "empty.mkv is empty",
        "cut.mkv": "cut.mkv ",
        "silent.mkv": "silent.mkv has no video",
        "still.mkv": "still.mkv has a single frame; give it as a picture",
        "alone": "alone has a single frame; give it as a picture",
        "uneven": "uneven has frames of different sizes",
        "long": "000.png is more than 200 times as long as wide",
        "broken": "001.png is no picture of a known format",
        "nothing": "nothing holds no pictures (.png",
    }
