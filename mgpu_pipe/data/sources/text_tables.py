"""Rows of text files: JSON Lines, CSV, TSV, Parquet and Arrow.

``data=jsonl``, ``parquet``                           a document a row
``data=labelled_jsonl``                               a text (or two) and its class
``data=pairs_jsonl``                                  a text and the one to be given for it
``data=chat_jsonl``                                   a conversation, which a chat template renders
``data=preferences_jsonl``                            a preferred and another answer to a prompt
``data=unpaired_jsonl``                               an answer to a prompt, and whether it is desirable
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mgpu_pipe.config.data_sources import TEXT_KEYS, DocumentKind
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.parquet_rows import check_column, is_columnar, parquet_rows
from mgpu_pipe.data.tables import row_lines
from mgpu_pipe.data.text.conversations import messages_of
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.earlier_versions import mark_of
from mgpu_pipe.data.text.file_source import (
    ChatFormat,
    FileFormat,
    Rows,
    check_columns,
    check_first_row,
    check_paths,
    nested_rows,
    row_of,
    table_rows,
    text_of,
    whole_document,
)
from mgpu_pipe.data.text.preference_rows import Messages, preference_of, prompt_of, unpaired_of
from mgpu_pipe.errors import DataError


def text_document(data: DataConfig, line: str, origin: str, size: int) -> Document:
    row = files.json_row(line, origin, data.text_column)
    return Document(text_of(row, "data.text_column", data.text_column, origin), origin, size)


def check_text(data: DataConfig, line: str, origin: str) -> None:
    check_columns(data, line, origin, "text_column")


def read_column(data: DataConfig, path: Path, expected: Fingerprint) -> Rows:
    return parquet_rows(path, data.text_column, expected=expected)


def check_parquet(data: DataConfig, path: Path, whole: bool) -> None:
    if not is_columnar(path):
        raise DataError(f"{path}: is not a readable Parquet or Arrow file: it begins otherwise; {files.REPLACE}")
    check_column(path, data.text_column)


TEXTS = (
    FileFormat(
        name="jsonl",
        rows=table_rows,
        document=text_document,
        check_file=partial(check_first_row, check_row=check_text),
        columns=lambda data: data.text_column,
        is_table=True,
    ),
    FileFormat("parquet", read_column, whole_document, check_parquet, columns=lambda data: data.text_column),
)


def check_labelled(model: ModelConfig, data: DataConfig) -> None:
    check_paths(data, partial(check_first_row, check_row=row_of))


def labels(data: DataConfig) -> Iterator[str]:
    for path in files.expand_paths(data.paths, "data.paths"):
        yield from (row_of(data, line, origin).label for line, origin, _ in row_lines(path))


LABELLED_SOURCE = DataSource(
    name="labelled_jsonl",
    samples="labelled_text",
    reads=(*TEXT_KEYS, "text_column", "second_text_column", "label_column", "classes"),
    reads_files=True,
    check=check_labelled,
    labels=labels,
)


def pair_document(data: DataConfig, line: str, origin: str, size: int) -> Document:
    row = files.json_row(line, origin, data.source_column, data.target_column)
    source = text_of(row, "data.source_column", data.source_column, origin)
    target = text_of(row, "data.target_column", data.target_column, origin)
    for column, text in ((data.source_column, source), (data.target_column, target)):
        if not text:
            raise DataError(f"{origin}: column '{column}' is empty; {files.FIX}")
    return Document(source, origin, size, target)


def check_pair(data: DataConfig, line: str, origin: str) -> None:
    check_columns(data, line, origin, "source_column", "target_column")


PAIRS = FileFormat(
    name="pairs_jsonl",
    rows=table_rows,
    document=pair_document,
    check_file=partial(check_first_row, check_row=check_pair),
    columns=lambda data: [data.source_column, data.target_column],
    kind="pairs",
    is_table=True,
)
PAIR_SOURCE = PAIRS.source(samples="pairs", reads=(*TEXT_KEYS, "source_column", "target_column", "target_len"))


def mark_conversation(kind: DocumentKind, data: DataConfig, line: str) -> str:
    try:
        return mark_of(files.json_row(line, "", data.messages_column), data.messages_column, kind)
    except DataError:
        return ""


def check_chat(data: DataConfig, line: str, origin: str) -> None:
    messages_of(files.json_row(line, origin, data.messages_column), origin, data.messages_column, data.format)


CHATS = ChatFormat(
    name="chat_jsonl",
    rows=nested_rows,
    document=whole_document,
    check_file=partial(check_first_row, check_row=check_chat, nested=True),
    columns=lambda data: data.messages_column if data.format == "auto" else [data.messages_column, data.format],
    kind="chat",
    reads_anew=partial(mark_conversation, "chat"),
    is_table=True,
)
CHAT_SOURCE = CHATS.source(reads=(*TEXT_KEYS, "messages_column", "format"))


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
        reads_anew=partial(mark_conversation, kind),
        is_table=True,
    )


ANSWERS = (
    answer_format("preferences_jsonl", "preferences", preference_of),
    answer_format("unpaired_jsonl", "unpaired", unpaired_of),
)
SOURCES = (
    *(form.source(reads=(*TEXT_KEYS, "text_column")) for form in TEXTS),
    LABELLED_SOURCE,
    PAIR_SOURCE,
    CHAT_SOURCE,
    *(form.source(samples=form.kind, reads=(*TEXT_KEYS, "messages_column")) for form in ANSWERS),
)
