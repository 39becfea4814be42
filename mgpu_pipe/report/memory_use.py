"""How much memory a step takes: the second table of ``doctor``, and the report's line."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from mgpu_pipe.profiling.memory_use import MEMORY_PHASES, MemoryUse
from mgpu_pipe.report.rows import print_columns

COLOURS = dict(zip(MEMORY_PHASES, (0, 3, 2, 7), strict=True))
"""Of the page's style, by phase."""
WIDTH, HEIGHT = 1000, 120


def show(memory: MemoryUse) -> None:
    names, rows = memory.table()
    print(f"\nmost memory in each phase of a step, in GiB, {memory.what}\n")
    print_columns(names, rows, names)


def line(value: object) -> dict[str, Any] | None:
    """For the template: bands of the phases, and what was used and held over them; None where nothing is known."""
    memory = MemoryUse.read(value)
    if memory is None:
        return None
    last, most = memory.line[-1][0] or 1.0, max(held for _, _, held, _ in memory.line) or 1.0

    def curve(at: int) -> str:
        points = ((WIDTH * point[0] / last, HEIGHT * (1 - float(point[at]) / most)) for point in memory.line)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)

    bands, x = [], 0.0
    for phase, points in groupby(memory.line, key=lambda point: point[3]):
        end = WIDTH * [*points][-1][0] / last
        bands.append({"x": round(x, 1), "width": round(end - x, 1), "colour": COLOURS[phase], "told": phase})
        x = end
    names, rows = memory.table()
    return {
        "bands": bands,
        "used": curve(1),
        "held": curve(2) if memory.device == "cuda" else "",
        "height": HEIGHT,
        "legend": [{"colour": colour, "text": name} for name, colour in COLOURS.items()],
        "title": f"rank {memory.rank}, up to {most:.2f} GiB, {memory.what}, over {last:.2f} s",
        "table": {"names": names, "rows": rows},
    }
