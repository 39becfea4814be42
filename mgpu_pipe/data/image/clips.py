"""Video files: which of their frames the model sees, looking through them once, and decoding. Needs PyAV; no torch.

Frames are chosen as transformers' Qwen2VLVideoProcessor and Qwen3VLVideoProcessor choose them. A file is given to the
decoder as bytes that have the hashes of its first look; it may not name other files, nor be a list of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.hardware import cpu_cores
from mgpu_pipe.data.cache import Progress, build_once, digest_of, write_json
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, fingerprints, open_data
from mgpu_pipe.data.image.decode import LEAST_SIDE, MODES, MOST_PIXELS, BadImageError
from mgpu_pipe.data.image.keys import PictureChatConfig
from mgpu_pipe.data.ordered_work import work_in_order
from mgpu_pipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf"
"""ffmpeg's other formats may name further files, or are no videos."""
FEWEST = 4
"""Frames that a short video gives, where it has them."""
ONE = "has one frame; give it as a picture"
CLIPS = "clips.json"
_FORMAT = 1
_POOL_FROM = 8
"""Fewer videos are looked at here: starting processes takes longer."""


def pyav() -> Any:
    """PyAV.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import av
    except ImportError as error:
        fix = "install it: pip install 'mgpu_pipe[video]', or give folders of frames"
        raise ConfigError("data.paths", "video files", fix, "PyAV is not installed") from error
    return av


def chosen_frames(
    total: int, rate: float, data: PictureChatConfig, together: int, told: bool = False
) -> tuple[NDArray[np.int64], float]:
    """Which of ``total`` frames, ``rate`` a second, the model sees, and the seconds from one patch to the next.

    Args:
        together: frames of a patch.
        told: as of :class:`Grid`: the last frame is among them, and they are as Qwen3VLVideoProcessor chooses them.
    """
    if told:
        number = min(max(int(total / rate * data.frames_per_second), FEWEST), data.max_frames, total)
        return np.linspace(0, total - 1, number).round().astype(np.int64), together * total / (number * rate)
    most = min(data.max_frames, total) // together * together
    wanted = max(total / rate * data.frames_per_second, FEWEST)
    number = int(min(wanted, most)) // together * together or total
    return (np.arange(number) * total / number).astype(np.int64), together * total / (number * rate)


def known_clips(data: PictureChatConfig, paths: Sequence[Path], cache: Path, progress: Progress) -> Path:
    """The folder in the cache of what is known of video files, made if it is not there: those that can be used, and in
    its manifest the others."""
    prints = fingerprints([path for path in paths if path.stat().st_size], cache, progress) if paths else {}
    held = [prints.get(path) for path in paths]
    files = [[str(path.absolute()), one.digest if one else ""] for path, one in zip(paths, held, strict=True)]
    folder = cache / "clips" / digest_of(_FORMAT, files)
    build_once(folder, partial(_build, data, paths, held, progress))
    return folder


class StoredClips:
    """Video files that were looked through; ``facts`` are frames, height, width and frames a second of each."""

    def __init__(self, folder: Path) -> None:
        known = json.loads((folder / CLIPS).read_text(encoding="utf-8"))
        self.paths, self.facts = list(known["paths"]), [tuple(one) for one in known["facts"]]
        self._held = [Fingerprint(size, tuple(blocks)) for size, blocks in known["held"]]

    def frames(self, place: int, numbers: Sequence[int], channels: int) -> list[Image]:
        """Frames of a file, in the model's channels."""
        path = Path(self.paths[place])
        try:
            return frames_of(path, self._held[place], numbers, channels)
        except ChangedFileError as error:
            raise DataError(f"{path}: changed since the videos were looked through; start the run again") from error


def frames_of(path: Path, held: Fingerprint | None, numbers: Sequence[int], channels: int) -> list[Image]:
    """Frames of a file, in ascending order."""
    found = dict[int, Any]()
    with _decoded(path, held) as (_, frames):
        for at, frame in enumerate(frames):
            if at in numbers:
                found[at] = _upright(frame).convert(MODES[channels])
            if at == numbers[-1]:
                break
    return [found[number] for number in numbers]


def _build(
    data: PictureChatConfig, paths: Sequence[Path], held: Sequence[Fingerprint | None], progress: Progress, out: Path
) -> dict[str, Any]:
    workers = cpu_cores() if data.tokenize_workers == "auto" else data.tokenize_workers
    looks = list(zip(paths, held, strict=True))
    looked: Iterator[tuple[Any, ...] | str] = map(_looked, looks)
    if len(looks) >= _POOL_FROM and workers > 1:
        told = "a process that looks at videos died (killed, or out of memory): use data.tokenize_workers=1"
        looked = work_in_order(looks, workers, _looker, (), ahead=2, what=told)
    facts = list[tuple[Any, ...] | str]()
    for one in looked:
        facts.append(one)
        progress("look", len(facts), len(looks))
    good = [(path, known, fact) for (path, known), fact in zip(looks, facts, strict=True) if not isinstance(fact, str)]
    described = {
        "paths": [str(path.absolute()) for path, _, _ in good],
        "held": [[known.size, list(known.blocks)] for _, known, _ in good if known is not None],
        "facts": [list(fact) for _, _, fact in good],
    }
    write_json(out / CLIPS, described)
    return {"bad": [[str(path), fact] for path, fact in zip(paths, facts, strict=True) if isinstance(fact, str)]}


def _looker() -> Callable[[tuple[Path, Fingerprint | None]], tuple[Any, ...] | str]:
    return _looked


def _looked(one: tuple[Path, Fingerprint | None]) -> tuple[int, int, int, float] | str:
    path, held = one
    return "is empty" if held is None else look(path, held)


def look(path: Path, held: Fingerprint | None = None) -> tuple[int, int, int, float] | str:
    """Frames, height, width and frames a second of a file that can be used, or why it cannot."""
    try:
        with _decoded(path, held) as (stream, frames):
            sizes = [_size(frame) for frame in frames]
            rate = float(stream.average_rate or stream.guessed_rate or 0)
    except BadImageError as error:
        return str(error)
    if len(sizes) < 2:
        return ONE if sizes else "has no frames"
    if len(set(sizes)) > 1:
        return "has frames of different sizes"
    return (len(sizes), *sizes[0], rate) if rate > 0 else "does not say how many frames a second it has"


@contextmanager
def _decoded(path: Path, held: Fingerprint | None) -> Iterator[tuple[Any, Iterator[Any]]]:
    """A file's first video stream, and its frames.

    Raises:
        BadImageError: it cannot be used.
        ChangedFileError: it is another file than it was.
    """
    av = pyav()
    try:
        options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
        with open_data(path, held) as file, av.open(file, container_options=options) as container:
            if not container.streams.video:
                raise BadImageError("has no video")
            stream = container.streams.video[0]
            if stream.width * stream.height > MOST_PIXELS or min(stream.width, stream.height) < LEAST_SIDE:
                raise BadImageError(f"has frames of {stream.width} x {stream.height} pixels")
            yield stream, container.decode(stream)
    except av.FFmpegError as error:
        raise BadImageError(f"is no video that can be read ({error.strerror})") from error


def _size(frame: Any) -> tuple[int, int]:
    """Height and width, upright."""
    turned = frame.rotation % 180 == 90
    return (frame.width, frame.height) if turned else (frame.height, frame.width)


def _upright(frame: Any) -> Any:
    return frame.to_image().rotate(frame.rotation, expand=True)
