"""Reads a file of prompts: rows of JSON, CSV, TSV or Parquet with a text, messages and files of media.

A row has the form of training data; the answer at the end of a row of training data is not read. Files are named as
seen from the folder of the prompts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mgpu_pipe.config.paths import cache_folder
from mgpu_pipe.data import files
from mgpu_pipe.data.images.chat_rows import ALSO, AUDIOS, COLUMN, ChatRow, read_chat_row
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.tables import keep_in, row_lines
from mgpu_pipe.data.text.conversations import (
    HISTORY,
    PLACES,
    SHAREGPT,
    history_of,
    prompt_messages,
    sides_of,
    spoken_in_turns,
    system_before,
)
from mgpu_pipe.data.text.foreign_messages import CALL, json_value, standard_role, with_lists
from mgpu_pipe.errors import DataError, MgpuError
from mgpu_pipe.inference.generation import Prompt
from mgpu_pipe.inference.visual_prompts import with_places
from mgpu_pipe.system.local_files import sha256_of

PROMPT, MESSAGES = "prompt", "messages"
BODY = "body"
"""Holds the request in a row of OpenAI's batch files."""
KEYS = ("custom_id", "id")
"""Names of a row that its answer repeats."""
SETTINGS = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop")
"""Settings of one request; a job has one setting for all."""
ANSWER = {"role": "assistant", "content": "."}
"""Stands for the answer to come, which a row of training data has."""


@dataclass(frozen=True)
class PromptRow:
    """A row of a file of prompts.

    Attributes:
        line: its number in the file, from 1.
        ids: the prompt's tokens; empty for a recording.
        chat_row: its pictures and videos.
        recording: its file.
        keys: what its answer repeats, see :data:`KEYS`.
        unread: settings of the row that the job does not follow.
        error: names file, line and problem of a bad row; empty for a good one.
    """

    line: int
    ids: tuple[int, ...] = ()
    chat_row: ChatRow | None = None
    recording: Path | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    error: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of its pictures, videos and recording; folders of a video's frames."""
        pictures = () if self.chat_row is None else self.chat_row.pictures
        return pictures if self.recording is None else (*pictures, self.recording)


EncodeRow = Callable[[int, dict[str, Any], str], PromptRow]
"""Makes a prompt of a line's number, its object and its origin."""


def read_prompts(path: Path, encode: EncodeRow) -> list[PromptRow]:
    """The rows of a file of JSON, CSV or Parquet, bad ones if ``encode`` refuses them; DataError if there is none."""
    return [_row(line, origin, encode) for line, origin, _ in row_lines(path, nested=True)]


def _row(line: str, origin: str, encode: EncodeRow) -> PromptRow:
    number = int(re.findall(r"\d+", origin)[-1])
    keys: dict[str, Any] = {}
    try:
        row = files.json_row(line, origin)
        keys = {name: row[name] for name in KEYS if name in row}
        row, unread = _request_of(row, origin)
        return replace(encode(number, row, origin), keys=keys, unread=unread)
    except DataError as error:
        return PromptRow(number, keys=keys, error=str(error))
    except MgpuError as error:
        return PromptRow(number, keys=keys, error=f"{origin}: {error}")


def _request_of(row: dict[str, Any], origin: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The row with its messages in :data:`MESSAGES`, and the settings that it names."""
    unread: tuple[str, ...] = ()
    if isinstance(body := row.get(BODY), dict):
        row, unread = body, tuple(name for name in SETTINGS if body.get(name) is not None)
    row = with_lists(row, sides_of(row), (), origin) if PROMPT in row else row
    lists = {name: json_value(row.get(name)) for name in (MESSAGES, SHAREGPT)}
    row = {**row, **{name: spoken_in_turns(value) for name, value in lists.items() if isinstance(value, list)}}
    for name in (SHAREGPT, PROMPT):  # TRL's prompts are messages
        if isinstance(row.get(name), list) and MESSAGES not in row:
            row = {MESSAGES: row[name], **{other: value for other, value in row.items() if other != name}}
    return row, unread


def prompt_of(row: Mapping[str, Any], origin: str) -> Prompt:
    """The text or the messages of a row.

    Raises:
        DataError: it has neither, both, or another type.
    """
    _check_form(row, origin)
    turns = _without_answer(row[MESSAGES]) if MESSAGES in row else _question_of(row, row[PROMPT], origin)
    if isinstance(turns, list):
        turns = system_before(turns, dict(row), origin)
    if PROMPT in row and isinstance(turns, list) and len(turns) == 1:
        files.check_unicode(row[PROMPT], origin)
        return str(row[PROMPT])
    messages = prompt_messages(turns, MESSAGES, origin)
    for message in messages:
        files.check_unicode(str(message["content"]), origin)
    return messages


def _question_of(row: Mapping[str, Any], text: str, origin: str) -> list[Any]:
    """Appends the question, with this text, to the turns before it."""
    return [*history_of(dict(row), origin), {"role": "user", "content": text}]


def _check_form(row: Mapping[str, Any], origin: str) -> None:
    if (PROMPT in row) == (MESSAGES in row):
        problem = f"has both {PROMPT} and {MESSAGES}" if PROMPT in row else f"has neither {PROMPT} nor {MESSAGES}"
        raise DataError(f'{origin}: {problem}; write {{"prompt": "..."}} or {{"messages": [...]}}')
    if not isinstance(row.get(PROMPT, ""), str):
        raise DataError(f"{origin}: {PROMPT} is a {type(row[PROMPT]).__name__}; write a string")


def _without_answer(messages: object) -> object:
    while isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        if standard_role(messages[-1]).strip().lower() not in ("assistant", CALL):
            break
        messages = messages[:-1]
    return messages


def names_visuals(row: Mapping[str, Any], data: PictureChatConfig) -> bool:
    """Whether a row names pictures, videos or recordings, in a column."""
    return any(row.get(column) for column in (data.image_column, data.video_column, AUDIOS, *ALSO.values()))


def has_places(row: Mapping[str, Any]) -> bool:
    """Whether a text of the row has a place of a picture, or a message has parts."""
    messages = row.get(MESSAGES)
    contents = [message.get("content") for message in messages if isinstance(message, dict)] if messages else []
    said = (*contents, row.get(PROMPT), str(row.get(HISTORY)))
    return any(isinstance(text, list) or PLACES.search(str(text)) for text in said)


def visual_prompt_of(
    row: dict[str, Any], origin: str, data: PictureChatConfig, folder: Path, taken: Sequence[str]
) -> tuple[Prompt, ChatRow]:
    """The text or the messages of a row with places, and its pictures and videos.

    Args:
        folder: that the row's files are named from.
        taken: places of the kinds of files that the model takes.

    Raises:
        DataError: a file is missing, or the row has more or fewer places than pictures.
    """
    _check_form(row, origin)
    messages = _without_answer(row.get(MESSAGES))
    if PROMPT in row:
        columns = ((data.image_column, "image"), (data.video_column, "video"), (AUDIOS, "audio"))
        before = str(row.get(HISTORY))  # its places stand there already
        counts = [0 if f"<{also}>" in before else _count(row, column, also) for column, also in columns]
        messages = _question_of(row, with_places(row[PROMPT], *counts), origin)
    others = {name: value for name, value in row.items() if name not in (PROMPT, MESSAGES, SHAREGPT)}
    training_row = {**others, COLUMN: [*messages, ANSWER] if isinstance(messages, list) and messages else messages}
    data = PictureChatConfig(image_column=data.image_column, video_column=data.video_column, messages_column=COLUMN)
    keep = keep_in(cache_folder(None))
    chat_row = read_chat_row(json.dumps(training_row), origin, 0, data, folder, keep, missing=False, taken=taken)
    files.check_unicode(chat_row.text, origin)
    *before_answer, _ = json.loads(chat_row.text)[COLUMN]
    is_alone = PROMPT in row and len(before_answer) == 1
    return str(before_answer[0]["content"]) if is_alone else before_answer, chat_row


def _count(row: Mapping[str, Any], column: str, also: str) -> int:
    named = row.get(column, row.get(also))
    return len(named) if isinstance(named, list) else int(named is not None)


def refuse_bad_rows(rows: list[PromptRow]) -> None:
    """Raise the DataError of the first bad row."""
    bad = [row.error for row in rows if row.error]
    if bad:
        others = f" ({len(bad) - 1} more rows are bad)" if len(bad) > 1 else ""
        raise DataError(f"{bad[0]}{others}; correct it, or add --on-bad-row skip")


def digest_files(rows: list[PromptRow]) -> str:
    """SHA-256 of the contents of all files that the good rows name; empty where they name none."""
    digests = {}
    for path in dict.fromkeys(path for row in rows for path in row.files):
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            digests[str(file)] = sha256_of(file)
    return hashlib.sha256(json.dumps(list(digests.values())).encode()).hexdigest() if digests else ""


def make_batches(
    rows: list[PromptRow], batch_size: int, context: int | None, max_new_tokens: int
) -> list[list[PromptRow]]:
    """The good rows in batches of about equal length, longest first.

    They depend on the file and the settings alone, so that every number of processes computes the same batches. Rows
    that the context cuts short share a batch only with rows of their length, so that all end after as many tokens. So
    do rows with pictures, whose families count positions in their own ways.
    """
    batches: list[list[PromptRow]] = []
    for row in sorted((row for row in rows if not row.error), key=lambda row: (-len(row.ids), row.line)):
        last = batches[-1] if batches else []
        first = last[0] if last else row
        is_cut = context is not None and len(first.ids) + max_new_tokens > context
        needs_equal = is_cut or first.chat_row is not None or row.chat_row is not None
        if not last or len(last) == batch_size or (needs_equal and len(row.ids) != len(first.ids)):
            batches.append([])
        batches[-1].append(row)
    return batches
