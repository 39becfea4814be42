"""What conversations show: pictures and videos, in the order of their places. No torch.

In the cache a folder with arrays: conversation ``c`` shows the things ``pictures[offsets[c] : offsets[c + 1]]``, and
thing ``t`` has the frames ``frames[starts[t] : starts[t + 1]]``: of pictures, by their places in the pictures' folder,
-1 for one that cannot be used, or of the video file ``clips[t]`` by their numbers, where that is not -1. ``seconds`` is
from one patch of a video to the next, and nan for a picture; ``moments`` are the seconds at which frames are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.text.token_store import load_array, save_array
from mgpu_pipe.families.pictures import Grid, Parts

NAMES = ("offsets", "pictures", "starts", "frames", "clips", "seconds", "moments")
PICTURE = float("nan")


@dataclass(frozen=True)
class Thing:
    """A picture, or a video.

    Attributes:
        frames: places of pictures, or numbers of frames of a file.
        seconds: from one patch of a video to the next.
        clip: that file's place.
        moments: of a video, when each of its frames is seen, in seconds.
    """

    frames: tuple[int, ...]
    seconds: float = PICTURE
    clip: int = -1
    moments: tuple[float, ...] = ()

    @property
    def is_video(self) -> bool:
        return self.seconds == self.seconds

    def times(self, together: int) -> tuple[float, ...]:
        """When each patch of so many frames is seen: between its first and its last."""
        patches = [self.moments[at : at + together] for at in range(0, len(self.moments), together)]
        return tuple((one[0] + one[-1]) / 2 for one in patches)


@dataclass(frozen=True)
class Shown:
    """That folder's arrays."""

    offsets: NDArray[np.int64]
    pictures: NDArray[np.int64]
    starts: NDArray[np.int64]
    frames: NDArray[np.int64]
    clips: NDArray[np.int64]
    seconds: NDArray[np.float64]
    moments: NDArray[np.float64]

    @classmethod
    def open(cls, folder: Path) -> Shown:
        return cls(*(load_array(folder / f"{name}.npy") for name in NAMES))

    def thing(self, number: int) -> Thing:
        piece = slice(int(self.starts[number]), int(self.starts[number + 1]))
        seconds, moments = float(self.seconds[number]), self.moments[piece].tolist()
        seen = tuple(moments) if seconds == seconds else ()
        return Thing(tuple(self.frames[piece].tolist()), seconds, int(self.clips[number]), seen)

    def places(self, grid: Grid | Parts, pictures: NDArray[np.int64], clips: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in time, down and across of each thing, (things, 3); zeros for one that cannot be used.

        Args:
            pictures, clips: places down and across of each picture, and of each frame of a video file.
        """
        counts = np.diff(self.starts)
        there, of_file = counts > 0, self.clips >= 0
        # One more, of zeros, for what cannot be used; and frames of different sizes cannot.
        known = np.concatenate([pictures, np.zeros((1, 2), np.int64)])
        whole = [known[self.frames[begin:end]] if end > begin else known[-1:] for begin, end in self._pictured(of_file)]
        sides = np.array([one[0] if (one == one[0]).all() else (0, 0) for one in whole], np.int64).reshape(-1, 2)
        sides[of_file] = clips[self.clips[of_file]]
        times = -(-counts // grid.frames)
        found: NDArray[np.int64] = np.column_stack([times, sides])
        return np.where((there & sides.all(1))[:, None], found, 0)

    def _pictured(self, of_file: NDArray[np.bool_]) -> list[tuple[int, int]]:
        """Where the frames of each thing are among those of pictures; nowhere for a video file's."""
        ends = np.where(of_file, self.starts[:-1], self.starts[1:])
        return list(zip(self.starts[:-1].tolist(), ends.tolist(), strict=True))


def write_shown(out: Path, conversations: Sequence[Sequence[int]], things: Sequence[Thing]) -> dict[str, Any]:
    """Write that folder.

    Args:
        conversations: the things of each.
    """
    arrays: dict[str, tuple[list[Any], type[Any]]] = {
        "offsets": ([0, *np.cumsum([len(one) for one in conversations])], np.int64),
        "pictures": ([one for several in conversations for one in several], np.int64),
        "starts": ([0, *np.cumsum([len(one.frames) for one in things])], np.int64),
        "frames": ([frame for one in things for frame in one.frames], np.int64),
        "clips": ([one.clip for one in things], np.int64),
        "seconds": ([one.seconds for one in things], np.float64),
        "moments": ([at for one in things for at in one.moments or [PICTURE] * len(one.frames)], np.float64),
    }
    for name, (values, dtype) in arrays.items():
        save_array(out / f"{name}.npy", np.array(values, dtype))
    return {"conversations": len(conversations), "pictures": len(things)}
