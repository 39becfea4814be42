"""``data=embedding_pairs``: a query, a text that it is to find and texts that it is not to find, a row each."""

from __future__ import annotations

from functools import partial
from typing import cast

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.text.embedding_keys import EmbeddingPairsConfig
from mgpu_pipe.data.text.embedding_rows import check_pair_row, pair_document, pair_rows
from mgpu_pipe.data.text.file_check import check_first_row
from mgpu_pipe.data.text.file_source import FileFormat


def identity_of(data: DataConfig) -> object:
    keys = cast(EmbeddingPairsConfig, data)
    columns = (keys.query_column, keys.positive_column, keys.negative_column)
    scores = [] if keys.scores_column is None else [keys.scores_column]
    return (*columns, keys.query_prompt, keys.document_prompt, *scores)


FORMAT = FileFormat(
    name="embedding_pairs",
    rows=pair_rows,
    document=pair_document,
    check_file=partial(check_first_row, check_row=check_pair_row, nested=True),
    columns=identity_of,
    kind="text_groups",
)
SOURCE = DataSource(
    name="embedding_pairs",
    samples="embedding_pairs",
    documents="text_groups",
    keys=EmbeddingPairsConfig,
    reads=TEXT_KEYS,
    reads_files=True,
    check=FORMAT.check,
    open=FORMAT.open,
)
