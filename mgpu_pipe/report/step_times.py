"""Where a step's time went: the table of ``doctor``, and the report's bars."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.replace_file import replace_file
from mgpu_pipe.profiling.breakdown import PHASES
from mgpu_pipe.profiling.rank_times import RankTimes, StepTimes
from mgpu_pipe.report.rows import print_columns
from mgpu_pipe.runs.newest import DOCTOR
from mgpu_pipe.runs.summary import read_summary

COLOURS = {"compute": 0, "optimizer": 2, "data": 4, "host": 7, "waiting": 1, "transfer": 3}
"""Of the page's style, by part."""
MOST_BARS = 64
WIDTH, HEIGHT, GAP = 1000, 18, 4


def keep(run: Path) -> object:
    """Write what was measured of a run that has ended beside it, so that it is no run any more; None: nothing was."""
    measured = read_summary(RunPaths(run)).get("step_times")
    replace_file(run / DOCTOR, json.dumps(measured, indent=2) + "\n")
    return measured


def memory_of(measured: object) -> object:
    """What was measured of memory in the same steps."""
    return measured.get("memory") if isinstance(measured, Mapping) else None


def show(times: StepTimes, title: str) -> None:
    """Print the table and what follows from it."""
    names, rows = times.table()
    print(f"where the time of a step goes, in ms: {title}, mean of steps {times.first} to {times.last}\n")
    print_columns(names, rows, names[:-1])
    print()
    for line in times.findings:
        print(line)


def bars(value: object) -> dict[str, Any] | None:
    """A bar for each rank, for the template: stretches as long as what they stand for; None where nothing is known."""
    times = StepTimes.read(value)
    if times is None:
        return None
    longest = max(rank.step_s for rank in times.ranks) or 1.0
    rows = []
    for number, rank in enumerate(times.ranks[:MOST_BARS]):
        at, stretches = 0.0, []
        for name, seconds in parts(rank):
            width = WIDTH * max(seconds, 0.0) / longest
            told = f"rank {number}: {name} {1000 * seconds:.1f} ms"
            stretches.append({"x": round(at, 2), "width": round(width, 2), "colour": COLOURS[name], "told": told})
            at += width
        rows.append({"rank": number, "y": number * (HEIGHT + GAP), "stretches": stretches})
    names, table = times.table()
    return {
        "rows": rows,
        "height": len(rows) * (HEIGHT + GAP),
        "bar": HEIGHT,
        "legend": [{"colour": colour, "text": name} for name, colour in COLOURS.items()],
        "table": {"names": names, "rows": table},
        "findings": times.findings,
        "title": f"mean of steps {times.first} to {times.last}",
    }


def parts(rank: RankTimes) -> Sequence[tuple[str, float]]:
    """What a bar is put together of."""
    return [
        *((kind, rank.own.get(kind, 0.0)) for kind in PHASES),
        ("waiting", rank.waiting_s),
        ("transfer", rank.transfer_s),
    ]
