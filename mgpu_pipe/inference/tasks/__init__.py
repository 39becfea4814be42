"""Evaluation tasks on rows of local files, one module for each ``eval.tasks.<name>.kind``.

Each module has ``read(task, key, text_column)``, which returns checked rows, and ``measure(rows, task, judge)``, which
returns a :class:`TaskResult`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from mgpu_pipe.config.group_keys import EvalTask
from mgpu_pipe.data.samples import evaluated_samples
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    from mgpu_pipe.inference.tasks.judge import Judge

SHOWN = 24
"""Most rows of a task that the report shows."""


class TaskResult(NamedTuple):
    """Metric and sample rows of a task.

    Attributes:
        value: the metric.
        denominator: number of rows or tokens that the metric averages over.
        samples: some rows for the report, all with the same columns.
    """

    value: float
    denominator: int
    samples: list[dict[str, Any]]


def choose_samples(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most :data:`SHOWN` rows, evenly spaced."""
    return rows[:: -(-len(rows) // SHOWN) or 1]


def rows_of(task: EvalTask, name: str, text_column: str) -> Sequence[Any]:
    """The rows of the task ``name``, at most ``max_samples``.

    Args:
        text_column: column of the texts in JSON lines (``data.text_column``).

    Raises:
        BadInputError: a file is missing or holds something else; the error names the key, or file and line.
    """
    key = f"eval.tasks.{name}"
    rows: Sequence[Any] = _function_of_kind(task, "read")(task, key, text_column)
    if not rows:
        raise DataError(f"{key}: there is nothing in it to measure; give files with rows")
    taken = evaluated_samples(len(rows), min(len(rows), task.max_samples or len(rows)))
    return [rows[index] for index in taken.tolist()]


def measure(rows: Sequence[Any], task: EvalTask, judge: Judge) -> TaskResult:
    """Measures a task; a collective call where the judge's model is on several processes."""
    result: TaskResult = _function_of_kind(task, "measure")(rows, task, judge)
    return result


def _function_of_kind(task: EvalTask, name: str) -> Callable[..., Any]:
    part: Callable[..., Any] = getattr(import_module(f"{__name__}.{task.kind}"), name)
    return part
