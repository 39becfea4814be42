"""Visual inputs of conversations: pictures and videos, in the order of their places, and the tokens of these places.

A cache folder holds the index as arrays. Conversation ``c`` shows ``pictures[offsets[c] : offsets[c + 1]]``, numbers of
visuals. Visual ``v`` has the frames ``frames[starts[v] : starts[v + 1]]``: frame numbers of the video file
``clips[v]``, or, where that is -1, indices into the folder of pictures (-1 for an unusable one); where it is -2, one
index into the folder of recordings. ``seconds`` is the time from one patch of a video to the next, nan for others;
``moments`` are the times of the frames in seconds. ``groups`` exists where conversations share pictures under several
keys of the held-out split: the leader whose side each takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.architectures.find import sight_of
from mgpu_pipe.architectures.pictures import BEGIN, END, Grid, Parts, PatchGrid
from mgpu_pipe.architectures.tiles import Tiles
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.cache import read_manifest
from mgpu_pipe.data.images.pixels import vision_field
from mgpu_pipe.data.model_field import model_field, model_field_or_default
from mgpu_pipe.data.text.conversations import AUDIO, EVERY_PLACE, PLACE, VIDEO
from mgpu_pipe.data.text.token_store import load_array, save_array
from mgpu_pipe.data.text.tokenizer import TokenizerInfo
from mgpu_pipe.data.text.tokenizer_folder import TOKENIZER, json_file
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def placeholder_tokens(
    model: ModelConfig, data: DataConfig, tokenizer: TokenizerInfo, has_videos: bool
) -> tuple[int, int | None]:
    """Placeholder tokens of pictures and of videos (None without any); ConfigError if tokenizer and model differ."""
    image = _token(model, data, tokenizer, PLACE, "image_token_index", "image_token_id")
    return image, _token(model, data, tokenizer, VIDEO, "video_token_id") if has_videos else None


def audio_token(model: ModelConfig, data: DataConfig, tokenizer: TokenizerInfo) -> int:
    """Id of the placeholder token of recordings; ConfigError as :func:`placeholder_tokens`."""
    return _token(model, data, tokenizer, AUDIO, "audio_token_index", "audio_token_id")


def opener_of(tokenizer: Path, model_type: str, field: Callable[[str], Any]) -> int | None:
    """Token that the template writes for a picture instead of a placeholder; ``field`` reads the model's."""
    from tokenizers import Tokenizer

    name = sight_of(model_type).opener
    if not name:
        return None
    read = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    opener = field(name)
    opener = read.token_to_id(name) if opener is None else opener
    if opener is None:
        return None
    knows = read.token_to_id(PLACE) is None and read.id_to_token(opener) is not None
    return int(opener) if knows else None


def placeholder_texts(model: ModelConfig, tokenizer: TokenizerInfo) -> tuple[str, ...]:
    """Texts of a published model's tokens of pictures, videos and recordings, which no message means by writing them;
    without :data:`EVERY_PLACE`."""
    if model.path is None:
        return ()
    kinds = ("image", "video", "audio", "boi", "boa")
    fields = [model_field_or_default(model, f"{kind}_token_{suffix}") for kind in kinds for suffix in ("id", "index")]
    added = {
        entry["id"]: entry["content"] for entry in json_file(tokenizer.folder / TOKENIZER).get("added_tokens") or ()
    }
    opener = sight_of(str(model_field(model, "model_type"))).opener
    texts = dict.fromkeys([*(added[number] for number in fields if number in added), *({opener} & {*added.values()})])
    return tuple(text for text in texts if text not in EVERY_PLACE)


def _token(model: ModelConfig, data: DataConfig, tokenizer: TokenizerInfo, place: str, *fields: str) -> int:
    """Id of a placeholder token, which ``fields`` of the model may name; ConfigError without or with another id."""
    from tokenizers import Tokenizer

    tokens = (vision_field(model, name) for name in fields)
    known = next((token for token in tokens if token is not None), None)
    read = Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    number: int | None = read.token_to_id(place)
    if number is None and model.path is not None and known is not None and read.id_to_token(known) is not None:
        return int(known)  # the model's chat template writes another token
    if number is None:
        fix = "name a chat template by data.chat_template, with which it gets the token"
        raise ConfigError("data.tokenizer", data.tokenizer, fix, f"it has no token {place}")
    if model.path is not None and known != number:
        reason = f"its token {place} is {number}, and the model's {fields[0]} {known}"
        raise ConfigError("data.tokenizer", data.tokenizer, "use the model's own tokenizer", reason)
    return number


class PlaceholderTokens:
    """Tokens that replace the placeholder of a picture or a video.

    Args:
        tokenizer: its folder.
        parts: of a model that sees pictures in parts or tiles; a text names each.
        opened: the token that stands for a picture in a text, and that of its places; None where one token is both.
    """

    def __init__(
        self, tokenizer: Path, parts: Parts | Tiles | PatchGrid | None, opened: tuple[int, int] | None = None
    ) -> None:
        self._folder, self._parts, self._opened = tokenizer, parts, opened
        self._read: Tokenizer | None = None
        self._known: dict[tuple[Any, ...], NDArray[np.int64]] = {}

    def ids(self, token: int, places: Sequence[int], times: Sequence[float] = ()) -> NDArray[np.int64]:
        """Placeholder tokens of a visual; empty for an unusable one.

        Args:
            token: that stands for it.
            places: in time, down and across; of parts their number.
            times: seconds of each patch, where the model family writes them into the text.
        """
        if self._opened is not None and self._parts is None and all(places):
            return np.array([token, *[self._opened[1]] * int(np.prod(places))], np.int64)
        if not all(places) or (self._parts is None and not times):
            return np.full(int(np.prod(places)), token, np.int64)
        key = (token, *map(int, places), *times)
        if key not in self._known:
            tokenizer = self._tokenizer()
            place = tokenizer.id_to_token(token if self._opened is None else self._opened[1])
            assert place is not None, "it wrote it"
            if self._parts is None:
                each = f"{BEGIN}{place * int(places[1] * places[2])}{END}"
                text = "".join(f"<{time:.1f} seconds>{each}" for time in times)
            else:
                text = self._parts.text(place, int(places[1]), int(places[2]))
            self._known[key] = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        return self._known[key]

    def knows(self, token: int) -> bool:
        """Whether the tokenizer has the token."""
        return self._tokenizer().id_to_token(token) is not None

    def _tokenizer(self) -> Tokenizer:
        if self._read is None:
            from tokenizers import Tokenizer

            self._read = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        return self._read

    def lengths(self, token: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of placeholder tokens of each picture, (pictures,)."""
        if self._parts is None:
            return places.prod(1) + (self._opened is not None) * places.all(1)
        different, which = np.unique(places, axis=0, return_inverse=True)
        return np.array([len(self.ids(token, count)) for count in different.tolist()], np.int64)[which.reshape(-1)]


NAMES = ("offsets", "pictures", "starts", "frames", "clips", "seconds", "moments")
GROUPS = "groups.npy"
PICTURE = float("nan")
SOUND = -2
"""Place of a recording's video file."""


@dataclass(frozen=True)
class VisualInput:
    """A picture, a video or a recording of a conversation.

    Attributes:
        frames: places of pictures or of a recording, or numbers of frames of a file.
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

    @property
    def is_sound(self) -> bool:
        return self.clip == SOUND

    def times(self, together: int) -> tuple[float, ...]:
        """Time of each patch of ``together`` frames: the middle of its first and last frame."""
        patches = [self.moments[start : start + together] for start in range(0, len(self.moments), together)]
        return tuple((span[0] + span[-1]) / 2 for span in patches)


@dataclass(frozen=True)
class VisualIndex:
    """Arrays of the index of visual inputs."""

    offsets: NDArray[np.int64]
    pictures: NDArray[np.int64]
    starts: NDArray[np.int64]
    frames: NDArray[np.int64]
    clips: NDArray[np.int64]
    seconds: NDArray[np.float64]
    moments: NDArray[np.float64]

    @classmethod
    def open(cls, folder: Path) -> VisualIndex:
        return cls(*(load_array(folder / f"{name}.npy") for name in NAMES))

    @staticmethod
    def leaders(folder: Path) -> NDArray[np.int64] | None:
        """Leaders whose side of the held-out split each conversation takes, (conversations,); None without groups."""
        return load_array(folder / GROUPS) if (folder / GROUPS).is_file() else None

    @staticmethod
    def content(folder: Path) -> str:
        """Digest of the conversations and what they show, independent of where files lie."""
        return str((read_manifest(folder) or {})["content"])

    def visual(self, number: int) -> VisualInput:
        piece = slice(int(self.starts[number]), int(self.starts[number + 1]))
        seconds, moments = float(self.seconds[number]), self.moments[piece].tolist()
        seen = tuple(moments) if seconds == seconds else ()
        return VisualInput(tuple(self.frames[piece].tolist()), seconds, int(self.clips[number]), seen)

    def places(
        self, grid: Grid | Parts | Tiles | PatchGrid, pictures: NDArray[np.int64], clips: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Places in time, down and across of visuals, (visuals, 3), 0 for unusable, from those of pictures and
        frames."""
        counts = np.diff(self.starts)
        there, of_file = (counts > 0) & (self.clips != SOUND), self.clips >= 0
        # An extra entry of zeros serves unusable pictures; frames of different sizes are unusable, too.
        known = np.concatenate([pictures, np.zeros((1, 2), np.int64)])
        ranges = self._frame_ranges(self.clips != -1)
        whole = [known[self.frames[begin:end]] if end > begin else known[-1:] for begin, end in ranges]
        sides = np.array([shape[0] if (shape == shape[0]).all() else (0, 0) for shape in whole], np.int64).reshape(
            -1, 2
        )
        sides[of_file] = clips[self.clips[of_file]]
        times = -(-counts // grid.frames)
        places: NDArray[np.int64] = np.column_stack([times, sides])
        return np.where((there & sides.all(1))[:, None], places, 0)

    def _frame_ranges(self, of_file: NDArray[np.bool_]) -> list[tuple[int, int]]:
        """Range of each visual's frames among those of pictures; empty for a video file's."""
        ends = np.where(of_file, self.starts[:-1], self.starts[1:])
        return list(zip(self.starts[:-1].tolist(), ends.tolist(), strict=True))


def linked_frames(contents: list[list[object]]) -> list[list[object]]:
    """Adds frames of a folder that are also pictures to ``contents``; others, such as black ones, link nothing."""
    pictures = {
        content for visuals in contents for content in visuals if isinstance(content, tuple) and content[0] is False
    }
    frames_of = [
        [
            (False, frame)
            for content in visuals
            if isinstance(content, tuple) and content[0] is True
            for frame in content[1:]
        ]
        for visuals in contents
    ]
    return [[*visuals, *pictures.intersection(frames)] for visuals, frames in zip(contents, frames_of, strict=True)]


def write_visual_index(
    out: Path, conversations: Sequence[Sequence[int]], visuals: Sequence[VisualInput]
) -> dict[str, Any]:
    """Writes the index of each conversation's visuals into the folder ``out``."""
    arrays: dict[str, tuple[list[Any], type[Any]]] = {
        "offsets": ([0, *np.cumsum([len(conversation) for conversation in conversations])], np.int64),
        "pictures": ([number for several in conversations for number in several], np.int64),
        "starts": ([0, *np.cumsum([len(visual.frames) for visual in visuals])], np.int64),
        "frames": ([frame for visual in visuals for frame in visual.frames], np.int64),
        "clips": ([visual.clip for visual in visuals], np.int64),
        "seconds": ([visual.seconds for visual in visuals], np.float64),
        "moments": (
            [moment for visual in visuals for moment in visual.moments or [PICTURE] * len(visual.frames)],
            np.float64,
        ),
    }
    for name, (values, dtype) in arrays.items():
        save_array(out / f"{name}.npy", np.array(values, dtype))
    return {"conversations": len(conversations), "pictures": len(visuals)}
