"""``data=scored_pairs``: two sentences and how similar they are, a row each."""

from __future__ import annotations

from functools import partial
from typing import cast

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.text.embedding_keys import ScoredPairsConfig
from mgpu_pipe.data.text.file_check import check_first_row
from mgpu_pipe.data.text.file_source import FileFormat, table_rows
from mgpu_pipe.data.text.scored_rows import check_scored_row, scored_document


def identity_of(data: DataConfig) -> object:
    keys = cast(ScoredPairsConfig, data)
    return (keys.sentence1_column, keys.sentence2_column, keys.score_column)


FORMAT = FileFormat(
    name="scored_pairs",
    rows=table_rows,
    document=scored_document,
    check_file=partial(check_first_row, check_row=check_scored_row),
    columns=identity_of,
    kind="text_groups",
)
SOURCE = DataSource(
    name="scored_pairs",
    samples="scored_pairs",
    documents="text_groups",
    keys=ScoredPairsConfig,
    reads=TEXT_KEYS,
    reads_files=True,
    check=FORMAT.check,
    open=FORMAT.open,
)
