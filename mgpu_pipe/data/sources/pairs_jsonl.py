"""``data=pairs_jsonl``: pairs of texts, a row each, the second to be given for the first."""

from __future__ import annotations

from functools import partial

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.file_source import FileFormat, check_columns, check_first_row, table_rows, text_of
from mgpu_pipe.errors import DataError


def pair(data: DataConfig, line: str, origin: str, size: int) -> Document:
    row = files.json_row(line, origin, data.source_column, data.target_column)
    source = text_of(row, "data.source_column", data.source_column, origin)
    target = text_of(row, "data.target_column", data.target_column, origin)
    for column, text in ((data.source_column, source), (data.target_column, target)):
        if not text:
            raise DataError(f"{origin}: column '{column}' is empty; {files.FIX}")
    return Document(source, origin, size, target)


def check_row(data: DataConfig, line: str, origin: str) -> None:
    check_columns(data, line, origin, "source_column", "target_column")


FORMAT = FileFormat(
    name="pairs_jsonl",
    rows=table_rows,
    document=pair,
    check_file=partial(check_first_row, check_row=check_row),
    columns=lambda data: [data.source_column, data.target_column],
    kind="pairs",
)
SOURCE = FORMAT.source(samples="pairs", reads=(*TEXT_KEYS, "source_column", "target_column", "target_len"))
