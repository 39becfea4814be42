"""Video files: scans them once, chooses the frames that the model sees, and decodes them. Needs PyAV.

The decoder gets a file as bytes whose hashes are checked against the scan. A file may not name other files or be a list
of them.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.plugins import import_package
from mgpu_pipe.data.bad_samples import BadSampleError, decoding, unusable_files
from mgpu_pipe.data.cache import Progress, build_once, digest_of, write_json
from mgpu_pipe.data.containers import is_cut_short
from mgpu_pipe.data.files import is_no_data
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, fingerprints, open_data
from mgpu_pipe.data.images.decode_image import LEAST_SIDE, MODES, MOST_PIXELS, SIDEWAYS, SUFFIXES, pillow
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.ordered_work import scan_in_order
from mgpu_pipe.errors import DataError
from mgpu_pipe.system.local_files import is_file

if TYPE_CHECKING:
    from PIL.Image import Image


def frames_in(folder: Path) -> list[Path]:
    """Pictures of a folder in the order of their names, numbers by value: ffmpeg's frame2.png, then frame10.png."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    named = [folder / name for name in sorted(names, key=_by_number) if not is_no_data(name)]
    return [path for path in named if is_file(path)]


def _by_number(name: str) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


FEWEST = 4
"""Fewest frames of a short video, if it has them."""
_MATROSKA_ROUNDING_S = 1e-3
"""Seconds to which Matroska rounds times."""
_TIME_TOLERANCE = 0.01
"""Share of its time that a frame may be off at a constant rate, in addition to half a frame."""


class ClipFacts(NamedTuple):
    """Facts of a video file, from its scan.

    Attributes:
        frames: their number.
        height, width: of the frames, upright.
        rate: frames a second, on average.
        moments: at which second each frame comes; empty at a constant rate.
        mirrored: the file's display matrix mirrors the frames.
    """

    frames: int
    height: int
    width: int
    rate: float
    moments: tuple[float, ...] = ()
    mirrored: bool = False

    @classmethod
    def from_list(cls, value: Sequence[Any]) -> Self:
        """Reads the JSON form."""
        frames, height, width, rate, *more = value
        return cls(frames, height, width, rate, tuple(more[0]) if more else (), *more[1:])


class SeenFrames(NamedTuple):
    """Frames of a video that the model sees.

    Attributes:
        numbers: in ascending order; at a varying rate a number may occur twice.
        seconds: from one patch to the next.
        moments: at which second each comes.
    """

    numbers: list[int]
    seconds: float
    moments: tuple[float, ...]


def measure_rate(times: Sequence[float | None], claimed: float) -> tuple[float, tuple[float, ...]]:
    """Frames a second, and the time of each frame after the first in seconds; no times at a constant rate.

    Args:
        times: of each frame in seconds; a file may not say them.
        claimed: frames a second that the file states; 0 where it does not.
    """
    known = np.array([seconds_of for seconds_of in times if seconds_of is not None], np.float64)
    if len(known) < len(times) or not np.isfinite(known).all():
        return claimed, ()
    moments = np.maximum.accumulate(known - known[0])
    if moments[-1] <= 0:
        return claimed, ()
    rate = (len(moments) - 1) / float(moments[-1])
    if claimed > 0:
        late = np.abs(moments - np.arange(len(moments)) / claimed)
        if (late < 0.5 / claimed + _TIME_TOLERANCE * moments).all():
            return claimed, ()
    return rate, tuple(moments.tolist())


def choose_frames(facts: ClipFacts, data: PictureChatConfig, together: int, writes_times: bool) -> SeenFrames:
    """Chooses the frames of a video that the model sees; arguments of :func:`sample_frames`.

    At a varying rate a frame counts as often as an even grid of times falls on it. With ``writes_times`` each frame
    counts once.
    """
    chosen, seconds = sample_frames(facts.frames, facts.rate, data, together, writes_times)
    if not facts.moments:
        return SeenFrames(chosen.tolist(), seconds, tuple((chosen / facts.rate).tolist()))
    moments, number = np.array(facts.moments), len(chosen)
    if writes_times:
        wanted = np.linspace(0, moments[-1], number)
        after = np.searchsorted(moments, wanted).clip(1, len(moments) - 1)
        numbers = np.unique(after - (wanted - moments[after - 1] <= moments[after] - wanted))
    else:
        wanted = np.arange(number) * facts.frames / (facts.rate * number)
        numbers = np.searchsorted(moments, wanted + _MATROSKA_ROUNDING_S, side="right") - 1
    return SeenFrames(numbers.tolist(), seconds, tuple(moments[numbers].tolist()))


def sample_frames(
    total: int, rate: float, data: PictureChatConfig, together: int, writes_times: bool = False
) -> tuple[NDArray[np.int64], float]:
    """Samples frames of ``total`` at ``rate`` a second; returns them and the seconds from one patch to the next.

    Args:
        together: frames of a patch.
        writes_times: see :class:`Grid`: choose like Qwen3VLVideoProcessor, the last frame included.
    """
    if writes_times:
        number = min(max(int(total / rate * data.frames_per_second), FEWEST), data.max_frames, total)
        return np.linspace(0, total - 1, number).round().astype(np.int64), together * total / (number * rate)
    most = min(data.max_frames, total) // together * together
    wanted = max(total / rate * data.frames_per_second, FEWEST)
    number = int(min(wanted, most)) // together * together or total
    return (np.arange(number) * total / number).astype(np.int64), together * total / (number * rate)


FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif"
"""Formats that are decoded. ffmpeg's others may name further files, or are not videos."""
ONE = "has a single frame; give it as a picture"
CLIPS, CLIPS_FOLDER = "clips.json", "clips-4"
BY_MATRIX = {
    (True, False, False): None,
    (True, True, False): "FLIP_LEFT_RIGHT",
    (True, False, True): "FLIP_TOP_BOTTOM",
    (True, True, True): "ROTATE_180",
    (False, False, False): "TRANSPOSE",
    (False, False, True): "ROTATE_270",
    (False, True, False): "ROTATE_90",
    (False, True, True): "TRANSVERSE",
}
"""Pillow's transposition that makes a frame upright. Keys: whether the display matrix ``a b 0, c d 0`` keeps the axes,
and the signs of a and d, or of b and c (ISO/IEC 14496-12, 8.2.2)."""
MIRRORED = ("FLIP_LEFT_RIGHT", "FLIP_TOP_BOTTOM", "TRANSPOSE", "TRANSVERSE")
_FORMAT = 1
_POOL_FROM = 8


def pyav() -> Any:
    """Imports PyAV; ConfigError if it is not installed."""
    return import_package("av", "PyAV", "video", "data.paths", "video files", ", or give folders of frames")


def prepare_clips(data: PictureChatConfig, paths: Sequence[Path], cache: Path, progress: Progress) -> Path:
    """Builds or finds the cache folder of scanned videos: facts of the usable ones; the manifest names the others."""
    unusable = unusable_files(paths)
    prints = fingerprints([path for path in paths if path not in unusable], cache, progress) if paths else {}
    prints_of = [prints.get(path, unusable.get(path, "")) for path in paths]
    digests = [
        "" if fingerprint == "is empty" else fingerprint if isinstance(fingerprint, str) else fingerprint.digest
        for fingerprint in prints_of
    ]
    files = [[str(path.absolute()), digest] for path, digest in zip(paths, digests, strict=True)]
    content = digest_of(_FORMAT, digests)
    folder = cache / CLIPS_FOLDER / digest_of(_FORMAT, files)
    build_once(folder, partial(_build, data, paths, prints_of, content, progress))
    return folder


class StoredClips:
    """Scanned video files and their facts."""

    def __init__(self, folder: Path) -> None:
        known = json.loads((folder / CLIPS).read_text(encoding="utf-8"))
        self.paths, self.facts = list(known["paths"]), [ClipFacts.from_list(fields) for fields in known["facts"]]
        self._prints = [Fingerprint(size, tuple(blocks)) for size, blocks in known["held"]]
        self.digests = [fingerprint.digest for fingerprint in self._prints]

    def frames(self, place: int, numbers: Sequence[int], channels: int) -> list[Image]:
        """Decodes frames of a file, in the model's channels."""
        path = Path(self.paths[place])
        try:
            return frames_of(path, self._prints[place], numbers, channels)
        except ChangedFileError as error:
            raise DataError(f"{path}: changed since its scan; start the run again") from error


def frames_of(path: Path, fingerprint: Fingerprint | None, numbers: Sequence[int], channels: int) -> list[Image]:
    """Decodes frames of a file, in ascending order."""
    images, wanted = dict[int, Any](), set(numbers)
    with _decode(path, fingerprint) as (_, frames):
        for index, frame in enumerate(frames):
            if index in wanted:
                images[index] = _upright(frame).convert(MODES[channels])
            if index == numbers[-1]:
                break
    return [images[number] for number in numbers]


def _build(
    data: PictureChatConfig,
    paths: Sequence[Path],
    prints_of: Sequence[Fingerprint | str],
    content: str,
    progress: Progress,
    out: Path,
) -> dict[str, Any]:
    looks = list(zip(paths, prints_of, strict=True))
    facts = scan_in_order(looks, _look_at, data.tokenize_workers, progress, "look", pool_from=_POOL_FROM, at_once=1)
    good = [(path, known, fact) for (path, known), fact in zip(looks, facts, strict=True) if not isinstance(fact, str)]
    described = {
        "paths": [str(path.absolute()) for path, _, _ in good],
        "held": [[known.size, list(known.blocks)] for _, known, _ in good if not isinstance(known, str)],
        "facts": [list(fact) for _, _, fact in good],
    }
    write_json(out / CLIPS, described)
    bad = [[str(path), fact] for path, fact in zip(paths, facts, strict=True) if isinstance(fact, str)]
    return {"bad": bad, "content": content}


def _look_at(job: tuple[Path, Fingerprint | str]) -> ClipFacts | str:
    path, fingerprint = job
    return fingerprint if isinstance(fingerprint, str) else look(path, fingerprint)


def look(path: Path, fingerprint: Fingerprint | None = None) -> ClipFacts | str:
    """Scans a file: its facts, or why it cannot be used."""
    sizes, times, mirrored = list[tuple[int, int]](), list[float | None](), False
    with open_data(path, fingerprint) as file:
        if is_cut_short(file):
            return "is cut short"
    try:
        with _decode(path, fingerprint) as (stream, frames):
            for frame in frames:
                sizes.append(_size(frame))
                times.append(frame.time)
                mirrored = mirrored or turned_by_matrix(frame) in MIRRORED
            claimed = float(stream.average_rate or stream.guessed_rate or 0)
    except BadSampleError as error:
        return str(error)
    if len(sizes) < 2:
        return ONE if sizes else "has no frames"
    if len(set(sizes)) > 1:
        return "has frames of different sizes"
    rate, moments = measure_rate(times, claimed)
    if rate <= 0:
        return "does not say how many frames a second it has"
    return ClipFacts(len(sizes), *sizes[0], rate, moments, mirrored)


@contextmanager
def _decode(path: Path, fingerprint: Fingerprint | None) -> Iterator[tuple[Any, Iterator[Any]]]:
    """First video stream of a file, and its frames; BadSampleError, or ChangedFileError after a change."""
    av = pyav()
    options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    with decoding("is no video that can be read"), open_data(path, fingerprint) as file:
        # Old recorders write titles in a local encoding.
        with av.open(file, container_options=options, metadata_errors="replace") as container:
            if not container.streams.video:
                raise BadSampleError("has no video")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise BadSampleError("has a codec that cannot be decoded here")
            if stream.width * stream.height > MOST_PIXELS or min(stream.width, stream.height) < LEAST_SIDE:
                raise BadSampleError(f"has frames of {stream.width} x {stream.height} pixels")
            yield stream, container.decode(stream)


def turned_by_matrix(frame: Any) -> str | None:
    """Pillow's transposition, by quarter turns, that makes a frame upright; None without a display matrix."""
    from av.sidedata.sidedata import Type

    matrix = frame.side_data.get(Type.DISPLAYMATRIX)
    if matrix is None:
        return None
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(matrix))
    straight = abs(a) + abs(d) >= abs(b) + abs(c)
    first, second = (a, d) if straight else (b, c)
    return BY_MATRIX[straight, first < 0, second < 0]


def _size(frame: Any) -> tuple[int, int]:
    """Upright height and width."""
    sideways = turned_by_matrix(frame) in SIDEWAYS
    return (frame.width, frame.height) if sideways else (frame.height, frame.width)


def _upright(frame: Any) -> Image:
    turned, image = turned_by_matrix(frame), frame.to_image()
    upright: Image = image if turned is None else image.transpose(pillow().Transpose[turned])
    return upright
