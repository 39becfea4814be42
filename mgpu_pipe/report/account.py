"""A run's account of itself: why it is not finished, where its time went, what it changed of the defaults."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import Any

from mgpu_pipe.config.convert import to_plain
from mgpu_pipe.config.dotted import leaves, setting
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.report import numbers
from mgpu_pipe.report.charts import clock
from mgpu_pipe.report.run_view import RunView, number
from mgpu_pipe.runs.continue_line import line_for

SLOW_SHARE = 0.95


def why(view: RunView) -> dict[str, str] | None:
    """Why a run took not all its steps, and the command that goes on; None for one that did."""
    limit = view.summary.get("max_time")
    if view.status == "finished" and limit is None:
        return None
    total = f" of {view.total_steps:,}" if view.total_steps else ""
    at = f"step {view.steps:,}{total}" if view.steps else "no logged step"
    if view.status == "finished":
        text = f"trainer.max_time={limit} ended it after {at}; a larger one goes on from there."
        return {"text": text, "command": ""}
    if view.status == "running":
        when = f", written {_moment(view.paths.metrics)}" if view.steps else ""
        return {"text": f"A launch holds this run's folder; the last logged is {at}{when}.", "command": ""}
    told = {
        "stopped": f"A signal or a callback stopped it after {at}.",
        "failed": f"It failed after {at}.",
        "unfinished": f"It ended after {at} and left no word why: it was killed, or its machine went down.",
    }.get(view.status, f"It ended after {at}: {view.status}.")
    whole = [saved.step for saved in view.checkpoints if saved.whole]
    if not whole:
        return {"text": f"{told} No checkpoint was saved.", "command": ""}
    text = f"{told} Its newest checkpoint is of step {max(whole):,}; this goes on from there:"
    return {"text": text, "command": line_for(view.overrides, view.paths.root.absolute())}


def times(view: RunView) -> dict[str, str]:
    """What the logged steps took, beside the whole command's time."""
    series = zip(view.metrics.get("throughput/step_s", []), view.metrics.get("step", []), strict=False)
    timed = [(seconds, step) for seconds, step in series if math.isfinite(seconds)]
    steps = clock(view)
    if not timed or len(steps) < 3:
        return {}
    ordered, (slowest, when), training = sorted(seconds for seconds, _ in timed), max(timed), steps[2][-1]
    rows = {
        "a step, median": _seconds(statistics.median(ordered)),
        "1 step in 20 takes over": _seconds(ordered[int(SLOW_SHARE * (len(ordered) - 1))]),
        "slowest": f"{_seconds(slowest)}, step {when:,}",
        "all steps": numbers.duration(training),
    }
    wall = number(view.summary.get("wall_s"))
    if wall >= training:  # a run that was continued has its last launch's wall time
        rows["start, evaluation, saving"] = f"{numbers.duration(wall - training)}, {1 - training / wall:.0%} of all"
    return rows


def from_defaults(view: RunView) -> dict[str, Any] | None:
    """Keys of the schema that have not their default, and what the command line added besides, as a table."""
    default = leaves(to_plain(RunConfig()))
    typed = {item.partition("=")[0].lstrip("+~") for item in view.overrides}
    rows = [
        [key, setting(value), setting(default[key]) if key in default else numbers.MISSING]
        for key, value in leaves(view.config).items()
        if not key.startswith("run.") and (default[key] != value if key in default else key in typed)
    ]
    return {"names": ["key", "value", "default"], "rows": rows} if rows else None


def _seconds(seconds: float) -> str:
    return f"{numbers.figure(seconds, 3)} s"


def _moment(path: Path) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(path.stat().st_mtime))
    except OSError:
        return "at a time that cannot be read"
