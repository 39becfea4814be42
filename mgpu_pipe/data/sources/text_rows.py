"""Rows with a text column, a document each: JSON Lines, CSV, TSV and Parquet (``data=jsonl``), or Parquet only
(``data=parquet``)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.parquet_rows import check_column, is_columnar, parquet_rows
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.file_source import (
    FileFormat,
    Rows,
    check_columns,
    check_first_row,
    table_rows,
    text_of,
    whole_document,
)
from mgpu_pipe.errors import DataError


def text_document(data: DataConfig, line: str, origin: str, size: int) -> Document:
    row = files.json_row(line, origin, data.text_column)
    return Document(text_of(row, "data.text_column", data.text_column, origin), origin, size)


def check_row(data: DataConfig, line: str, origin: str) -> None:
    check_columns(data, line, origin, "text_column")


def read_column(data: DataConfig, path: Path, expected: Fingerprint) -> Rows:
    return parquet_rows(path, data.text_column, expected=expected)


def check_parquet(data: DataConfig, path: Path, whole: bool) -> None:
    if not is_columnar(path):
        raise DataError(f"{path}: is not a readable Parquet or Arrow file: it begins otherwise; {files.REPLACE}")
    check_column(path, data.text_column)


FORMATS = (
    FileFormat(
        name="jsonl",
        rows=table_rows,
        document=text_document,
        check_file=partial(check_first_row, check_row=check_row),
        columns=lambda data: data.text_column,
    ),
    FileFormat("parquet", read_column, whole_document, check_parquet, columns=lambda data: data.text_column),
)
SOURCES = tuple(form.source(reads=(*TEXT_KEYS, "text_column")) for form in FORMATS)
