"""``data=scored_pairs``: two sentences and how similar they are, a row each."""

from __future__ import annotations

from functools import partial
from typing import cast

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.text.embedding_rows import ScoredPairsConfig, check_scored_row, scored_document
from mgpu_pipe.data.text.file_source import FileFormat, check_first_row, table_rows


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
SOURCE = FORMAT.source(samples="scored_pairs", keys=ScoredPairsConfig)
