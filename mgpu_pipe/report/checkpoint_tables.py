"""The tables of ``mgpu-pipe checkpoints``."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgpu_pipe.report import numbers
from mgpu_pipe.report.rows import printable
from mgpu_pipe.report.tables import make_console, print_whole

if TYPE_CHECKING:
    from rich.table import Table

    from mgpu_pipe.checkpoint.compare import Comparison
    from mgpu_pipe.checkpoint.step import Step

LONGEST_TABLE = 30
"""Differing tensors that are shown."""
LONGEST_VALUE = 60
"""Characters of a configuration's value that are shown."""
LEAST_WIDTH = 12
"""Of a column whose text may be wrapped."""


def checkpoints_table(steps: Sequence[Step], taken: int | None, kept: Mapping[int, str]) -> None:
    """Print one row a step.

    Args:
        taken: the step that ``checkpoint.resume=auto`` takes; marked.
        kept: why retention keeps a step.
    """
    table = _table("", ">step", "saved", ">size", "strategy", "precision", "state", "kept")
    for one in steps:
        _add_row(
            table,
            "*" if one.step == taken else "",
            f"{one.step:,}",
            _date(one.saved),
            _size(one.nbytes),
            _strategy(one),
            str(one.state.get("precision", numbers.MISSING)),
            _state_of(one),
            kept.get(one.step, numbers.MISSING),
        )
    make_console().print(table)


def lines(*texts: str) -> None:
    """Print lines as they are, never wrapped."""
    for text in texts:
        print_whole(make_console(), text)


def comparison_table(comparison: Comparison) -> None:
    """Print how the tensors of two checkpoints differ."""
    if comparison.differing:
        table = _table("tensor", "kind", ">relative", ">largest |a-b|")
        for one in comparison.differing[:LONGEST_TABLE]:
            _add_row(table, one.name, one.kind, f"{one.relative:.1e}", f"{one.largest:.1e}")
        make_console().print(table)
    more = len(comparison.differing) - LONGEST_TABLE
    lines(*([f"and {more} more that differ less"] if more > 0 else []), *comparison.unlike)


def differences_table(differences: Sequence[tuple[str, str, str]]) -> None:
    """Print how two configurations differ."""
    table = _table("key", "first", "second")
    for key, one, other in differences:
        _add_row(table, key, _short(one), _short(other))
    make_console().print(table)


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        wraps = title in ("strategy", "tensor", "key", "first", "second", "state")
        table.add_column(
            title.lstrip(">"),
            justify="right" if title.startswith(">") else "left",
            no_wrap=not wraps,
            min_width=LEAST_WIDTH if wraps else None,
            overflow="fold",
        )
    return table


def _add_row(table: Table, *cells: str) -> None:
    """Cells as they are: nothing of a name is taken for markup."""
    from rich.text import Text

    table.add_row(*(Text(printable(cell)) for cell in cells))


def _state_of(one: Step) -> str:
    if not one.whole:
        return "damaged"
    return "whole, not finite after it" if one.ruined else "whole"


def _strategy(one: Step) -> str:
    strategy = one.config.get("strategy")
    name = str(strategy.get("name", "")) if isinstance(strategy, Mapping) else ""
    topology: Any = one.state.get("topology")
    sizes = topology if isinstance(topology, Mapping) else {}
    cuts = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
    return f"{name} {cuts}".strip() or numbers.MISSING


def _date(seconds: float | None) -> str:
    return numbers.MISSING if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _size(nbytes: int) -> str:
    return numbers.gibibytes(nbytes / 2**30 if nbytes else math.nan)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
