"""Prints tables of columns on standard output without breaking numbers, in any terminal width. It does not use rich."""

from __future__ import annotations

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence

from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES, StageContent, StagesPerRank, stages_by_rank
from mgpu_pipe.errors import conceal, print_line, print_text, printable
from mgpu_pipe.parallel.pipeline.work_order import Timed, bubble_of, most_in_flight, streams, timeline

MISSING = "\u2013"
"""An en dash: not measured."""
TIMES = "\u00d7"


def count(number: float) -> str:
    """A count with at most one decimal: ``950``, ``12.3k``, ``7.9M``, ``1.2B``, ``3T``."""
    sign, size = ("-" if number < 0 else ""), abs(number)
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= scale * 0.99995:
            return f"{sign}{size / scale:.1f}".removesuffix(".0") + unit
    return f"{sign}{size:.1f}".removesuffix(".0")


def figure(number: float, digits: int = 4) -> str:
    """A measured number with ``digits`` significant digits: ``3.412``, ``1,245``, ``3e-04``; a dash for NaN."""
    if math.isnan(number):
        return MISSING
    if math.isinf(number):
        return "∞" if number > 0 else "-∞"
    if number and not 1e-3 <= abs(number) < 1e7:
        mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    decimals = digits if not number else max(0, digits - 1 - math.floor(math.log10(abs(number))))
    text = f"{number:,.{decimals}f}"
    return text if number == 0 or "." not in text else text.rstrip("0").rstrip(".") or "0"


def capitalize(text: str) -> str:
    """``text`` with a capital first letter; the others stay, as in NDCG."""
    return text[:1].upper() + text[1:]


def fix_decimals(number: float, decimals: int) -> str:
    """A number with exactly ``decimals`` decimals, for columns to compare; a dash for NaN."""
    return f"{number:,.{decimals}f}" if math.isfinite(number) else figure(number)


def metric(number: float, percent: bool = False) -> str:
    """A metric's value: a share as a percentage; larger values have fewer decimals."""
    if percent and math.isfinite(number):
        return f"{100 * number:.2f}%"
    return fix_decimals(number, 2 if number < 100 else 1 if number < 1000 else 0)


def duration(seconds: float) -> str:
    """``8.4 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``; a dash for NaN."""
    if math.isnan(seconds):
        return MISSING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    for unit, rest, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if total >= size:
            return f"{total // size} {unit} {total % size // part} {rest}"
    return f"{total} s"


def seconds(value: float) -> str:
    """The time of a part of a step: ``1.51 s``, ``141 ms``, ``0.749 ms``."""
    if value == 0:
        return "0 s"
    return f"{figure(value, 3)} s" if not 0 < value < 0.0995 else f"{figure(1000 * value, 3)} ms"


def gibibytes(size: float) -> str:
    """A size given in GiB: ``68 KiB``, ``612 MiB`` or ``12.40 GiB``."""
    if math.isnan(size):
        return MISSING
    if size >= 1:
        return f"{size:.2f} GiB"
    return f"{size * 2**10:.0f} MiB" if size >= 2**-10 else f"{size * 2**20:.0f} KiB"


def plain(value: object) -> str:
    """Any value of a JSON or YAML file as one line of text."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return figure(value, 6) if value else "0"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={plain(item)}" for key, item in value.items()) or MISSING
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(plain(item) for item in value) or MISSING
    return str(value)


GAP = 2
"""Columns between a name and its text."""


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


"""Spaces between two columns."""
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


WIDTH = 100
IDLE = "."
LEGEND = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


def pipeline_picture(
    schedule: str, ranks: int, micro_batches: int, stages_per_rank: StagesPerRank = "auto", width: int = WIDTH
) -> list[str]:
    """Lines of at most ``width`` columns: a row per rank with a cell per unit of time, then a legend.

    A forward pass and each half of a backward pass take one unit. Cells are ``F0 B0 ...`` with the micro-batch's
    number if that fits, else only letters. Letters of a rank's second, fourth, ... stage are lower case. A picture that
    is still too wide loses its middle.
    """
    by_rank = streams(schedule, ranks, micro_batches, stages_per_rank)
    stages_of_ranks = stages_by_rank(schedule, ranks, stages_per_rank)
    timed = timeline(by_rank)
    span = int(max(entry.end for row in timed for entry in row))
    label_width = len(f"rank {ranks - 1}  ")
    cell = len(f"F{micro_batches - 1} ")
    numbered = label_width + span * cell <= width
    rows = [_cells(row, span, stages_of_ranks[rank], numbered, cell) for rank, row in enumerate(timed)]
    room = width - label_width
    if not numbered and span > room:
        side = (room - 5) // 2
        rows = [f"{row[:side]} ... {row[-side:]}" for row in rows]
    lines = [f"{f'rank {rank}':<{label_width}}{row}".rstrip() for rank, row in enumerate(rows)]
    kinds = sorted({action.kind for stream in by_rank for action in stream}, key="FBIW".index)
    legend = ", ".join(f"{kind} {LEGEND[kind]}" for kind in kinds)
    case_note = "; small letters: second stage" if len(stages_of_ranks[0]) > 1 else ""
    return [*lines, f"{legend}, {IDLE} idle{case_note}"]


def _cells(row: Sequence[Timed], span: int, stages: Sequence[int], numbered: bool, width: int) -> str:
    cells = [IDLE] * span
    for (kind, stage, micro_batch), start, end in ((entry.action, entry.start, entry.end) for entry in row):
        letter = kind.lower() if stages.index(stage) % 2 else kind
        for time in range(int(start), int(end)):
            cells[time] = f"{letter}{micro_batch}" if numbered else letter
    return "".join(f"{text:<{width}}" for text in cells) if numbered else "".join(cells)


def schedule_lines(
    schedule: str,
    ranks: int,
    micro_batches: int,
    contents: Sequence[StageContent],
    stages_per_rank: StagesPerRank = "auto",
    width: int = WIDTH,
) -> list[str]:
    """Lines with the picture, the bubble, the micro-batches in flight, and each stage's contents."""
    by_rank = streams(schedule, ranks, micro_batches, stages_per_rank)
    bubble = bubble_of(timeline(by_rank))
    each = len(stages_by_rank(schedule, ranks, stages_per_rank)[0])
    most = max(map(most_in_flight, by_rank))
    in_flight = f"{most} micro-batches" if each == 1 else f"{most} passes of a stage"
    split = ", gradients of inputs and weights apart" if SCHEDULES[schedule].splits_backward else ""
    return [
        f"{schedule}, {ranks} ranks of {each} stage{'s' if each > 1 else ''}, {micro_batches} micro-batches{split}",
        *pipeline_picture(schedule, ranks, micro_batches, stages_per_rank, width),
        f"bubble {bubble:.1%} of the step, if all stages were equally fast; at most {in_flight} in flight on a rank",
        *(content.describe() for content in contents),
    ]
