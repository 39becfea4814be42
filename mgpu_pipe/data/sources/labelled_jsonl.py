"""``data=labelled_jsonl``: a text (or two) and its class, a row each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.tables import row_lines
from mgpu_pipe.data.text.file_source import check_first_row, check_paths, row_of


def check_labelled(model: ModelConfig, data: DataConfig) -> None:
    check_paths(data, partial(check_first_row, check_row=row_of))


def labels(data: DataConfig) -> Iterator[str]:
    for path in files.expand_paths(data.paths, "data.paths"):
        yield from (row_of(data, line, origin).label for line, origin, _ in row_lines(path))


SOURCE = DataSource(
    name="labelled_jsonl",
    samples="labelled_text",
    reads=(*TEXT_KEYS, "text_column", "second_text_column", "label_column", "classes"),
    reads_files=True,
    check=check_labelled,
    labels=labels,
)
