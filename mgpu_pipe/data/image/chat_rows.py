"""Rows of conversations with pictures: the usual forms of messages, and in them a place for each picture. No torch.

A place is the text ``<image>`` in what is said to the assistant, as LLaVA's rows have it, or a part ``{"type":
"image"}`` of a message's content, as transformers' and OpenAI's have it. The pictures are named by the parts
themselves, or by a column, in the order of their places. Of videos the same holds, whose place is ``<video>``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mgpu_pipe.data import files
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.image.keys import PictureChatConfig
from mgpu_pipe.data.text.conversations import PLACE, PLACES, SHAREGPT, VIDEO, messages_of
from mgpu_pipe.errors import DataError

QUESTIONS, SHAPES = "digit_questions", "moving_shapes"
"""The sources that need no files."""
COLUMN = "messages"
"""Of :attr:`ChatRow.text`."""
ALSO = {PLACE: "image", VIDEO: "video"}
"""The column that LLaVA's rows name their picture in, and their video."""
KINDS = {"image": PLACE, "image_url": PLACE, "video": VIDEO, "video_url": VIDEO}
"""Of a part that is a picture or a video."""
NAMES = ("image", "video", "path", "url", "image_url", "video_url")
"""What names the picture of a part."""
LOOKED_AT = 1000
"""Rows that are looked at before a run."""


@dataclass(frozen=True)
class ChatRow:
    """A conversation.

    Attributes:
        text: a JSON object with its messages, each place a ``<image>`` in them.
        pictures: their files, in the order of the places; of videos files, or folders of frames.
        videos: which of them are videos.
        key: what the held-out split goes by: the pictures as the row names them, so that conversations about the same
            ones stay on one side, wherever the folder lies.
        origin: where it stands.
        size: its share of the progress.
    """

    text: str
    pictures: tuple[Path, ...]
    videos: tuple[bool, ...]
    key: str
    origin: str
    size: int


def first_rows(data: PictureChatConfig, patterns: Sequence[str], key: str) -> list[ChatRow]:
    """The first rows of each file; raises as :func:`rows_of`."""
    return [row for path in files.expand_paths(patterns, key) for row in islice(rows_of(data, path), LOOKED_AT)]


def rows_of(data: PictureChatConfig, path: Path, expected: Fingerprint | None = None) -> Iterator[ChatRow]:
    """The rows of a file of JSON lines.

    Raises:
        DataError: a row that is broken, that names a file that is not there, or has not as many places as pictures.
    """
    for line, origin, size in files.read_lines(path, expected):
        row = files.json_row(line, origin, data.messages_column, data.image_column, data.video_column)
        text, named = conversation_of(row, origin, data)
        pictures, videos = tuple(path.parent / name for name, _ in named), tuple(kind == VIDEO for _, kind in named)
        for picture, video in zip(pictures, videos, strict=True):
            if not picture.is_file() and not (video and picture.is_dir()):
                raise DataError(f"{origin}: there is no file {picture}; {files.FIX}")
        yield ChatRow(text, pictures, videos, "\0".join(name for name, _ in named) or text, origin, size)


def conversation_of(row: dict[str, Any], origin: str, data: PictureChatConfig) -> tuple[str, list[tuple[str, str]]]:
    """The messages of a row as JSON, and the names of its pictures and videos, each with its place's kind."""
    in_parts: dict[str, list[str | None]] = {PLACE: [], VIDEO: []}
    for column in (data.messages_column, SHAREGPT, "prompt", "completion"):
        if isinstance(row.get(column), list):
            row[column] = [_with_places(message, in_parts, origin) for message in row[column]]
    messages = messages_of(row, origin, data.messages_column, data.format)
    said = " ".join(str(message.get("content") or "") for message in messages if message["role"] == "assistant")
    if found := PLACES.search(said):
        raise DataError(f"{origin}: the assistant says {found[0]}; pictures stand in what is said to it; {files.FIX}")
    places = [place for message in messages for place in PLACES.findall(str(message.get("content") or ""))]
    named: dict[str, Iterator[str]] = {}
    for place, column, what in ((PLACE, data.image_column, "pictures"), (VIDEO, data.video_column, "videos")):
        names = _named(row, in_parts[place], origin, column, ALSO[place])
        if len(names) != places.count(place):
            fix = f"write {place} where each belongs, and name each in column '{column}'"
            raise DataError(f"{origin}: has {len(names)} {what}, and places for {places.count(place)}; {fix}")
        named[place] = iter(names)
    tools = {"tools": row["tools"]} if row.get("tools") else {}
    return json.dumps({COLUMN: messages, **tools}, ensure_ascii=False), [(next(named[one]), one) for one in places]


def _with_places(message: object, named: dict[str, list[str | None]], origin: str) -> object:
    """``message`` with a place for each of its content's parts that is a picture or a video; what they name goes to
    ``named``."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        if isinstance(part, dict) and (place := KINDS.get(str(part.get("type")))):
            name = next((part[one] for one in NAMES if part.get(one) is not None), None)
            name = name.get("url") if isinstance(name, dict) else name
            named[place].append(None if name is None else _path(name, origin))
            part = {"type": "text", "text": place}
        parts.append(part)
    return {**message, "content": parts}


def _named(row: dict[str, Any], in_parts: list[str | None], origin: str, column: str, also: str) -> list[str]:
    own = [name for name in in_parts if name is not None]
    given = row.get(column, row.get(also))
    if own and (len(own) < len(in_parts) or given):
        raise DataError(f"{origin}: some pictures are named in messages and some are not; name all in one way")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    return own or [_path(name, origin) for name in listed]


def _path(name: object, origin: str) -> str:
    if isinstance(name, dict):
        name = name.get("path")
    if not isinstance(name, str) or not name or "\0" in name:
        raise DataError(f"{origin}: the picture is {name!r}, not a path; {files.FIX}")
    if name.startswith(("data:", "http:", "https:")):
        raise DataError(f"{origin}: the picture is {name[:40]!r}, not a path; save it to a file, and name that")
    return name.removeprefix("file://")
