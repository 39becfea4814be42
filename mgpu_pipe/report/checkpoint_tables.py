"""The tables of ``mgpu-pipe checkpoints``."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgpu_pipe.report import columns as numbers
from mgpu_pipe.report.columns import print_columns
from mgpu_pipe.report.run_tables import make_console, print_whole

if TYPE_CHECKING:
    from mgpu_pipe.checkpoint.compare import Comparison
    from mgpu_pipe.checkpoint.layout import Step

LONGEST_TABLE = 30
"""Most differing tensors in the table."""
LONGEST_VALUE = 60
"""Most characters of a configuration's value."""


def checkpoints_table(steps: Sequence[Step], latest: int | None, reasons: Mapping[int, str]) -> None:
    """Print one row per step.

    Args:
        latest: the step that ``checkpoint.resume=auto`` resumes; marked with a star.
        reasons: why retention keeps a step.
    """
    names = ("", "step", "saved", "size", "strategy", "precision", "state", "kept")
    rows = [
        (
            "*" if step.step == latest else "",
            f"{step.step:,}",
            _date(step.saved),
            _size(step.nbytes),
            _strategy(step),
            str(step.state.get("precision", numbers.MISSING)),
            _state_of(step),
            reasons.get(step.step, numbers.MISSING),
        )
        for step in steps
    ]
    fixed = ("", "step", "saved", "size", "state")
    print_columns(names, rows, fixed, below=(), spare=("precision", "saved", "strategy"), width=_width())


def print_lines(*texts: str) -> None:
    """Print lines without wrapping."""
    for text in texts:
        print_whole(make_console(), text)


def comparison_table(comparison: Comparison) -> None:
    """Print how the tensors of two checkpoints differ."""
    if comparison.differing:
        names = ("tensor", "kind", "relative", "largest |a-b|")
        listed = comparison.differing[:LONGEST_TABLE]
        rows = [(tensor.name, tensor.kind, f"{tensor.relative:.1e}", f"{tensor.largest:.1e}") for tensor in listed]
        print_columns(names, rows, names[2:], below=(), spare=("kind",), width=_width())
    more = len(comparison.differing) - LONGEST_TABLE
    print_lines(*([f"and {more} more that differ less"] if more > 0 else []), *comparison.unlike)


def differences_table(differences: Sequence[tuple[str, str, str]]) -> None:
    """Print how two configurations differ."""
    names = ("key", "first", "second")
    rows = [(key, _short(first), _short(second)) for key, first, second in differences]
    print_columns(names, rows, below=names[1:], width=_width())


def _width() -> int:
    return shutil.get_terminal_size().columns


def _state_of(step: Step) -> str:
    if not step.whole:
        return "damaged"
    return "whole, not finite after it" if step.ruined else "whole"


def _strategy(step: Step) -> str:
    strategy = step.config.get("strategy")
    name = str(strategy.get("name", "")) if isinstance(strategy, Mapping) else ""
    topology: Any = step.state.get("topology")
    sizes = topology if isinstance(topology, Mapping) else {}
    cuts = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
    return f"{name} {cuts}".strip() or numbers.MISSING


def _date(seconds: float | None) -> str:
    return numbers.MISSING if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _size(nbytes: int) -> str:
    return numbers.gibibytes(nbytes / 2**30 if nbytes else math.nan)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
