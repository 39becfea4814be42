"""Scores generated answers by exact match, or by the match of a regular expression."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mgpu_pipe.config.group_keys import EvalTask
from mgpu_pipe.data import files
from mgpu_pipe.data.tables import row_lines
from mgpu_pipe.data.text.conversations import messages_of, tools_of
from mgpu_pipe.errors import ConfigError, DataError
from mgpu_pipe.inference.tasks import TaskResult, choose_samples

if TYPE_CHECKING:
    from mgpu_pipe.inference.tasks.judge import Judge


class Question(NamedTuple):
    """A conversation up to the answer, the right answer, and the tools that the model may call."""

    messages: Sequence[Mapping[str, Any]]
    truth: str
    tools: list[Any] | None = None


def read(task: EvalTask, key: str, text_column: str) -> list[Question]:
    _pattern(task, key)
    return [_question(line, origin) for line, origin in _lines(task, key)]


def measure(rows: Sequence[Question], task: EvalTask, judge: Judge) -> TaskResult:
    pattern, share = _pattern(task, ""), judge.share(len(rows))
    answers = judge.answers([rows[index].messages for index in share], task, [rows[index].tools for index in share])
    right, samples = [0.0] * len(rows), []
    for index, text in zip(share, answers, strict=True):
        is_right = _extract(pattern, text) == (_extract(pattern, rows[index].truth) or rows[index].truth.strip())
        right[index] = float(is_right)
        question = str(rows[index].messages[-1]["content"])
        samples.append({"question": question, "answer": text, "truth": rows[index].truth, "right": is_right})
    return TaskResult(sum(judge.all_reduce(right)) / len(rows), len(rows), choose_samples(samples))


def _lines(task: EvalTask, key: str) -> Iterator[tuple[str, str]]:
    """The JSON lines, each with its file and line number."""
    if task.source is None:
        for path in files.expand_paths(task.paths, f"{key}.paths"):
            for line, origin, _ in row_lines(path, nested=True):
                yield line, origin
        return
    from mgpu_pipe.data.text.rules import held_out_conversations  # numpy

    for document in held_out_conversations():
        yield document.text, document.origin


def _question(line: str, origin: str) -> Question:
    row = files.json_row(line, origin)
    messages = messages_of(row, origin, "messages")
    truth = messages[-1]["content"]
    if messages[-1]["role"] != "assistant" or not truth or len(messages) < 2:
        raise DataError(f"{origin}: the last message is not an answer of the assistant; add the right answer")
    return Question(messages[:-1], truth, tools_of(row, origin))


def _pattern(task: EvalTask, key: str) -> re.Pattern[str] | None:
    if task.pattern is None:
        return None
    try:
        return re.compile(task.pattern)
    except re.error as error:
        raise ConfigError(f"{key}.pattern", task.pattern, "correct it", f"no regular expression: {error}") from error


def _extract(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """The part of ``text`` to compare; None where the pattern does not match."""
    if pattern is None:
        return text.strip()
    match = pattern.search(text)
    return None if match is None else match[1 if pattern.groups else 0]
