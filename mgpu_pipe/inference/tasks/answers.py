"""Generated answers, compared word for word, or by what a regular expression finds in them. No torch at import."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mgpu_pipe.config.eval_tasks import EvalTask
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.text.conversations import messages_of
from mgpu_pipe.errors import ConfigError, DataError
from mgpu_pipe.inference.tasks import Measured, some

if TYPE_CHECKING:
    from mgpu_pipe.inference.tasks.judge import Judge


class Question(NamedTuple):
    """A conversation up to the answer, and the right one."""

    messages: Sequence[Mapping[str, Any]]
    truth: str


def read(task: EvalTask, key: str, config: RunConfig) -> list[Question]:
    _pattern(task, key)
    return [_question(line, origin) for line, origin in _lines(task, key)]


def measure(rows: Sequence[Question], task: EvalTask, judge: Judge) -> Measured:
    pattern, share = _pattern(task, ""), judge.share(len(rows))
    said = judge.answers([rows[at].messages for at in share], task)
    right, shown = [0.0] * len(rows), []
    for at, text in zip(share, said, strict=True):
        equal = _found(pattern, text) == (_found(pattern, rows[at].truth) or rows[at].truth.strip())
        right[at] = float(equal)
        question = str(rows[at].messages[-1]["content"])
        shown.append({"question": question, "answer": text, "truth": rows[at].truth, "right": equal})
    return Measured(sum(judge.gathered(right)) / len(rows), len(rows), some(shown))


def _lines(task: EvalTask, key: str) -> Iterator[tuple[str, str]]:
    """The JSON lines, each with where it stands."""
    if task.source is None:
        for path in files.expand_paths(task.paths, f"{key}.paths"):
            for line, origin, _ in files.read_lines(path):
                yield line, origin
        return
    from mgpu_pipe.data.text.rules import held_out_conversations  # numpy

    for document in held_out_conversations():
        yield document.text, document.origin


def _question(line: str, origin: str) -> Question:
    messages = messages_of(files.json_row(line, origin), origin, "messages")
    truth = messages[-1]["content"]
    if messages[-1]["role"] != "assistant" or not truth or len(messages) < 2:
        raise DataError(f"{origin}: the last message is no answer of the assistant's, with which to compare; add it")
    return Question(messages[:-1], truth)


def _pattern(task: EvalTask, key: str) -> re.Pattern[str] | None:
    if task.pattern is None:
        return None
    try:
        return re.compile(task.pattern)
    except re.error as error:
        raise ConfigError(f"{key}.pattern", task.pattern, "correct it", f"no regular expression: {error}") from error


def _found(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """What is compared of ``text``; None where the pattern finds nothing."""
    if pattern is None:
        return text.strip()
    match = pattern.search(text)
    return None if match is None else match[1 if pattern.groups else 0]
