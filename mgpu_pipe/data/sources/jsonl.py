"""``data=jsonl``: JSON Lines, CSV, TSV and Parquet files with a text column, a document each row."""

from __future__ import annotations

from functools import partial

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.file_source import FileFormat, check_columns, check_first_row, table_rows, text_of


def text_document(data: DataConfig, line: str, origin: str, size: int) -> Document:
    row = files.json_row(line, origin, data.text_column)
    return Document(text_of(row, "data.text_column", data.text_column, origin), origin, size)


def check_row(data: DataConfig, line: str, origin: str) -> None:
    check_columns(data, line, origin, "text_column")


FORMAT = FileFormat(
    name="jsonl",
    rows=table_rows,
    document=text_document,
    check_file=partial(check_first_row, check_row=check_row),
    columns=lambda data: data.text_column,
)
SOURCE = FORMAT.source(reads=(*TEXT_KEYS, "text_column"))
