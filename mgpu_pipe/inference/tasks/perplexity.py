"""Measures the perplexity of texts per token; one task per domain compares domains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mgpu_pipe.config.group_keys import EvalTask
from mgpu_pipe.data import files
from mgpu_pipe.errors import DataError
from mgpu_pipe.inference.tasks import TaskResult
from mgpu_pipe.objectives.text_keys import perplexity

if TYPE_CHECKING:
    from mgpu_pipe.inference.tasks.judge import Judge


def read(task: EvalTask, key: str, text_column: str) -> list[str]:
    texts = []
    for path in files.expand_paths(task.paths, f"{key}.paths"):
        if ".jsonl" not in path.name:
            texts.append(files.decode(files.read_bytes(path), str(path)))
            continue
        for line, origin, _ in files.read_lines(path):
            text = files.json_row(line, origin).get(text_column)
            if not isinstance(text, str):
                raise DataError(f"{origin}: column '{text_column}' holds no text; name another by data.text_column")
            files.check_unicode(text, origin)
            texts.append(text)
    return [text for text in texts if text]


def measure(rows: Sequence[str], task: EvalTask, judge: Judge) -> TaskResult:
    pieces = [piece for text in rows for piece in judge.encode_windows(text)]
    num_tokens = sum(len(ids) for _, ids in pieces)
    value = perplexity([sum(judge.losses(pieces, task.batch_size)), num_tokens])["val/perplexity"]
    return TaskResult(value, num_tokens, [])
