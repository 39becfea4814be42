"""Names beside what is said of them, on standard output. Without rich, whose import is a twentieth of ``check``."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from mgpu_pipe.errors import concealed

GAP = 2
"""Columns between a name and what is said of it."""


def print_rows(rows: Sequence[tuple[str, str]], title: str = "") -> None:
    """Print names beside what is said of them, wrapped to the terminal's width, below a title."""
    width = shutil.get_terminal_size().columns
    indent = max((len(name) for name, _ in rows), default=0) + GAP
    if title:
        rule = "─" if (sys.stdout.encoding or "").lower() == "utf-8" else "-"
        print(f"{_bold(printable(title))} {rule * (width - len(title) - 1)}")
    for name, value in rows:
        said = printable(concealed(value)).splitlines() or [""]
        room = max(width - indent, 1)
        lines = [part for line in said for part in textwrap.wrap(line, room, break_on_hyphens=False) or [""]]
        for label, line in zip((name, *[""] * len(lines)), lines, strict=False):
            print(f"{_bold(label)}{' ' * (indent - len(label))}{line}".rstrip())
    if title:
        print()


def print_columns(names: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[str] = ()) -> None:
    """Print a table, nothing where it has no row. Columns are as wide as they need be; one that is empty in all rows
    is left out; the last one comes whole, so that it can be copied.
    """
    if not cells:
        return
    rows = [[printable(cell).replace("\n", " ") for cell in row] for row in (names, *cells)]
    shown = [at for at in range(len(names)) if any(row[at] for row in rows[1:])]
    widths = {at: max(len(row[at]) for row in rows) for at in shown[:-1]}
    for row in rows:
        placed = [row[at].rjust(widths[at]) if names[at] in numeric else row[at].ljust(widths[at]) for at in widths]
        print("  ".join([*placed, row[shown[-1]]]).rstrip())


def printable(text: str) -> str:
    """``text`` without control characters: a model can write escape sequences, a terminal would follow them."""
    return "".join(character if character.isprintable() or character in "\n\t" else "�" for character in text)


def _bold(text: str) -> str:
    plain = not sys.stdout.isatty() or os.environ.get("TERM") in (None, "dumb", "unknown")
    return text if plain or not text else f"\x1b[1m{text}\x1b[0m"
