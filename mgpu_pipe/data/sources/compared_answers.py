"""Rows of answers: a preferred and another answer to a prompt (``data=preferences_jsonl``), or an answer and whether it
is desirable (``data=unpaired_jsonl``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mgpu_pipe.config.data_sources import TEXT_KEYS, DocumentKind
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.file_source import ChatFormat, check_first_row, nested_rows
from mgpu_pipe.data.text.preference_rows import Messages, preference_of, prompt_of, unpaired_of

ReadRow = Callable[[dict[str, Any], str, str], tuple[Messages, Any]]
"""Reads a row, given its origin and ``data.messages_column``: a conversation, and what else the row holds."""


def answer_format(name: str, kind: DocumentKind, read: ReadRow) -> ChatFormat:
    """Format of files whose rows ``read`` converts; the prompt of a row decides its split."""

    def document(data: DataConfig, line: str, origin: str, size: int) -> Document:
        column = data.messages_column
        conversation, _ = read(files.json_row(line, origin, column), origin, column)
        return Document(line, origin, size, key=prompt_of(conversation))

    def check_row(data: DataConfig, line: str, origin: str) -> None:
        read(files.json_row(line, origin, data.messages_column), origin, data.messages_column)

    return ChatFormat(
        name=name,
        rows=nested_rows,
        document=document,
        check_file=partial(check_first_row, check_row=check_row, nested=True),
        columns=lambda data: [kind, data.messages_column],
        kind=kind,
    )


FORMATS = (
    answer_format("preferences_jsonl", "preferences", preference_of),
    answer_format("unpaired_jsonl", "unpaired", unpaired_of),
)
SOURCES = tuple(form.source(samples=form.kind, reads=(*TEXT_KEYS, "messages_column")) for form in FORMATS)
