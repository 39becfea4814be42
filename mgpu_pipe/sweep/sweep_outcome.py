"""Outcome of a point's launch, recorded in the sweep and, where the run cannot know it, in the run."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_STOPPED,
    GradientSpikeError,
    MgpuError,
    NonFiniteError,
    one_line,
    print_error,
)
from mgpu_pipe.report.run_view import WARM_UP_ROWS, finite
from mgpu_pipe.runs.history import amend_summary, read_summary
from mgpu_pipe.runs.metrics_file import read_metrics
from mgpu_pipe.sweep.point import DIVERGED, FAILED, FINISHED, INTERRUPTED, OUT_OF_MEMORY, PAUSED, STOPPED, Point
from mgpu_pipe.sweep.store import Store
from mgpu_pipe.system.local_files import is_file

NO_MEMORY = re.compile(r"OutOfMemory|out of memory|can't allocate memory|Cannot allocate memory|MemoryError")
SPEEDS = ("throughput/tokens_per_s", "throughput/samples_per_s", "throughput/step_s")
KILLED = "killed by SIGKILL"


def record_outcome(store: Store, point: Point, code: int, wall_s: float, short: bool = False) -> int:
    """Record the outcome of a point's launch; returns the exit code.

    Args:
        code: exit code of the launch, which took ``wall_s`` seconds.
        short: the kernel killed a process for its memory meanwhile.
    """
    paths = RunPaths(Path(point.folder))
    summary = read_summary(paths)
    status, reason = outcome(code, summary, short, store.spec.get("diverged_above"))
    if status == FINISHED and point.budget:
        point, status, reason = _at_rung(store, point, summary)
    if summary and summary.get("status") != status and status in (DIVERGED, OUT_OF_MEMORY):
        say_in_run(paths, status=status, reason=reason)
    code = code or (EXIT_FAILURE if status == DIVERGED else EXIT_OK)
    metrics = {**_figures(summary), **_speed(paths)}
    ended_with(store, point, status, code, reason, {**summary, "metrics": metrics}, wall_s)
    return EXIT_STOPPED if status == STOPPED else code


def refuse_point(store: Store, point: Point, error: MgpuError) -> int:
    """Record the error of a point that did not start; a stopped point can be resumed."""
    print_error(error)
    status = STOPPED if error.exit_code == EXIT_STOPPED else FAILED
    return ended_with(store, point, status, error.exit_code, one_line(error), {}, 0.0)


def ended_with(
    store: Store, point: Point, status: str, code: int, reason: str, summary: Mapping[str, Any], wall_s: float
) -> int:
    """Record a given outcome of a point's launch; ``wall_s`` is the time of this launch alone."""
    step, world = summary.get("step"), summary.get("world_size")
    store.change(
        point,
        status=status,
        owner="",
        exit_code=code,
        reason=reason,
        metrics=_figures(summary),
        step=step if isinstance(step, int) else point.step,
        wall_s=point.wall_s + wall_s,
        cost_s=point.cost_s + wall_s * (world if isinstance(world, int) else 1),
    )
    return code


def outcome(code: int, summary: Mapping[str, Any], short: bool, bound: float | None = None) -> tuple[str, str]:
    """Status of a run after a launch, and its reason.

    Args:
        code: exit code of its launch.
        short: the kernel killed a process for its memory meanwhile.
        bound: training loss above which the run counts as diverged.
    """
    error = summary.get("error")
    described = {str(key): str(value) for key, value in error.items()} if isinstance(error, Mapping) else {}
    reason, kind = one_line(described.get("message", "")), described.get("type", "")
    if code == EXIT_OK:
        loss = _figures(summary).get("train/loss", math.nan)
        if bound is not None and loss > bound:
            return DIVERGED, f"train/loss={loss:.4g} is above sweep.diverged_above={bound:g}"
        return FINISHED, ""
    if code == EXIT_STOPPED:
        return STOPPED, ""
    if kind in (NonFiniteError.__name__, GradientSpikeError.__name__):
        return DIVERGED, reason
    if NO_MEMORY.search(kind) or NO_MEMORY.search(reason):
        return OUT_OF_MEMORY, reason
    if KILLED in reason:
        return (OUT_OF_MEMORY, reason) if short else (INTERRUPTED, "its worker was killed from outside")
    return FAILED, reason


def _at_rung(store: Store, point: Point, summary: Mapping[str, Any]) -> tuple[Point, str, str]:
    """Record a run's metric at its rung; the run pauses, unless the rung is the last or the metric is NaN."""
    metric = store.spec["metrics"][0]
    value = _figures(summary).get(metric, math.nan)
    if math.isnan(value):
        return point, DIVERGED, f"{metric} is no number at step {point.budget}"
    changed = store.change(point, rungs={**point.rungs, point.budget: value}) or point
    return changed, FINISHED if point.budget == store.spec["rungs"][-1] else PAUSED, ""


def say_in_run(paths: RunPaths, **outcome: object) -> None:
    """Write the outcome into the run's summary and into its report, which was written earlier."""
    from mgpu_pipe.report.html import write_report

    amend_summary(paths, **outcome)
    if is_file(paths.report):
        write_report([paths], paths.report)


def _figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """Metrics at a run's end, with the largest peak memory of its processes."""
    metrics, memory = summary.get("metrics"), summary.get("memory")
    values = dict(metrics) if isinstance(metrics, Mapping) else {}
    peaks = memory.get("peak_gib") if isinstance(memory, Mapping) else None
    if isinstance(peaks, list) and peaks:
        values["memory/peak_gib"] = max(peaks)
    return {
        str(name): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _speed(paths: RunPaths) -> dict[str, float]:
    """Median speed of a run's steps after warm-up."""
    columns = read_metrics(paths.metrics)
    rates = {name: finite(columns.get(name, []))[WARM_UP_ROWS:] for name in SPEEDS}
    return {name: statistics.median(values) for name, values in rates.items() if values}


def killed_for_memory() -> int:
    """Number of processes that the kernel's OOM killer ended since boot."""
    for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0
