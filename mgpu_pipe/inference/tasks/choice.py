"""Scores multiple choice by the likeliest choice of each question (log-likelihood)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mgpu_pipe.config.group_keys import EvalTask
from mgpu_pipe.data import files
from mgpu_pipe.data.tables import nested_value, row_lines
from mgpu_pipe.errors import DataError
from mgpu_pipe.inference.tasks import TaskResult, choose_samples

if TYPE_CHECKING:
    from mgpu_pipe.inference.tasks.judge import Judge

FORM = '{"prompt": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}'


class Choice(NamedTuple):
    prompt: str
    choices: list[str]
    answer: int


def read(task: EvalTask, key: str, text_column: str) -> list[Choice]:
    return [
        _choice(files.json_row(line, origin), origin)
        for path in files.expand_paths(task.paths, f"{key}.paths")
        for line, origin, _ in row_lines(path)
    ]


def measure(rows: Sequence[Choice], task: EvalTask, judge: Judge) -> TaskResult:
    texts = [judge.encode_choice(row.prompt, choice) for row in rows for choice in row.choices]
    losses = iter(judge.losses(texts, task.batch_size))
    right, samples = 0, []
    for row in rows:
        choice_losses = [next(losses) for _ in row.choices]
        chosen = choice_losses.index(min(choice_losses))
        right += chosen == row.answer
        sample = {"question": row.prompt, "answer": row.choices[chosen], "truth": row.choices[row.answer]}
        samples.append({**sample, "right": chosen == row.answer})
    return TaskResult(right / len(rows), len(rows), choose_samples(samples))


def _choice(row: dict[str, Any], origin: str) -> Choice:
    prompt, answer = row.get("prompt"), row.get("answer")
    listed = row.get("choices")
    listed = nested_value(listed) if isinstance(listed, str) else listed
    answer = int(answer) if isinstance(answer, str) and answer.isdecimal() else answer  # of CSV
    choices = [choice for choice in listed if isinstance(choice, str) and choice] if isinstance(listed, list) else []
    if not isinstance(prompt, str) or len(choices) < 2 or choices != listed:
        raise DataError(f"{origin}: is not a question with two choices or more; write it like {FORM}")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise DataError(f"{origin}: answer is {answer!r}; use the place of the right choice, 0 to {len(choices) - 1}")
    for text in (prompt, *choices):
        files.check_unicode(text, origin)
    return Choice(prompt, choices, answer)
