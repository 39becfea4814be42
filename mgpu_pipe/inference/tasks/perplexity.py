"""Measures the perplexity of texts per token; one task per domain compares domains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.group_keys import EvalTask
from mgpu_pipe.data import files
from mgpu_pipe.data.compressed import codec_of, table_suffix
from mgpu_pipe.data.parquet_rows import is_columnar
from mgpu_pipe.data.sources.text_files import read_texts
from mgpu_pipe.data.tables import row_lines
from mgpu_pipe.data.text.file_source import text_of
from mgpu_pipe.inference.tasks import TaskResult
from mgpu_pipe.objectives.text_keys import perplexity

if TYPE_CHECKING:
    from mgpu_pipe.inference.tasks.judge import Judge

JSON_LINES, JSON = ".jsonl", (".json", ".ndjson")
"""Stands in a name, and ends one, of files whose rows hold the texts."""


def read(task: EvalTask, key: str, text_column: str) -> list[str]:
    texts = list[str]()
    for path in files.expand_paths(task.paths, f"{key}.paths"):
        if not _is_table(path):
            texts += [str(files.whole_row(text, origin)) for text, origin, _ in read_texts(path)]
            continue
        for line, origin, _ in row_lines(path):
            row = files.json_row(line, origin, text_column)
            texts.append(text_of(row, "data.text_column", text_column, origin))
    return [text for text in texts if text]


def _is_table(path: Path) -> bool:
    """Whether a file has rows, by its name or its first bytes; others are texts."""
    name = (path.stem if codec_of(path) else path.name).lower()
    if JSON_LINES in name or name.endswith(JSON) or table_suffix(path):
        return True
    return codec_of(path) is None and is_columnar(path)


def measure(rows: Sequence[str], task: EvalTask, judge: Judge) -> TaskResult:
    pieces = [piece for text in rows for piece in judge.encode_windows(text)]
    num_tokens = sum(len(ids) for _, ids in pieces)
    value = perplexity([sum(judge.losses(pieces, task.batch_size)), num_tokens])["val/perplexity"]
    return TaskResult(value, num_tokens, [])
