"""History of a run's attempts, ``attempts.json``: time, place, end and lost work of each.

Rank 0 writes an entry at the start of a launch and completes it at its end. A killed launch cannot complete its entry;
the next launch does, from the files left behind.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from mgpu_pipe.checkpoint import layout
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import WorkerError
from mgpu_pipe.runs.metrics_file import read_metrics
from mgpu_pipe.system.local_files import MAX_JSON_BYTES, is_file, parse_json, read_bytes, replace_file


def read_summary(paths: RunPaths) -> dict[str, object]:
    """The run's summary; empty if it is missing or unreadable."""
    try:
        summary = parse_json(read_bytes(paths.summary, MAX_JSON_BYTES), paths.summary)
    except (FileNotFoundError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def write_summary(paths: RunPaths, summary: Mapping[str, object]) -> None:
    replace_file(paths.summary, json.dumps(summary, indent=2, default=str) + "\n")


def amend_summary(paths: RunPaths, **changes: object) -> None:
    """Change some entries of the summary."""
    write_summary(paths, {**read_summary(paths), **changes})


Entry = dict[str, object]
KILLED = "killed without warning"
WAIT_S = 10.0
"""Seconds to wait for SLURM's answer about nodes."""


def read(paths: RunPaths) -> list[Entry]:
    """Entries, the first attempt first; empty if the history is missing or unreadable."""
    try:
        content = parse_json(read_bytes(paths.attempts, MAX_JSON_BYTES), paths.attempts)
    except (OSError, ValueError):
        return []
    return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []


def wall_s(entries: Sequence[Mapping[str, object]], seen: float = 0.0) -> float:
    """Seconds of all attempts; ``seen`` is the last sign of life (epoch) of one without a recorded end."""
    return sum(map(partial(_wall_s, seen=seen), entries))


def _wall_s(entry: Mapping[str, object], seen: float) -> float:
    if "wall_s" in entry:
        return _number(entry["wall_s"])
    launched = _number(entry.get("launched")) or _number(entry.get("started"))
    return max(0.0, (_number(entry.get("ended")) or seen) - launched) if launched else 0.0


def begin(
    paths: RunPaths, attempt: int, step: Path | None, most_without_progress: int, *, launched: float = 0.0
) -> None:
    """Write the entry of a starting attempt.

    Args:
        step: step folder that it resumes from.
        most_without_progress: limit of automatic restarts in a row that resume from the same step after a crash.
        launched: start of its command in seconds since the epoch; 0: now.

    Raises:
        WorkerError: the job crashes without progress, or failed by an error that a restart cannot fix.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    entries = read(paths)
    first = _step_of(step)
    if entries and entries[-1].get("ended") is None:
        entries[-1].update(_end_of_killed(paths, entries[-1], step))
        _write(paths, entries)
    if entries and job and os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and entries[-1].get("job") == job:
        hopeless = _hopeless(entries, first, most_without_progress)
        if hopeless:
            _give_up(paths, first, hopeless, entries)
    now = time.time()
    placed: Entry = {"job": job, "nodes": os.environ.get("SLURM_JOB_NODELIST", "")} if job else {}
    times: Entry = {"launched": launched or now, "started": now}
    entry: Entry = {"attempt": attempt, **placed, **times, "from_step": first, "ended": None}
    if bad := _bad_nodes(paths):
        entry["left_out"] = bad
    _write(paths, [*entries, entry])


def begin_anew(paths: RunPaths) -> None:
    """Drop a user's launches that never trained, because another run starts in the folder; keep those of jobs."""
    job_entries = [entry for entry in read(paths) if entry.get("job")]
    if job_entries:
        _write(paths, job_entries)
    else:
        paths.attempts.unlink(missing_ok=True)


def note_unbegun(paths: RunPaths, started: float, cause: str) -> None:
    """Write the entry of a job's attempt that was stopped before its run started."""
    entries, newest = read(paths), _newest(paths)
    if entries and entries[-1].get("ended") is None:
        entries[-1].update(_end_of_killed(paths, entries[-1], newest))
    step = _step_of(newest)
    entry: Entry = {
        "attempt": len(entries) + 1,
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "nodes": os.environ.get("SLURM_JOB_NODELIST", ""),
        "started": started,
        "from_step": step,
    }
    ends: Entry = {"ended": time.time(), "status": "stopped", "cause": cause, "step": step, "lost_s": 0.0}
    _write(paths, [*entries, {**entry, **ends, "retry": False}])


def check_progress(paths: RunPaths, most_without_progress: int) -> None:
    """Raise WorkerError, also into the summary, if too many attempts in a row ended before a first step."""
    entries, step = read(paths), _step_of(_newest(paths))
    stuck = list(takewhile(lambda entry: _left_at(step, entry), entries[::-1]))
    if len(stuck) <= most_without_progress or not any(map(_by_the_limit, stuck)):
        return
    hopeless = (
        f"launch.max_restarts_without_progress={most_without_progress}: the time limit stopped the last {len(stuck)} "
        "attempts before they took a step; raise launch.time, or lower launch.warning_s"
    )
    _give_up(paths, step, hopeless, entries)


def _left_at(step: int, entry: Entry) -> bool:
    """Whether an attempt of this job ended at ``step`` without progress, by the time limit or a crash."""
    killed = entry.get("ended") is None  # not recorded yet
    ended = _by_the_limit(entry) or killed or entry.get("status") == "failed"
    return ended and entry.get("from_step") == step and entry.get("job") == os.environ.get("SLURM_JOB_ID")


def _by_the_limit(entry: Entry) -> bool:
    return str(entry.get("cause", "")).startswith(signal.SIGUSR1.name)


def _give_up(paths: RunPaths, step: int, why: str, entries: list[Entry]) -> NoReturn:
    known = {"status": "failed", "step": step, "metrics": {}, "error": {"message": why}}
    write_summary(paths, {**known, "attempts": entries})
    raise WorkerError(why)


def end(
    paths: RunPaths, status: str, step: int, cause: str, *, retry: bool, wall_s: float | None = None
) -> list[Entry]:
    """Complete the entry of the ending attempt; returns all entries.

    Args:
        step: last step taken.
        wall_s: seconds of its command; None: seconds since its launch.
        cause: cause of a stop or a failure, in words.
        retry: whether the attempt crashed and another may succeed.
    """
    entries = read(paths)
    if entries and entries[-1].get("ended") is None:
        saved = _newest(paths)
        lost = 0.0 if status in ("finished", "stopped") else _since(saved, entries[-1])
        entries[-1].update(
            ended=time.time(), status=status, cause=cause or status, step=step, lost_s=round(lost, 3), retry=retry
        )
        entries[-1]["wall_s"] = round(_wall_s(entries[-1], 0.0) if wall_s is None else wall_s, 3)
        _write(paths, entries)
    return entries


def _hopeless(entries: list[Entry], step: int, most: int) -> str:
    """Reason not to try the run again; empty if it may be tried."""
    last = entries[-1]
    if last.get("status") == "failed" and not last.get("retry"):
        return f"attempt {last.get('attempt')} ended by what a restart does not mend: {last.get('cause')}"
    crashes = list(
        takewhile(lambda entry: (entry.get("status"), entry.get("from_step")) == ("failed", step), entries[::-1])
    )
    if len(crashes) <= most:
        return ""
    return (
        f"launch.max_restarts_without_progress={most}: the last {len(crashes)} attempts crashed without saving a step; "
        f"the last one: {last.get('cause')}"
    )


def _end_of_killed(paths: RunPaths, entry: Mapping[str, object], step: Path | None) -> Entry:
    """End of a killed attempt, the time of its last step: the present attempt may write to its logs, too."""
    there = paths.metrics.exists()
    ended = max(_number(entry.get("started")), last_sign(paths))
    steps = read_metrics(paths.metrics).get("step", []) if there else []
    down = _nodes_down(str(entry.get("nodes", "")))
    lost = max(0.0, ended - max(_number(entry.get("started")), _saved_at(step)))
    return {
        "ended": ended,
        "status": "failed",
        "cause": f"{KILLED}: node {down} is down" if down else KILLED,
        "step": int(max(steps, default=0)),
        "lost_s": round(lost, 3),
        "retry": True,
    }


def last_sign(paths: RunPaths) -> float:
    """Time of the run's last logged or saved step, in seconds since the epoch; 0 without one."""
    logged = paths.metrics.stat().st_mtime if is_file(paths.metrics) else 0.0
    return max(logged, _saved_at(_newest(paths)))


def _bad_nodes(paths: RunPaths) -> str:
    """Nodes that failed their check before the start, with their faults."""
    try:
        return ", ".join(dict.fromkeys((paths.root / "bad_nodes.txt").read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        return ""


def _nodes_down(nodes: str) -> str:
    """Nodes of a job that SLURM marks as down; empty if there are none or SLURM does not answer."""
    if not nodes:
        return ""
    command = ["sinfo", "--noheader", f"--nodes={nodes}", "--states=down,drain,fail", "--format=%N"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return ",".join(dict.fromkeys(done.stdout.split()))


def _newest(paths: RunPaths) -> Path | None:
    return max(layout.committed_steps(paths.checkpoints).items(), default=(0, None))[1]


def _step_of(folder: Path | None) -> int:
    return 0 if folder is None else int(folder.name.rpartition("-")[2])


def _since(saved: Path | None, entry: Mapping[str, object]) -> float:
    return max(0.0, time.time() - max(_number(entry.get("started")), _saved_at(saved)))


def _saved_at(step: Path | None) -> float:
    return 0.0 if step is None else (step / layout.MANIFEST).stat().st_mtime


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _write(paths: RunPaths, entries: list[Entry]) -> None:
    replace_file(paths.attempts, json.dumps(entries, indent=2) + "\n", flush=True)
