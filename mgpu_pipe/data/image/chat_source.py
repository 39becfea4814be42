"""Where conversations with pictures come from, and what they show, looked through once. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.cache import Progress, build_once, digest_of, read_manifest
from mgpu_pipe.data.compressed import identity_of
from mgpu_pipe.data.fingerprint import fingerprints
from mgpu_pipe.data.image.chat_rows import COLUMN, QUESTIONS, SHAPES, ChatRow, rows_of
from mgpu_pipe.data.image.check import check_rows
from mgpu_pipe.data.image.clips import ONE, StoredClips, chosen_frames, known_clips
from mgpu_pipe.data.image.decode import SUFFIXES
from mgpu_pipe.data.image.digit_questions import digit_questions
from mgpu_pipe.data.image.grids import TOO_LONG, GridPixels, known_shapes, shapes_in, too_long
from mgpu_pipe.data.image.keys import PictureChatConfig
from mgpu_pipe.data.image.moving_shapes import FRAMES, SECONDS, moving_shapes
from mgpu_pipe.data.image.pixels import Pixels
from mgpu_pipe.data.image.prepare import known_digits, known_files, say_bad
from mgpu_pipe.data.image.shown import PICTURE, Thing, write_shown
from mgpu_pipe.data.image.sources import FILES, digits_file, read_digits
from mgpu_pipe.data.listed import Entry
from mgpu_pipe.data.text.documents import Document, Source
from mgpu_pipe.data.text.prepare import tokenise
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.data.text.tokenizer import TokenizerInfo
from mgpu_pipe.errors import DataError

_FORMAT = 3
TRAINED = "no picture"
"""The key of questions without a picture. Its hash is one of the largest, so that they are trained on and not held
out."""


@dataclass(frozen=True)
class ChatSource:
    """The conversations of a source, and what makes them known.

    Attributes:
        plain: the configuration that reads :attr:`source`, whose messages are brought into one form.
        together: frames of a patch.
        told: the model is told the times of a video's pictures.
        pictures: of each conversation what it shows, by their places in ``things``.
        things: pictures by their places in ``entries``, video files by theirs in ``clips``.
        entries: picture files, each once; empty for what is drawn here.
        bad: videos that cannot be used, and why.
    """

    plain: RunConfig
    together: int
    told: bool
    source: Source
    pictures: list[tuple[int, ...]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    things: list[Thing] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    clips: list[Path] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, config: RunConfig, key: str, pixels: Pixels, cache: Path, progress: Progress) -> Self:
        """Of a run; ``key`` is that of its paths.

        Raises:
            ConfigError, DataError: a path or row that cannot work; a video that the model is not given.
        """
        data = config.data
        assert isinstance(data, PictureChatConfig)
        plain = replace(config, data=replace(data, messages_column=COLUMN, format="messages"))
        together, told = (pixels.grid.frames, pixels.grid.told) if isinstance(pixels, GridPixels) else (1, False)
        if data.source in (QUESTIONS, SHAPES):
            return cls._drawn_here(plain, together, told)
        paths = files.expand_paths(data.paths, key)
        known = fingerprints(paths, cache, progress)

        def rows() -> Iterator[ChatRow]:
            return (row for path in paths for row in rows_of(data, path, known[path]))

        def documents_of() -> Iterator[Document]:
            return (Document(row.text, row.origin, row.size, key=row.key) for row in rows())

        columns = (data.messages_column, data.image_column, data.video_column, data.format)
        content = digest_of("picture_chats", columns, [identity_of(path, known[path]) for path in paths])
        size = sum(known[path].size for path in paths)
        found = cls(plain, together, told, Source(data.source, content, size, documents_of, "chat"))
        numbers, places = dict[tuple[Path, bool], int](), dict[Path, int]()
        for row in rows():
            check_rows(config, [row])
            shown = list(zip(row.pictures, row.videos, strict=True))
            for one in shown:
                if one not in numbers:
                    numbers[one] = len(numbers)
                    found.things.append(found._thing(*one, row.origin, places))
            found.pictures.append(tuple(numbers[one] for one in shown))
            found.origins.append(row.origin)
        return found

    @classmethod
    def _drawn_here(cls, plain: RunConfig, together: int, told: bool) -> Self:
        name = plain.data.source
        if name == QUESTIONS:
            labels = [int(label) for label in read_digits(digits_file())[1]]
            asked = list(digit_questions(labels))
            things = [Thing((number,)) for number in range(len(labels))]
        else:
            _, asked = moving_shapes()
            firsts = range(0, len(asked) * FRAMES, FRAMES)
            moments = tuple(at * SECONDS for at in range(FRAMES))
            things = [Thing(tuple(range(one, one + FRAMES)), together * SECONDS, moments=moments) for one in firsts]
        documents = [
            Document(one.text, f"data.source={name}: {one.pair}", 1, key=one.pair if one.pictures else TRAINED)
            for one in asked
        ]
        content = digest_of(name, [(one.text, one.pictures) for one in asked])
        source = Source(name, content, len(asked), lambda: iter(documents), "chat")
        origins = [one.origin for one in documents]
        return cls(plain, together, told, source, [one.pictures for one in asked], origins, things)

    def _thing(self, path: Path, video: bool, origin: str, places: dict[Path, int]) -> Thing:
        """What a row names; ``places`` are those of its pictures among the entries."""
        if video and not path.is_dir():
            self.clips.append(path)
            return Thing((), 0.0, len(self.clips) - 1)
        frames, seconds, moments = [path], PICTURE, list[float]()
        if video:
            data = self.plain.data
            assert isinstance(data, PictureChatConfig)
            frames = [one for one in sorted(path.iterdir()) if one.suffix.lower() in SUFFIXES and one.is_file()]
            if len(frames) < 2:
                self.bad.append((str(path), ONE if frames else f"holds no pictures ({', '.join(SUFFIXES)})"))
                return Thing((), 0.0)
            rate = data.frames_per_second
            chosen, seconds = chosen_frames(len(frames), rate, data, self.together, self.told)
            frames, moments = [frames[at] for at in chosen.tolist()], (chosen / rate).tolist()
        self.entries.extend(Entry(one, "", origin) for one in frames if one not in places)
        return Thing(tuple(places.setdefault(one, len(places)) for one in frames), seconds, moments=tuple(moments))

    def known(
        self, pixels: Pixels, tokenizer: TokenizerInfo, standing: list[int], cache: Path, progress: Progress
    ) -> tuple[Path, Path, Path, Path]:
        """The folders of the tokens, of what they show, of the pictures and of the video files; made where they are
        missing.

        Args:
            standing: the tokens that stand for a picture or a video.

        Raises:
            DataError: a picture or video that cannot be used, with ``data.on_bad_sample=stop``.
        """
        data = self.plain.data
        assert isinstance(data, PictureChatConfig)
        tokens = tokenise(self.plain, self.source, tokenizer, cache, progress)
        if self.source.name == QUESTIONS:
            pictures = known_digits(cache)
        elif self.source.name == SHAPES:
            pictures = cache / "images" / self.source.identity
            build_once(pictures, _build_moving)
        else:
            pictures = known_files(data, self.entries, pixels.channels, cache, progress)
        clips = known_clips(data, self.clips, cache, progress)
        things = self._placed(pictures, StoredClips(clips))
        bad = [*self.bad, *(tuple(one) for folder in (pictures, clips) for one in (read_manifest(folder) or {})["bad"])]
        if isinstance(pixels, GridPixels):
            bad += [*too_long(pixels.grid, pictures), *self._uneven(things, pictures)]
            stored = StoredClips(clips)
            for path, (_, height, width, _) in zip(stored.paths, stored.facts, strict=True):
                bad += [] if all(pixels.grid.places(height, width)) else [(path, TOO_LONG)]
        say_bad(bad, data.on_bad_sample)
        made = (pictures.name, clips.name, data.frames_per_second, data.max_frames, self.together, self.told)
        shown = cache / "tokens" / f"{tokens.name}.shown-{digest_of(_FORMAT, *made)}"
        build_once(shown, partial(self._write, tokens, standing, things))
        return tokens, shown, pictures, clips

    def _placed(self, pictures: Path, clips: StoredClips) -> list[Thing]:
        """The things, with the places of their frames in these folders."""
        if not self.things or not (self.entries or self.clips):
            return self.things
        data = self.plain.data
        assert isinstance(data, PictureChatConfig)
        place = _places(json.loads((pictures / FILES).read_text(encoding="utf-8"))["paths"])
        clip = _places(clips.paths)
        frames = [place.get(str(one.path.absolute()), -1) for one in self.entries]
        placed = list[Thing]()
        for one in self.things:
            at = -1 if one.clip < 0 else clip.get(str(self.clips[one.clip].absolute()), -1)
            if at >= 0:
                total, _, _, rate = clips.facts[at]
                chosen, seconds = chosen_frames(total, rate, data, self.together, self.told)
                placed.append(Thing(tuple(chosen.tolist()), seconds, at, tuple((chosen / rate).tolist())))
            else:
                placed.append(replace(one, frames=tuple(frames[number] for number in one.frames), clip=-1))
        return placed

    def _uneven(self, things: list[Thing], pictures: Path) -> Iterator[tuple[str, str]]:
        """Folders whose frames have different sizes."""
        if not self.entries:
            return
        shapes = shapes_in(known_shapes(pictures))
        for own, one in zip(self.things, things, strict=True):
            sizes = {tuple(shapes[at].tolist()) for at in one.frames if at >= 0} if own.clip < 0 else set()
            if len(sizes) > 1:
                yield str(self.entries[own.frames[0]].path.parent), "has frames of different sizes"

    def _write(self, tokens: Path, standing: list[int], things: list[Thing], out: Path) -> dict[str, Any]:
        store = TokenStore.open(tokens)
        counts = np.array([len(one) for one in self.pictures], np.int64)
        starts = np.concatenate([[0], np.cumsum(np.isin(store.tokens, standing))])
        kept = starts[store.offsets[1:]] - starts[store.offsets[:-1]]
        for at in np.flatnonzero(kept != counts)[:1]:
            reason = f"the chat template keeps {kept[at]} of {counts[at]} places of pictures"
            raise DataError(f"{self.origins[at]}: {reason}; give another one by data.chat_template")
        return write_shown(out, self.pictures, things)


def _places(paths: list[str]) -> dict[str, int]:
    return {path: number for number, path in enumerate(paths)}


def _build_moving(out: Path) -> dict[str, Any]:
    frames, _ = moving_shapes()
    np.save(out / "pixels.npy", frames)
    return {"pictures": len(frames), "bad": []}
