"""Rows of conversations with pictures: messages of the usual forms with a place for each picture.

A place is the text ``<image>`` in a message to the assistant (LLaVA's form), or a content part ``{"type": "image"}``
(transformers' and OpenAI's form). The parts name the pictures, or a column does, in the order of their places. Videos
work alike with the place ``<video>``, recordings with ``<audio>``. Such a text is no place in an answer, next to parts
that name every picture, or for a model that takes no such input. A question may name them: ``<img>a.png</img>``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import OR_SKIP, BadSampleError, Fault, rows_of_files, unusable_files
from mgpu_pipe.data.file_lists import fault_of, find_named, fix_of_missing
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.tables import LOOKED_AT, Keep, find_file, is_embedded, keep_nothing, row_lines
from mgpu_pipe.data.text.conversations import (
    AUDIO,
    EVERY_PLACE,
    LITERAL,
    PLACE,
    PLACES,
    SHAREGPT,
    VIDEO,
    columns_read,
    form_of,
    messages_of,
    sides_of,
    tools_of,
    unused_columns,
    write_literally,
)
from mgpu_pipe.data.text.earlier_versions import ANEW, mark_of
from mgpu_pipe.data.text.foreign_messages import ROLES, with_lists
from mgpu_pipe.errors import DataError
from mgpu_pipe.system.local_files import is_file, is_folder

COLUMN = "messages"
"""Column of :attr:`ChatRow.text` that holds the messages."""
ALSO = {PLACE: "image", VIDEO: "video", AUDIO: "audio"}
"""LLaVA's columns of a row's picture, of its video and of its recording."""
AUDIOS = "audios"
"""Column of the paths of a conversation's recordings."""
USUAL = ("images", "videos", AUDIOS)
"""Usual names of the columns of files; only for these :data:`ALSO` stands too."""
KINDS = {
    **{"image": PLACE, "image_url": PLACE, "video": VIDEO, "video_url": VIDEO},
    **{"audio": AUDIO, "audio_url": AUDIO},
}
"""Types of a content part that is a picture, a video or a recording."""
NAMES = ("bytes", "image", "video", "audio", "path", "url", "image_url", "video_url", "audio_url")
"""Fields of a part that name its picture."""
CUTS = ("video_start", "video_end", "audio_start", "audio_end")
"""Fields of a part that name the seconds of its file, as Qwen's utilities read them."""
INSIDE = re.compile(r"<(img|video|audio)>([^<>\n]+)</\1>")
"""A place with its file's name, as texts for Qwen-VL and Qwen-Audio have it."""
RATES = ("sample_fps", "fps")
"""Fields of a row or part that state a frame folder's frames a second."""


@dataclass(frozen=True)
class ChatRow:
    """One conversation.

    Attributes:
        text: a JSON object with its messages, each place a ``<image>`` in them.
        pictures: their files, in the order of the places; of videos files, or folders of frames; recordings too.
        videos: which of them are videos.
        sounds: which of them are recordings.
        key: decides the held-out split: the pictures as the row names them. So conversations about the same pictures
            stay on one side, wherever the folder lies.
        origin: where it stands.
        size: its share of the progress.
        unused: columns that nothing reads.
        rates: frames a second of folders of frames; 0 where the row does not state it, and of other inputs.
        mark: of a row that earlier versions read otherwise; empty for any other.
    """

    text: str
    pictures: tuple[Path, ...]
    videos: tuple[bool, ...]
    sounds: tuple[bool, ...]
    key: str
    origin: str
    size: int
    unused: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    mark: str = ""

    @property
    def kinds(self) -> list[str]:
        """``picture``, ``video`` or ``sound`` of each file."""
        named = zip(self.videos, self.sounds, strict=True)
        return ["video" if video else "sound" if sound else "picture" for video, sound in named]


Check = Callable[[ChatRow], None]


def first_rows(
    data: PictureChatConfig, patterns: Sequence[str], key: str, check: Check, taken: Sequence[str] = EVERY_PLACE
) -> list[ChatRow]:
    """First rows of each file; arguments and errors of :func:`rows_of`."""
    return list(rows_of(data, files.expand_paths(patterns, key), check=check, most=LOOKED_AT, taken=taken))


def rows_of(
    data: PictureChatConfig,
    paths: Sequence[Path],
    known: Mapping[Path, Fingerprint] | None = None,
    keep: Keep | None = None,
    check: Check = lambda row: None,
    faults: list[tuple[str, str]] | None = None,
    most: int | None = None,
    taken: Sequence[str] = EVERY_PLACE,
) -> Iterator[ChatRow]:
    """Yields the rows of tables.

    With ``data.on_bad_sample=skip`` it leaves out broken rows, and the rest of a broken table, as long as one row is
    whole. It still yields rows that name a missing file.

    Args:
        known: fingerprints of the tables; None reads them as they are.
        keep: takes files that the rows hold; None for a check.
        check: raises DataError for a row that the model cannot be given.
        faults: takes the place of each row that is left out, and why.
        most: rows of a table that are yielded at most.
        taken: places of the kinds of files that the model takes.

    Raises:
        ChangedFileError: a table changed since it was hashed.
        DataError: no row is whole; with ``data.on_bad_sample=stop``, a table that cannot be read, or a row that is
            broken, that names a file that is not there, or has not as many places as pictures.
    """
    skips, first, whole = data.on_bad_sample == "skip", "", False
    columns = (data.messages_column, data.image_column, data.video_column, AUDIOS, *ALSO.values())
    for path in paths:
        takes, expected, number = keep or keep_nothing(path), known.get(path) if known else None, 0
        unusable = unusable_files([path]) if skips else {}
        read = partial(row_lines, expected=expected, keep=dict.fromkeys(columns, takes), nested=True)
        make = partial(_checked_row, check=check, data=data, folder=path.parent, keep=takes, missing=skips, taken=taken)
        for row in rows_of_files([path], unusable, read, make):
            if isinstance(row, Fault):
                if not skips:
                    raise DataError(f"{row.message}{OR_SKIP}")
                first = first or row.message
                if faults is not None:
                    is_row = row.origin != str(path)
                    faults.append((row.origin, fault_of(row.message, row.origin)) if is_row else row.name_and_reason())
                continue
            number, whole = number + 1, True
            yield row
            if number == most:
                break
    if first and not whole:
        raise DataError(first)


def _checked_row(
    line: str,
    origin: str,
    size: int,
    check: Check,
    data: PictureChatConfig,
    folder: Path,
    keep: Keep,
    missing: bool,
    taken: Sequence[str],
) -> ChatRow:
    row = read_chat_row(line, origin, size, data, folder, keep, missing, taken)
    check(row)
    return row


def read_chat_row(
    line: str,
    origin: str,
    size: int,
    data: PictureChatConfig,
    folder: Path,
    keep: Keep,
    missing: bool,
    taken: Sequence[str] = EVERY_PLACE,
) -> ChatRow:
    """Parses a row; ``missing`` accepts names of missing files, ``taken`` are the places that the model takes."""
    row = files.json_row(line, origin, data.messages_column, data.image_column, data.video_column)
    if LITERAL in line or "\\ufdd3" in line.lower():
        raise DataError(f"{origin}: a message contains a Unicode noncharacter (U+FDD3); {files.FIX}")
    mark = mark_of(row, data.messages_column, "chat") or (ANEW if INSIDE.search(line) else "")
    text, named, rates = conversation_of(row, origin, data, keep, taken)
    pictures = tuple(find_named(folder, name) for name, _ in named)
    videos, sounds = (tuple(kind == place for _, kind in named) for place in (VIDEO, AUDIO))
    for picture, video, (name, _) in zip(pictures, videos, named, strict=True):
        if not missing and not is_file(picture) and not (video and is_folder(picture)):
            raise DataError(f"{origin}: there is no file {picture}; {fix_of_missing(folder, name)}")
    folders = [video and is_folder(picture) for picture, video in zip(pictures, videos, strict=True)]
    stated = iter(_rates_of(row, rates, sum(videos), origin) if any(folders) else [0.0] * sum(videos))
    rate_of = [next(stated) if video else 0.0 for video in videos]
    rates_read = RATES if any(folders) else ()
    read = columns_read(row, data.messages_column, data.format)
    unused = unused_columns(row, (*read, data.image_column, data.video_column, AUDIOS, *ALSO.values(), *rates_read))
    # A cached file is named by its content, so the cache's location does not matter.
    names = (Path(name).name if is_embedded(Path(name)) else name for name, _ in named)
    key = "\0".join(names) or text
    rated = tuple(rate * there for rate, there in zip(rate_of, folders, strict=True))
    return ChatRow(text, pictures, videos, sounds, key, origin, size, tuple(unused), rated, mark)


def _rates_of(row: dict[str, Any], in_parts: Sequence[object], videos: int, origin: str) -> list[float]:
    """Frames a second of each video of a row, from its parts or else its columns; 0 where unstated."""
    stated = in_parts if any(rate is not None for rate in in_parts) else _first(row, RATES)
    listed = stated if isinstance(stated, Sequence) and not isinstance(stated, str) else [stated] * videos
    if len(listed) != videos:
        raise DataError(f"{origin}: has {len(listed)} rates of frames, and {videos} videos; {files.FIX}")
    rates = []
    for value in listed:
        try:
            rate = 0.0 if value is None else float(value) if isinstance(value, str | int | float) else -1.0
        except (ValueError, OverflowError):
            rate = -1.0
        if isinstance(value, bool) or not (value is None or 0 < rate < math.inf):
            raise DataError(f"{origin}: the frames a second are {value!r}, not a number above 0; {files.FIX}")
        rates.append(rate)
    return rates


def _first(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    """First entry that is not empty."""
    return next((values[name] for name in names if values.get(name) is not None), None)


def conversation_of(
    row: dict[str, Any], origin: str, data: PictureChatConfig, keep: Keep, taken: Sequence[str] = EVERY_PLACE
) -> tuple[str, list[tuple[str, str]], list[object]]:
    """Messages of a row as JSON, its visual inputs as (file name, kind of place), and the rates in its video parts,
    None where unstated."""
    in_parts: dict[str, list[str | None]] = {PLACE: [], VIDEO: [], AUDIO: []}
    rates = list[object]()
    if form_of(row, data.messages_column, data.format) == "prompt_completion":
        row = with_lists(row, sides_of(row), (), origin)
    else:
        row = with_lists(row, (), columns_read(row, data.messages_column, data.format), origin)
    for column in (data.messages_column, SHAREGPT, *sides_of(row)):
        if isinstance(row.get(column), list):
            row[column] = [_with_places(message, in_parts, rates, origin, keep) for message in row[column]]
    messages = messages_of(row, origin, data.messages_column, data.format)
    named: dict[str, Iterator[str]] = {}
    kinds = []
    for place, column, what in (
        (PLACE, data.image_column, "pictures"),
        (VIDEO, data.video_column, "videos"),
        (AUDIO, AUDIOS, "recordings"),
    ):
        names, parts = _read_names(row, in_parts[place], origin, column, ALSO[place], keep), len(in_parts[place])
        if place not in taken and not names and not parts:
            continue
        kinds.append(place)
        _settle_literals(messages, place, all_in_parts=0 < parts == len(names))
        count = sum(str(message.get("content") or "").count(place) for message in messages)
        if len(names) != count:
            fix = f"write {place} where each belongs, and name each in column '{column}'"
            raise DataError(f"{origin}: has {len(names)} {what}, and places for {count}; {fix}")
        named[place] = iter(names)
    for message in messages:
        if LITERAL in (message["content"] or ""):
            for place in EVERY_PLACE:
                if place not in kinds:
                    message["content"] = message["content"].replace(write_literally(place, [place]), place)
    texts = (str(message.get("content") or "") for message in messages)
    places = [place for text in texts for place in PLACES.findall(text) if place in kinds]
    tools = tools_of(row, origin)
    content = {COLUMN: messages} if tools is None else {COLUMN: messages, "tools": tools}
    return json.dumps(content, ensure_ascii=False), [(next(named[kind]), kind) for kind in places], rates


def _settle_literals(messages: list[dict[str, Any]], place: str, all_in_parts: bool) -> None:
    """Marks the texts ``place`` of ``messages`` that are no places: in answers, and in texts next to parts if parts
    are ``all_in_parts``."""
    literal = write_literally(place, [place])
    for message in messages:
        content = message["content"]
        if content and message["role"] == "assistant":
            message["content"] = write_literally(content, [place])
        elif content and not all_in_parts:
            message["content"] = content.replace(literal, place)


def _with_places(
    message: object, named: dict[str, list[str | None]], rates: list[object], origin: str, keep: Keep
) -> object:
    """Replaces each picture or video part of ``message``, and each name in a question, by a place, and marks what its
    texts spell like one. Appends the file names to ``named`` and the rates of videos to ``rates``."""
    if not isinstance(message, dict):
        return message

    def place_of(match: re.Match[str]) -> str:
        place = PLACE if match[1] == "img" else f"<{match[1]}>"
        named[place].append(_path(match[2].strip(), origin, keep))
        rates.extend([None] * (place == VIDEO))
        return place

    role = str(message.get("role", message.get("from"))).lower()
    if ROLES.get(role, role) != "assistant":
        texts = {field: text for field in ("content", "value") if isinstance(text := message.get(field), str)}
        message = {**message, **{field: INSIDE.sub(place_of, text) for field, text in texts.items()}}
    if not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        if isinstance(part, dict) and (place := KINDS.get(str(part.get("type")))):
            if cut := next((field for field in CUTS if part.get(field) is not None), None):
                raise DataError(f"{origin}: {cut}={part[cut]} names a part of its file; cut the file, and leave it out")
            name = _first(part, NAMES)
            rates += [_first(part, RATES)] if place == VIDEO else []
            name = name["url"] if isinstance(name, dict) and "url" in name else name
            named[place].append(None if name is None else _path(name, origin, keep))
            part = {"type": "text", "text": place}
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            part = {**part, "text": write_literally(part["text"], EVERY_PLACE)}
        parts.append(part)
    return {**message, "content": parts}


def _read_names(
    row: dict[str, Any], in_parts: list[str | None], origin: str, column: str, also: str, keep: Keep
) -> list[str]:
    named_in_parts = [name for name in in_parts if name is not None]
    if also in row and column not in (*row, *USUAL):
        raise files.missing_column(origin, f"data.{also}_column", column, list(row))
    listed_names = row.get(column, row.get(also))
    if named_in_parts and (len(named_in_parts) < len(in_parts) or listed_names):
        raise DataError(f"{origin}: some pictures are named in messages and some are not; name all in one way")
    listed = listed_names if isinstance(listed_names, list) else [] if listed_names is None else [listed_names]
    return named_in_parts or [_path(name, origin, keep) for name in listed]


def _path(name: object, origin: str, keep: Keep) -> str:
    try:
        name = find_file(name, keep)
    except BadSampleError as error:
        raise DataError(f"{origin}: {error}; {files.FIX}") from error
    if not isinstance(name, str) or not name or "\0" in name:
        raise DataError(f"{origin}: the picture is {name!r}, not a path; {files.FIX}")
    if name.startswith(("http:", "https:")):
        raise DataError(f"{origin}: the picture is {name[:40]!r}, not a path; save it to a file, and name that")
    return name
