"""The tables of ``plan --trace``: bytes of ranks by phase, the formulas' figures beside them, and collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgpu_pipe.errors import print_line
from mgpu_pipe.planning.memory import MemoryPlan
from mgpu_pipe.report.columns import gibibytes, print_columns

GIB = 1 << 30
PHASES = {"forward": "forward pass", "backward": "backward pass", "update": "norm and optimizer"}
BORN = {"build": "before the step", **PHASES}
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
        for phase, words in PHASES.items():
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
    tensors = plain.allocated - sum(plain.terms.get(name, 0) for name in STATE)
    rows = [[name, _size(parts[name]), _size(plain.terms.get(name, 0))] for name in STATE]
    rows.append(
        ["gradients, gathered weights, activations", _size(peak - sum(parts[name] for name in STATE)), _size(tensors)]
    )
    rows.append([f"peak of rank {trace['rank']}", _size(peak), _size(plain.allocated)])
    print_columns(("", "traced", "formulas"), rows, ("traced", "formulas"), below=(), spare=())
    difference = 100 * (plain.allocated / peak - 1)
    moving = ", ".join(f"{name} {_size(size)}" for name, size in rest.items())
    print_line(f"the formulas are {difference:+.1f}% off; their terms: {moving}")
    print_line(
        f"the run, with compiled blocks where it compiles, CUDA and fragmentation: {_size(compiled.likely)} likely, "
        f"{_size(compiled.high)} high"
    )
    print_line()


def _size(size: float) -> str:
    return gibibytes(size / GIB) if size else "0"
