"""Sections of the report that explain a run: why it ended, where its time went, and its changed defaults."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgpu_pipe.config.convert import leaves, setting, to_plain
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.report import numbers
from mgpu_pipe.report.charts import clock
from mgpu_pipe.report.run_view import RunView, number
from mgpu_pipe.runs import history
from mgpu_pipe.runs.resume_command import line_for

COLUMNS = (
    "attempt",
    "began",
    "took",
    "status",
    "from step",
    "to step",
    "work lost",
    "job",
    "nodes",
    "left out",
    "cause",
)
WHEN = "%Y-%m-%d %H:%M:%S"


def strategies_text(view: RunView) -> str:
    """The strategies of all attempts, as ``ddp, then zero2``; without known attempts, the configured strategy."""
    return ", then ".join(view.strategies) or str(view.config_value("strategy", "name") or "")


def attempts_text(view: RunView) -> str:
    """The number of attempts and their lost work, as ``3 attempts, 40 s of work lost``; empty for one attempt."""
    if view.num_attempts == 1:
        return ""
    lost = sum(value for entry in view.attempts if (value := number(entry.get("lost_s"))) > 0)
    return f"{view.num_attempts} attempts" + (f", {numbers.duration(lost)} of work lost" if lost >= 1 else "")


def attempts_table(view: RunView) -> dict[str, Any] | None:
    """A table with a row for each launch, without empty columns; None for a single launch."""
    if len(view.attempts) < 2:
        return None
    last_sign = history.last_sign(view.paths)
    cells = [_cells(entry, last_sign) for entry in view.attempts]
    names = [name for name in COLUMNS if any(row[name] for row in cells)]
    return {"names": names, "rows": [[row[name] for name in names] for row in cells], "numeric": True}


def _cells(entry: Mapping[str, Any], last_sign: float) -> dict[str, str]:
    began, wall_s = number(entry.get("launched") or entry.get("started")), history.wall_s([entry], last_sign)
    lost = number(entry.get("lost_s"))
    cells = {
        "began": _clock_time(began),
        "took": numbers.duration(wall_s),
        "status": entry.get("status") or ("" if entry.get("ended") else "no end noted"),
        "from step": entry.get("from_step"),
        "to step": entry.get("step"),
        "work lost": numbers.duration(lost) if lost >= 1 else "",
        "left out": entry.get("left_out"),
    }
    return {name: _cell_text(cells.get(name, entry.get(name))) for name in COLUMNS}


def _clock_time(seconds: float) -> str:
    try:
        return time.strftime(WHEN, time.localtime(seconds)) if seconds > 0 else ""
    except (OverflowError, OSError, ValueError):  # outside the calendar's range
        return ""


def _cell_text(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


SLOW_SHARE, FEW = 0.95, 20
"""Percentile of the reported slow step, and the fewest steps for which it is reported."""


def explain_end(view: RunView) -> dict[str, str] | None:
    """The reason why a run ended early, and the command that resumes it; None for a run that took all its steps."""
    limit = view.summary.get("max_time")
    if view.status == "finished" and limit is None:
        return None
    total = f" of {view.total_steps:,}" if view.total_steps else ""
    position = f"step {view.steps:,}{total}" if view.steps else "no logged step"
    if view.status == "finished":
        text = f"trainer.max_time={limit} ended it after {position}; a larger one resumes it."
        return {"text": text, "command": ""}
    if view.status == "running":
        when = f", written {_last_change(view.paths.metrics)}" if view.steps else ""
        return {"text": f"A launch holds this run's folder; the last logged is {position}{when}.", "command": ""}
    reason = {
        "stopped": f"A signal or a callback stopped it after {position}.",
        "failed": f"It failed after {position}.",
        "unfinished": f"It ended after {position} and left no word why: it was killed, or its machine went down.",
    }.get(view.status, f"It ended after {position}: {view.status}.")
    complete = [saved.step for saved in view.checkpoints if saved.whole]
    if not complete:
        return {"text": f"{reason} No checkpoint was saved.", "command": ""}
    text = f"{reason} Its newest checkpoint is of step {max(complete):,}; this resumes it:"
    return {"text": text, "command": line_for(view.overrides, view.paths.root.absolute())}


def times(view: RunView) -> dict[str, str]:
    """Times of the logged steps, next to the wall time of all attempts."""
    series = zip(view.metrics.get("throughput/step_s", []), view.metrics.get("step", []), strict=False)
    timed = [(seconds, step) for seconds, step in series if math.isfinite(seconds)]
    steps = clock(view)
    if not timed or len(steps) < 3:
        return {}
    ordered, (slowest, when), training = sorted(seconds for seconds, _ in timed), max(timed), steps[2][-1]
    slow = ordered[int(SLOW_SHARE * (len(ordered) - 1))]
    rows = {
        "a step, median": numbers.seconds(statistics.median(ordered)),
        **({"1 step in 20 takes over": numbers.seconds(slow)} if len(ordered) >= FEW else {}),
        "slowest": f"{numbers.seconds(slowest)}, step {when:,}",
        "all steps": numbers.duration(training),
    }
    wall = number(view.summary.get("wall_s"))
    if wall >= training:  # runs of earlier versions recorded only the last attempt's wall time
        rest = "start, evaluation, saving" + (", lost work" if view.num_attempts > 1 else "")
        rows[rest] = f"{numbers.duration(wall - training)}, {1 - training / wall:.0%} of all"
    return rows


def changed_defaults(view: RunView) -> dict[str, Any] | None:
    """Table of keys that differ from the schema's defaults, and of keys that the command line added."""
    default = leaves(to_plain(RunConfig()))
    typed = {item.partition("=")[0].lstrip("+~") for item in view.overrides}
    rows = [
        [key, setting(value), setting(default[key]) if key in default else numbers.MISSING]
        for key, value in leaves(view.config).items()
        if not key.startswith("run.") and (default[key] != value if key in default else key in typed)
    ]
    return {"names": ["key", "value", "default"], "rows": rows} if rows else None


def _last_change(path: Path) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(path.stat().st_mtime))
    except OSError:
        return "at a time that cannot be read"
