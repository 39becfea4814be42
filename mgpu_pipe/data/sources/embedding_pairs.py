"""``data=embedding_pairs``: a query, a text that it is to find and texts that it is not to find, a row each."""

from __future__ import annotations

from functools import partial
from typing import cast

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.text.embedding_rows import EmbeddingPairsConfig, check_pair_row, pair_document, pair_rows
from mgpu_pipe.data.text.file_source import FileFormat, check_first_row


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
SOURCE = FORMAT.source(samples="embedding_pairs", keys=EmbeddingPairsConfig)
