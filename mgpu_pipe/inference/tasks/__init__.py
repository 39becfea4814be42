"""Tasks that measure a model by rows of local files: a module a kind, ``eval.tasks.<name>.kind``. No torch here.

Each module has ``read(task, key, config)``, the checked rows, and ``measure(rows, task, judge)``, what they give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from mgpu_pipe.config.eval_tasks import EvalTask
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.samples import evaluated_samples
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    from mgpu_pipe.inference.tasks.judge import Judge

SHOWN = 24
"""Rows of a task that are kept for the report, at most."""


class Measured(NamedTuple):
    """What a task gave.

    Attributes:
        value: its figure.
        counted: what that is the mean over.
        shown: some of its rows, for the report: the same columns in each.
    """

    value: float
    counted: int
    shown: list[dict[str, Any]]


def some(shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows to keep, evenly taken."""
    return shown[:: -(-len(shown) // SHOWN) or 1]


def rows_of(task: EvalTask, name: str, config: RunConfig) -> Sequence[Any]:
    """The rows of the task ``name``, ``max_samples`` respected.

    Raises:
        BadInputError: files that are missing or hold something else; names key, or file and line.
    """
    key = f"eval.tasks.{name}"
    rows: Sequence[Any] = _part(task, "read")(task, key, config)
    if not rows:
        raise DataError(f"{key}: there is nothing in it to measure; give files with rows")
    taken = evaluated_samples(len(rows), min(len(rows), task.max_samples or len(rows)))
    return [rows[at] for at in taken.tolist()]


def measure(rows: Sequence[Any], task: EvalTask, judge: Judge) -> Measured:
    """A collective call, where the judge's model is on several processes."""
    result: Measured = _part(task, "measure")(rows, task, judge)
    return result


def _part(task: EvalTask, name: str) -> Callable[..., Any]:
    part: Callable[..., Any] = getattr(import_module(f"{__name__}.{task.kind}"), name)
    return part
