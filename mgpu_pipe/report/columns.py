"""Prints tables of columns on standard output without breaking numbers, in any terminal width. It does not use rich."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence

from mgpu_pipe.errors import conceal, print_line, print_text, printable

GAP = 2
"""Spaces between two columns."""


def print_rows(rows: Sequence[tuple[str, str]], title: str = "") -> None:
    """Print names next to their texts, wrapped to the terminal's width, below a title."""
    width = shutil.get_terminal_size().columns
    rows = [(printable(name, keep=""), value) for name, value in rows]
    indent = max((len(name) for name, _ in rows), default=0) + GAP
    if title:
        rule = "─" if (sys.stdout.encoding or "").lower() == "utf-8" else "-"
        print(f"{bold(printable(title, keep=''))} {rule * (width - len(title) - 1)}")
    for name, value in rows:
        paragraphs = printable(conceal(value)).splitlines() or [""]
        room = max(width - indent, 1)
        lines = [part for line in paragraphs for part in textwrap.wrap(line, room, break_on_hyphens=False) or [""]]
        for label, line in zip((name, *[""] * len(lines)), lines, strict=False):
            print(f"{bold(label)}{' ' * (indent - len(label))}{line}".rstrip())
    if title:
        print_line()


def print_bold(line: str) -> None:
    """Print a line, in bold if standard output is a terminal that supports it."""
    print(bold(printable(line, keep="")))


def bold(text: str) -> str:
    """``text``, in bold if standard output is a terminal that supports it."""
    plain = not sys.stdout.isatty() or os.environ.get("TERM") in (None, "dumb", "unknown")
    return text if plain or not text else f"\x1b[1m{text}\x1b[0m"


LEAST_WIDTH = 12
"""Characters of the narrowest shortened column."""
CUT = "\u2026"


def print_columns(
    names: Sequence[str],
    cells: Sequence[Sequence[str]],
    numeric: Collection[str] = (),
    *,
    below: Sequence[str] | None = None,
    spare: Sequence[str] = (),
    width: int | None = None,
    several_lines: bool = False,
) -> None:
    """Print a table without its empty columns; prints nothing for a table without rows.

    Columns are as wide as their longest cell. In a narrow terminal the last columns first move below their row;
    then texts lose their first letters; then columns go, and a line below the table names them. A pipe has no width
    unless ``COLUMNS`` or ``width`` sets one.

    Args:
        cells: rows.
        numeric: names of columns that are right-aligned and never shortened.
        below: names of the last columns, which are never shortened and may move below their row; None: the last one.
        spare: names of the columns to drop first, in this order; the others follow from the right.
        width: of the table, in characters; None asks the terminal.
        several_lines: a line break in a cell begins another line.
    """
    if not cells:
        return
    rows = [[_cell_lines(cell, several_lines) for cell in row] for row in cells]
    columns = [column for column in range(len(names)) if any(any(row[column]) for row in rows)]
    last = names[-1:] if below is None else below
    width = _width() if width is None else width
    longest = {column: max(len(line) for row in rows for line in row[column]) for column in columns}
    widths = {column: max(len(names[column]), length) for column, length in longest.items()}
    if width is None or _total(widths.values()) <= width:
        visible, under, dropped = widths, list[int](), list[str]()
    else:
        under = [column for column in columns if names[column] in last and len(columns) > len(last)]
        visible = {column: size for column, size in widths.items() if column not in under}
        order = [column for name in spare for column in visible if names[column] == name]
        order += [column for column in reversed(visible) if column not in order]
        texts = {column for column in visible if names[column] not in numeric}
        visible, dropped = _fit(visible, texts, order, width, names)
    visible_columns = [(column, size, names[column] in numeric) for column, size in visible.items()]
    _print_line([(names[column], size, is_number) for column, size, is_number in visible_columns], heading=True)
    for row in rows:
        _print_cells(row, visible_columns)
        for column in under:
            for text in filter(None, row[column]):
                print_words(text, width, indent=4)
    if dropped:
        print_line(f"not shown at {width} columns: {', '.join(filter(None, dropped))}")


def _print_cells(row: Sequence[Sequence[str]], visible: Sequence[tuple[int, int, bool]]) -> None:
    """Print the lines of a row's visible cells: column, width, and whether it is right-aligned."""
    for number in range(max(len(row[column]) for column, _, _ in visible)):
        lines = {column: row[column][number] if number < len(row[column]) else "" for column, _, _ in visible}
        _print_line([(lines[column], size, is_number) for column, size, is_number in visible])


def _cell_lines(cell: str, several_lines: bool) -> list[str]:
    return [printable(line, keep="") for line in (cell.split("\n") if several_lines else [cell])]


def print_words(text: str, width: int | None, indent: int) -> None:
    """Print a text wrapped only between words; a longer word stays whole, so that it can be copied."""
    room = max(width or len(text) + indent, indent + 1)
    margin = " " * indent
    wrapper = textwrap.TextWrapper(
        room, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
    print_text("\n".join(wrapper.wrap(text) or [""]))


def _width() -> int | None:
    """The terminal's width; None where standard output is no terminal and ``COLUMNS`` is not set."""
    has_width = os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty()
    return shutil.get_terminal_size().columns if has_width else None


def _total(widths: Collection[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _fit(
    widths: Mapping[int, int], texts: Collection[int], order: Sequence[int], width: int, names: Sequence[str]
) -> tuple[dict[int, int], list[str]]:
    """Column widths that fit, and the names of the dropped columns; shortens texts but not numbers."""
    fitting, dropped = dict(widths), list[str]()
    for candidate in [None, *order]:
        if candidate is not None:
            if len(fitting) == 1:
                break
            del fitting[candidate]
            dropped.append(names[candidate])
        least = {column: min(size, LEAST_WIDTH) if column in texts else size for column, size in fitting.items()}
        if _total(least.values()) <= width:
            break
    while (over := _total(fitting.values()) - width) > 0:
        widest = max(
            (column for column in fitting if column in texts), key=lambda column: fitting[column], default=None
        )
        if widest is None or fitting[widest] <= LEAST_WIDTH:
            break
        fitting[widest] = max(LEAST_WIDTH, fitting[widest] - over)
    return fitting, dropped


def _print_line(cells: Sequence[tuple[str, int, bool]], heading: bool = False) -> None:
    aligned = []
    for text, width, is_numeric in cells:
        text = text if len(text) <= width else CUT + text[len(text) - width + 1 :]
        aligned.append(text.rjust(width) if is_numeric else text.ljust(width))
    line = (" " * GAP).join(aligned).rstrip()
    if heading:
        print_bold(line)
    else:
        print_line(line)
