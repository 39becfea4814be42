"""``data=parquet``: Parquet files with a text column, a document each row."""

from __future__ import annotations

from pathlib import Path

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.parquet_rows import check_column, is_parquet, parquet_rows
from mgpu_pipe.data.text.file_source import FileFormat, Rows, whole_document
from mgpu_pipe.errors import DataError


def read_column(data: DataConfig, path: Path, expected: Fingerprint) -> Rows:
    return parquet_rows(path, data.text_column, expected=expected)


def check_parquet(data: DataConfig, path: Path, whole: bool) -> None:
    if not is_parquet(path):
        raise DataError(f"{path}: is not a readable Parquet file: it does not begin with PAR1; {files.REPLACE}")
    check_column(path, data.text_column)


FORMAT = FileFormat("parquet", read_column, whole_document, check_parquet, columns=lambda data: data.text_column)
SOURCE = FORMAT.source(reads=(*TEXT_KEYS, "text_column"))
