"""Tables of measurements: where a step's time went, memory, links, and traced ranks; and the report's bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import TrainerConfig
from mgpu_pipe.errors import print_line
from mgpu_pipe.planning.memory import MemoryPlan
from mgpu_pipe.report.columns import print_columns
from mgpu_pipe.report.numbers import gibibytes
from mgpu_pipe.runs.history import read_summary
from mgpu_pipe.runs.latest import DOCTOR
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.training.profiling.device_trace import PHASES
from mgpu_pipe.training.profiling.link_table import Link, table, verdict
from mgpu_pipe.training.profiling.memory_use import MEMORY_PHASES, MemoryUse
from mgpu_pipe.training.profiling.rank_times import RankTimes, StepTimes


def show_links(links: list[Link], trainer: TrainerConfig) -> None:
    """Print the links and which of them are slow."""
    ranks = 1 + max(link.second for link in links)
    kind = "gloo" if device_type(trainer) == "cpu" else "NCCL"
    names, rows = table(links)
    listed = f"{len(links)}" if len(rows) == len(links) else f"the slowest {len(rows)} of {len(links)}"
    print_line(f"{listed} link{'s' if len(links) > 1 else ''} of {ranks} ranks, by {kind}; the slower direction")
    print_line()
    print_columns(names, rows, names[2:4], below=(), spare=("node",))
    print_line()
    for line in verdict(links):
        print_line(line)
    sys.stdout.flush()


PHASE_COLOURS = dict(zip(MEMORY_PHASES, (0, 3, 2, 7), strict=True))
"""Colour numbers of the page's style, by phase."""
MEMORY_WIDTH, MEMORY_HEIGHT = 1000, 120


def show_memory(memory: MemoryUse) -> None:
    names, rows = memory.table()
    print_line()
    print_line(f"most memory in each phase of a step, in GiB, {memory.what}")
    print_line()
    print_columns(names, rows, names, below=())


def memory_bands(value: object) -> dict[str, Any] | None:
    """Memory chart for the template: bands of the phases with used and reserved memory; None without measurements."""
    memory = MemoryUse.read(value)
    if memory is None:
        return None
    last, most = memory.line[-1][0] or 1.0, max(reserved for _, _, reserved, _ in memory.line) or 1.0

    def curve(column: int) -> str:
        points = (
            (MEMORY_WIDTH * point[0] / last, MEMORY_HEIGHT * (1 - float(point[column]) / most)) for point in memory.line
        )
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)

    bands, x = [], 0.0
    for phase, points in groupby(memory.line, key=lambda point: point[3]):
        end = MEMORY_WIDTH * [*points][-1][0] / last
        bands.append({"x": round(x, 1), "width": round(end - x, 1), "colour": PHASE_COLOURS[phase], "title": phase})
        x = end
    names, rows = memory.table()
    return {
        "bands": bands,
        "used": curve(1),
        "held": curve(2) if memory.device == "cuda" else "",
        "height": MEMORY_HEIGHT,
        "legend": [{"colour": colour, "text": name} for name, colour in PHASE_COLOURS.items()],
        "title": f"rank {memory.rank}, up to {most:.2f} GiB, {memory.what}, over {last:.2f} s",
        "table": {"names": names, "rows": rows},
    }


COLOURS = {"compute": 0, "optimizer": 2, "data": 4, "host": 7, "waiting": 1, "transfer": 3}
"""Colour numbers of the page's style, by part."""
MOST_BARS = 64
WIDTH, HEIGHT, GAP = 1000, 18, 4


def save_step_times(run: Path) -> object:
    """Write a finished run's step times to ``doctor.json`` in its folder and return them; None if it has none."""
    measured = read_summary(RunPaths(run)).get("step_times")
    replace_file(run / DOCTOR, json.dumps(measured, indent=2) + "\n")
    return measured


def memory_of(measured: object) -> object:
    """The memory measurements of the same steps."""
    return measured.get("memory") if isinstance(measured, Mapping) else None


def show_step_times(times: StepTimes, title: str) -> None:
    """Print the table and the findings."""
    names, rows = times.table()
    print_line(f"where the time of a step goes, in ms: {title}, mean of steps {times.first} to {times.last}")
    print_line()
    print_columns(names, rows, names[:-1], below=())
    print_line()
    for line in times.findings:
        print_line(line)


def bars(value: object) -> dict[str, Any] | None:
    """A bar for each rank, for the template, with stretches in proportion to their times; None without measurements."""
    times = StepTimes.read(value)
    if times is None:
        return None
    longest = max(rank.step_s for rank in times.ranks) or 1.0
    rows = []
    for number, rank in enumerate(times.ranks[:MOST_BARS]):
        left, stretches = 0.0, []
        for name, seconds in parts(rank):
            width = WIDTH * max(seconds, 0.0) / longest
            label = f"rank {number}: {name} {1000 * seconds:.1f} ms"
            stretches.append({"x": round(left, 2), "width": round(width, 2), "colour": COLOURS[name], "title": label})
            left += width
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
    """Names and seconds of a bar's parts."""
    return [
        *((kind, rank.own.get(kind, 0.0)) for kind in PHASES),
        ("waiting", rank.waiting_s),
        ("transfer", rank.transfer_s),
    ]


GIB = 1 << 30
TRACED_PHASES = {"forward": "forward pass", "backward": "backward pass", "update": "norm and optimizer"}
BORN = {"build": "before the step", **TRACED_PHASES}
"""Phases in which what is live at a peak was allocated."""
STATE = ("weights", "optimizer")


def peak_of(trace: Mapping[str, Any]) -> int:
    """The most live bytes of a traced step."""
    return max(int(size) for size in trace["peaks"].values())


def print_traces(traces: Sequence[Mapping[str, Any]], plain: MemoryPlan | None, compiled: MemoryPlan | None) -> None:
    """Print the traces.

    Args:
        plain: the formulas' figures where blocks are not compiled, as they are traced.
        compiled: those of the run.
    """
    cells = []
    for trace in traces:
        name = f"{trace['rank']}"
        cells.append([name, "built", _size(trace["built"]), *[""] * len(BORN)])
        for phase, words in TRACED_PHASES.items():
            born = trace["born"].get(phase, {})
            cells.append(["", words, _size(trace["peaks"].get(phase, 0)), *(_size(born.get(key, 0)) for key in BORN)])
        cells.append(["", "kept after the step", _size(trace["kept"]), *[""] * len(BORN)])
    names = ("rank", "phase", "most live", *(f"of: {words}" for words in BORN.values()))
    print_columns(names, cells, ("rank", *names[2:]), below=(), spare=names[3:])
    print_line()
    worst = max(traces, key=peak_of)
    if plain is not None and compiled is not None:
        _print_formulas(worst, plain, compiled)
    batches = f"{worst['micro_batches']} of {worst['of_micro_batches']} micro-batches"
    print_line(f"collectives of rank {worst['rank']} in a step of {batches}, more of which change no memory:")
    for name, (calls, sent) in worst["collectives"].items():
        print_line(f"  {name.replace('_', ' ')}: {calls:,} calls, {_size(sent)} sent")


def _print_formulas(trace: Mapping[str, Any], plain: MemoryPlan, compiled: MemoryPlan) -> None:
    """Compare the rank that needs most memory with the formulas."""
    parts, peak = trace["parts"], peak_of(trace)
    rest = {name: size for name, size in plain.terms.items() if name not in STATE}
    tensors = plain.tensor_bytes - sum(plain.terms.get(name, 0) for name in STATE)
    rows = [[name, _size(parts[name]), _size(plain.terms.get(name, 0))] for name in STATE]
    rows.append(
        ["gradients, gathered weights, activations", _size(peak - sum(parts[name] for name in STATE)), _size(tensors)]
    )
    rows.append([f"peak of rank {trace['rank']}", _size(peak), _size(plain.tensor_bytes)])
    print_columns(("", "traced", "formulas"), rows, ("traced", "formulas"), below=(), spare=())
    difference = 100 * (plain.tensor_bytes / peak - 1)
    moving = ", ".join(f"{name} {_size(size)}" for name, size in rest.items())
    print_line(f"the formulas are {difference:+.1f}% off; their terms: {moving}")
    print_line(
        f"the run, with compiled blocks where it compiles, CUDA and fragmentation: {_size(compiled.likely)} likely, "
        f"{_size(compiled.high)} high"
    )
    print_line()


def _size(size: float) -> str:
    return gibibytes(size / GIB) if size else "0"
