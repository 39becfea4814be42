"""``data=chat_jsonl``: conversations, a row each; a chat template renders them."""

from __future__ import annotations

from functools import partial

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.text.conversations import messages_of
from mgpu_pipe.data.text.file_source import ChatFormat, check_first_row, nested_rows, whole_document


def check_row(data: DataConfig, line: str, origin: str) -> None:
    messages_of(files.json_row(line, origin, data.messages_column), origin, data.messages_column, data.format)


FORMAT = ChatFormat(
    name="chat_jsonl",
    rows=nested_rows,
    document=whole_document,
    check_file=partial(check_first_row, check_row=check_row, nested=True),
    columns=lambda data: data.messages_column if data.format == "auto" else [data.messages_column, data.format],
    kind="chat",
)
SOURCE = FORMAT.source(reads=(*TEXT_KEYS, "messages_column", "format"))
