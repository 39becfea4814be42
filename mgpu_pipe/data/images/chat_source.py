"""Sources of conversations with pictures: reads their rows and scans what they show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.audio.chat_sounds import prepare_sounds, unfit_sounds
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.bad_samples import OR_SKIP, report_bad_samples
from mgpu_pipe.data.cache import Progress, build_once, digest_of, read_manifest
from mgpu_pipe.data.earlier_tables import marks_of_tables
from mgpu_pipe.data.file_lists import Entry
from mgpu_pipe.data.fingerprint import fingerprints
from mgpu_pipe.data.images.chat_rows import COLUMN, ChatRow, rows_of
from mgpu_pipe.data.images.check_images import check_row
from mgpu_pipe.data.images.decode_image import SUFFIXES
from mgpu_pipe.data.images.grids import TOO_LONG, GridPixels, known_shapes, shapes_in, too_long
from mgpu_pipe.data.images.image_keys import ChatRules, PictureChatConfig, chat_rules
from mgpu_pipe.data.images.picture_files import FILES
from mgpu_pipe.data.images.pixels import Pixels
from mgpu_pipe.data.images.scan_images import picture_digests, prepare_files
from mgpu_pipe.data.images.videos import ONE, ClipFacts, StoredClips, choose_frames, frames_in, prepare_clips
from mgpu_pipe.data.images.visual_inputs import GROUPS, PICTURE, SOUND, VisualInput, linked_frames, write_visual_index
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.data.tables import keep_in
from mgpu_pipe.data.text.chat_templates import places_taken
from mgpu_pipe.data.text.conversations import EVERY_PLACE
from mgpu_pipe.data.text.documents import Document, Source
from mgpu_pipe.data.text.earlier_versions import AGAIN, ANEW
from mgpu_pipe.data.text.file_source import contents_of, unusable_or_raise
from mgpu_pipe.data.text.heldout_split import first_of_groups, held_out, held_out_groups
from mgpu_pipe.data.text.notes import Notes
from mgpu_pipe.data.text.prepare_text import tokenise
from mgpu_pipe.data.text.token_store import TokenStore, save_array
from mgpu_pipe.data.text.tokenizer import TokenizerInfo
from mgpu_pipe.errors import DataError
from mgpu_pipe.system.local_files import is_folder

_FORMAT = 3


class ChatFolders(NamedTuple):
    """Cache folders of a source's conversations: tokens, index of visuals, pictures, videos and recordings (None for
    a model that hears none)."""

    tokens: Path
    visuals: Path
    pictures: Path
    clips: Path
    sounds: Path | None


TRAINED = "no picture"
"""Key of questions without a picture. Its hash is one of the largest, so they are trained on and not held out."""


@dataclass(frozen=True)
class ChatSource:
    """Conversations of a source and their visual inputs.

    Attributes:
        plain: the keys that read :attr:`source`, whose messages have one form.
        together: frames of a patch.
        writes_times: the model reads the times of a video's pictures.
        pictures: numbers of each conversation's visuals, in ``visuals``.
        visuals: pictures by their index in ``entries``, video files by theirs in ``clips``, recordings by theirs in
            ``sounds``.
        entries: picture files, each once; empty for generated pictures.
        keys: of each conversation, for the held-out split.
        places: of the kinds of files that the model takes.
        rates: frames a second that rows state for frame folders: (number in ``visuals``, rate).
        bad: videos that cannot be used, and why.
        skipped: rows left out, and why.
        notes: on the rows.
    """

    plain: PictureChatConfig
    together: int
    writes_times: bool
    source: Source
    pictures: list[tuple[int, ...]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    visuals: list[VisualInput] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    clips: list[Path] = field(default_factory=list)
    sounds: list[Entry] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    places: tuple[str, ...] = EVERY_PLACE
    rates: list[tuple[int, float]] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)

    @classmethod
    def from_config(
        cls, model: ModelConfig, data: DataConfig, key: str, pixels: Pixels, cache: Path, progress: Progress
    ) -> Self:
        """Reads the rows of ``key``; ConfigError or DataError for a path, row or video that cannot work."""
        assert isinstance(data, PictureChatConfig)
        plain = replace(data, messages_column=COLUMN, format="messages")
        together, writes_times = (
            (pixels.grid.frames, pixels.grid.has_timestamps) if isinstance(pixels, GridPixels) else (1, False)
        )
        rules = chat_rules(data)
        if rules is not None:
            return cls._from_rules(plain, together, writes_times, rules)
        paths = files.expand_paths(data.paths, key)
        unusable = unusable_or_raise(paths, data.on_bad_sample)
        known = fingerprints([path for path in paths if path not in unusable], cache, progress)

        taken = places_taken(str(model.type or model_field(model, "model_type")), model_field(model, "audio_config"))

        def rows(faults: list[tuple[str, str]] | None = None) -> Iterator[ChatRow]:
            return rows_of(data, paths, known, keep_in(cache), partial(check_row, model), faults, taken=taken)

        def documents_of() -> Iterator[Document]:
            return (Document(row.text, row.origin, row.size, key=row.key) for row in rows())

        size = sum(content.size for content in known.values())
        chats = cls(plain, together, writes_times, Source(data.source, "", size, documents_of, "chat"), places=taken)
        numbers, places, marks = dict[tuple[Path, str, float], int](), dict[Path, int](), set[str]()
        for row in rows(chats.skipped):
            chats.notes.add_unused(row.origin, row.unused)
            visuals = list(zip(row.pictures, row.kinds, row.rates, strict=True))
            for visual in visuals:
                if visual not in numbers:
                    numbers[visual] = len(numbers)
                    chats.visuals.append(chats._visual(*visual, row.origin, places))
                    chats.rates.extend([(numbers[visual], visual[2])] if visual[2] else [])
            chats.pictures.append(tuple(numbers[visual] for visual in visuals))
            chats.origins.append(row.origin)
            chats.keys.append(row.key)
            marks.add(row.mark)
        columns = (data.messages_column, data.image_column, data.video_column, data.format)
        contents = contents_of(paths, unusable, known)
        content: list[Any] = [columns, contents, *marks_of_tables(contents, known, cache)]
        # The model also decides which rows are usable.
        content += [[Path(origin).name for origin, _ in chats.skipped]] if chats.skipped else []
        content += [mark for mark in (ANEW, AGAIN) if mark in marks]
        return replace(chats, source=replace(chats.source, identity=digest_of("picture_chats", *content)))

    @classmethod
    def _from_rules(cls, plain: PictureChatConfig, together: int, writes_times: bool, rules: ChatRules) -> Self:
        name = plain.source
        questions, visuals = rules.questions(together)
        documents = [
            Document(
                question.text,
                f"data.source={name}: {question.pair}",
                1,
                key=question.pair if question.pictures else TRAINED,
            )
            for question in questions
        ]
        content = digest_of(name, [(question.text, question.pictures) for question in questions])
        source = Source(name, content, len(questions), lambda: iter(documents), "chat")
        origins = [document.origin for document in documents]
        return cls(
            plain, together, writes_times, source, [question.pictures for question in questions], origins, visuals
        )

    def _visual(self, path: Path, kind: str, rate: float, origin: str, places: dict[Path, int]) -> VisualInput:
        """Builds the visual input of a row's file; ``rate`` is the row's, and ``places`` maps files to entries."""
        if kind == "sound":
            self.sounds.append(Entry(path, "", origin))
            return VisualInput((len(self.sounds) - 1,), clip=SOUND)
        video = kind == "video"
        if video and not is_folder(path):
            self.clips.append(path)
            return VisualInput((), 0.0, len(self.clips) - 1)
        frames, seconds, moments = [path], PICTURE, tuple[float, ...]()
        if video:
            data = self.plain
            try:
                frames = frames_in(path)
            except OSError as error:
                self.bad.append((str(path), f"cannot be read: {error.strerror}"))
                return VisualInput((), 0.0)
            if len(frames) < 2:
                self.bad.append((str(path), ONE if frames else f"holds no pictures ({', '.join(SUFFIXES)})"))
                return VisualInput((), 0.0)
            facts = ClipFacts(len(frames), 0, 0, rate or data.frames_per_second)
            seen = choose_frames(facts, data, self.together, self.writes_times)
            frames, seconds, moments = [frames[number] for number in seen.numbers], seen.seconds, seen.moments
        self.entries.extend(Entry(frame, "", origin) for frame in frames if frame not in places)
        return VisualInput(tuple(places.setdefault(frame, len(places)) for frame in frames), seconds, moments=moments)

    def prepare(
        self,
        pixels: Pixels,
        window: LogMel | None,
        tokenizer: TokenizerInfo,
        standing: list[int],
        cache: Path,
        progress: Progress,
        placeholders: tuple[str, ...] = (),
    ) -> ChatFolders:
        """Builds or finds the folders.

        Args:
            window: of the model's spectrograms; None where it hears nothing.
            standing: placeholder tokens of pictures, videos and recordings.
            placeholders: the model's other such tokens, which stay text in a message.

        Raises:
            DataError: a picture, video or recording that cannot be used, with ``data.on_bad_sample=stop``.
        """
        tokens = tokenise(self.plain, self.source, tokenizer, cache, progress, self.places, placeholders)
        chosen = self._among(TokenStore.open(tokens))
        return chosen.prepare_visuals(tokens, pixels, window, standing, cache, progress)

    def _among(self, store: TokenStore) -> Self:
        """Keeps the conversations that the chat template takes, so that rows and visuals correspond."""
        if store.usable is None:
            return self
        rows = np.flatnonzero(store.usable).tolist()
        pictures, origins = [self.pictures[row] for row in rows], [self.origins[row] for row in rows]
        return replace(self, pictures=pictures, origins=origins, keys=[self.keys[row] for row in rows if self.keys])

    def prepare_visuals(
        self, tokens: Path, pixels: Pixels, window: LogMel | None, standing: list[int], cache: Path, progress: Progress
    ) -> ChatFolders:
        """Builds or finds the folders, given that of the conversations' tokens."""
        data = self.plain
        rules = chat_rules(data)
        if rules is not None and rules.build_pictures is not None:
            pictures = rules.build_pictures(cache, self.source.identity)
        else:
            pictures = prepare_files(data, self.entries, pixels.channels, cache, progress)
        clips = prepare_clips(data, self.clips, cache, progress)
        if window is not None and rules is not None and rules.build_sounds is not None:
            sounds: Path | None = rules.build_sounds(cache, window.rate, progress)
        else:
            sounds = prepare_sounds(self.sounds, window, data.tokenize_workers, cache, progress) if window else None
        stored = StoredClips(clips)
        visuals = self._place(pictures, stored, sounds)
        misplaced = self._find_misplaced(tokens, standing)
        bad = [*self.skipped, *self.bad, *misplaced.values()]
        scanned = [pictures, clips, *([sounds] if sounds else [])]
        bad += [tuple(entry) for folder in scanned for entry in (read_manifest(folder) or {})["bad"]]
        bad += unfit_sounds(sounds, window) if sounds and window else []
        if isinstance(pixels, GridPixels):
            bad += [*too_long(pixels.grid, pictures), *self._uneven_folders(visuals, pictures)]
            for path, fact in zip(stored.paths, stored.facts, strict=True):
                bad += [] if all(pixels.grid.places(fact.height, fact.width)) else [(path, TOO_LONG)]
        kind = ("a picture or video", "pictures and videos") if self.clips else ("a picture", "pictures")
        kind = ("a file of a conversation", "files of conversations") if self.sounds else kind
        report_bad_samples(bad, data.on_bad_sample, kind)
        pictures_of = self.pictures
        if misplaced:  # an unusable picture leaves the conversation out
            pictures_of = [
                (len(visuals),) if row in misplaced else numbers for row, numbers in enumerate(self.pictures)
            ]
            visuals = [*visuals, VisualInput((-1,))]
        chosen = (data.frames_per_second, data.max_frames, self.together, self.writes_times)
        # Only content that an older version showed differently gets a new name.
        anew: list[Any] = [fact for fact in stored.facts if fact.moments or fact.mirrored]
        contents = _content_of_visuals(pictures_of, visuals, pictures, stored, sounds) if self.keys else []
        leaders = self._leaders(tokens, contents) if self.keys else None
        anew += [["rates", self.rates]] if self.rates else []
        anew += [["groups", leaders.tolist()]] if leaders is not None else []
        anew += [["shown", contents]] if self.keys else []
        anew += [["sounds", _content(sounds)]] if sounds else []
        # The cache keeps paths. A run identifies its data by content alone, so it resumes after files were moved.
        content = f"{tokens.name}.shown-{digest_of(_FORMAT, _content(pictures), _content(clips), *chosen, *anew)}"
        out = cache / "tokens" / f"{content}-{digest_of(pictures.name, clips.name)}"
        build_once(out, partial(_write, pictures_of, visuals, leaders, content))
        return ChatFolders(tokens, out, pictures, clips, sounds)

    def _place(self, pictures: Path, clips: StoredClips, sounds: Path | None) -> list[VisualInput]:
        """Visuals with the indices of their frames in these folders."""
        if not self.visuals or not (self.entries or self.clips or self.sounds):
            return self.visuals
        data = self.plain
        place = _places(json.loads((pictures / FILES).read_text(encoding="utf-8"))["paths"])
        clip = _places(clips.paths)
        sound = _places(json.loads((sounds / FILES).read_text(encoding="utf-8"))["paths"]) if sounds else {}
        frames = [place.get(str(entry.path.absolute()), -1) for entry in self.entries]
        placed = list[VisualInput]()
        for visual in self.visuals:
            if visual.is_sound:
                path = str(self.sounds[visual.frames[0]].path.absolute())
                placed.append(replace(visual, frames=(sound.get(path, -1),)))
                continue
            index = -1 if visual.clip < 0 else clip.get(str(self.clips[visual.clip].absolute()), -1)
            if index >= 0:
                seen = choose_frames(clips.facts[index], data, self.together, self.writes_times)
                placed.append(VisualInput(tuple(seen.numbers), seen.seconds, index, seen.moments))
            else:
                placed.append(replace(visual, frames=tuple(frames[number] for number in visual.frames), clip=-1))
        return placed

    def _uneven_folders(self, visuals: list[VisualInput], pictures: Path) -> Iterator[tuple[str, str]]:
        """Folders whose frames have different sizes."""
        if not self.entries:
            return
        shapes = shapes_in(known_shapes(pictures))
        for visual, placed in zip(self.visuals, visuals, strict=True):
            sizes = (
                {tuple(shapes[frame].tolist()) for frame in placed.frames if frame >= 0} if visual.clip == -1 else set()
            )
            if len(sizes) > 1:
                yield str(self.entries[visual.frames[0]].path.parent), "has frames of different sizes"

    def _leaders(self, tokens: Path, contents: list[list[object]]) -> NDArray[np.int64] | None:
        """Leaders of :func:`first_of_groups`; None where no conversation changes sides."""
        fraction = 0.0 if self.plain.validation_paths else self.plain.validation_fraction
        leaders, hashes = first_of_groups(linked_frames(contents), self.keys), TokenStore.open(tokens).hashes
        if leaders is None or np.array_equal(held_out_groups(hashes, fraction, leaders), held_out(hashes, fraction)):
            return None
        return leaders

    def _find_misplaced(self, tokens: Path, standing: list[int]) -> dict[int, tuple[str, str]]:
        """Conversations whose picture places the template drops, as origin and reason by number; or DataError."""
        store = TokenStore.open(tokens)
        counts = np.array([len(numbers) for numbers in self.pictures], np.int64)
        starts = np.concatenate([[0], np.cumsum(np.isin(store.tokens, standing))])
        picture_tokens = starts[store.offsets[1:]] - starts[store.offsets[:-1]]
        faults = {
            int(row): (
                self.origins[row],
                f"the chat template keeps {picture_tokens[row]} of {counts[row]} places of pictures",
            )
            for row in np.flatnonzero(picture_tokens != counts)
        }
        every = len(faults) >= np.count_nonzero(counts)
        if faults and (every or self.plain.on_bad_sample == "stop"):
            origin, reason = next(iter(faults.values()))
            raise DataError(f"{origin}: {reason}; give another one by data.chat_template{'' if every else OR_SKIP}")
        return faults


def _content_of_visuals(
    conversations: list[tuple[int, ...]],
    visuals: list[VisualInput],
    pictures: Path,
    clips: StoredClips,
    sounds: Path | None,
) -> list[list[object]]:
    """Content of each conversation's visuals; an unusable visual gives its number."""
    digests, sound_digests = picture_digests(pictures), picture_digests(sounds) if sounds else []
    content = list[object]()
    for place, visual in enumerate(visuals):
        if visual.clip >= 0:
            content.append(("file", clips.digests[visual.clip]))
        elif visual.is_sound and visual.frames[0] >= 0:
            content.append(("sound", sound_digests[visual.frames[0]]))
        elif not visual.is_sound and visual.frames and min(visual.frames) >= 0:
            content.append((visual.is_video, *(digests[frame] for frame in visual.frames)))
        else:
            content.append(place)
    return [[content[place] for place in numbers] for numbers in conversations]


def _write(
    conversations: list[tuple[int, ...]],
    visuals: list[VisualInput],
    leaders: NDArray[np.int64] | None,
    content: str,
    out: Path,
) -> dict[str, Any]:
    if leaders is not None:
        save_array(out / GROUPS, leaders)
    return {**write_visual_index(out, conversations, visuals), "content": content}


def _content(folder: Path) -> str:
    """Digest of a cache folder's content; the name itself for generated pictures."""
    return str((read_manifest(folder) or {}).get("content", folder.name))


def _places(paths: list[str]) -> dict[str, int]:
    return {path: number for number, path in enumerate(paths)}
