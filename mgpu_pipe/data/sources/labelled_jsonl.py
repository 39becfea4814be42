"""``data=labelled_jsonl``: a text (or two) and its class, a row each."""

from __future__ import annotations

from functools import partial

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.kinds import prepare_labelled_text
from mgpu_pipe.data.source import DataSource
from mgpu_pipe.data.text.file_check import check_first_row, check_paths
from mgpu_pipe.data.text.label_rows import row_of


def check_labelled(config: RunConfig) -> None:
    check_paths(config.data, partial(check_first_row, check_row=row_of))


SOURCE = DataSource(
    name="labelled_jsonl",
    samples="labelled_text",
    reads=(*TEXT_KEYS, "text_column", "second_text_column", "label_column", "classes"),
    reads_files=True,
    check=check_labelled,
    prepare=prepare_labelled_text,
)
