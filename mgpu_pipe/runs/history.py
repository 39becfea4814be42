"""The history of a job's attempts, ``attempts.json``: where each ran, how it ended, what was lost.

A scheduler starts a run again and again. Rank 0 writes an entry when an attempt begins and completes it when that ends;
one that was killed without a warning could not, so that the next attempt does, from what it left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from mgpu_pipe.checkpoint import layout
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.plain_files import MAX_JSON_BYTES, parse_json, read_bytes
from mgpu_pipe.config.replace_file import replace_file
from mgpu_pipe.errors import WorkerError
from mgpu_pipe.runs.metrics_file import read_metrics
from mgpu_pipe.runs.summary import write_summary

Entry = dict[str, object]
KILLED = "killed without warning"
WAIT_S = 10.0
"""How long SLURM's answer about nodes is waited for."""


def read(paths: RunPaths) -> list[Entry]:
    """The entries, the first attempt's first; empty for a run that no scheduler started."""
    try:
        content = parse_json(read_bytes(paths.attempts, MAX_JSON_BYTES), paths.attempts)
    except (OSError, ValueError):
        return []
    return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []


def begin(paths: RunPaths, attempt: int, step: Path | None, most_without_progress: int) -> None:
    """Write that a job's attempt begins; outside of a job nothing is written.

    Args:
        step: the step folder that it goes on from.
        most_without_progress: automatic restarts in a row that may go on from the same step after a crash.

    Raises:
        WorkerError: the run only crashes, or ended by an error that a restart does not mend.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        return
    entries = read(paths)
    first = _step_of(step)
    if entries and entries[-1].get("ended") is None:
        entries[-1].update(_of_a_killed(paths, entries[-1], step))
        _write(paths, entries)
    if entries and os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and entries[-1].get("job") == job:
        hopeless = _hopeless(entries, first, most_without_progress)
        if hopeless:
            _give_up(paths, first, hopeless, entries)
    entry: Entry = {
        "attempt": attempt,
        "job": job,
        "nodes": os.environ.get("SLURM_JOB_NODELIST", ""),
        "started": time.time(),
        "from_step": first,
        "ended": None,
    }
    if bad := _bad_nodes(paths):
        entry["left_out"] = bad
    _write(paths, [*entries, entry])


def note_unbegun(paths: RunPaths, started: float, cause: str) -> None:
    """Write that a job's attempt was stopped before its run began."""
    entries, newest = read(paths), _newest(paths)
    if entries and entries[-1].get("ended") is None:
        entries[-1].update(_of_a_killed(paths, entries[-1], newest))
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
    """Refuse to go on where the time limit has stopped too many attempts in a row before they took a step.

    Raises:
        WorkerError: says so; the run's summary does, too.
    """
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
    """Whether an attempt of this job took no step from there, by the time limit or a crash."""
    killed = entry.get("ended") is None  # nobody has noted it yet
    ended = _by_the_limit(entry) or killed or entry.get("status") == "failed"
    return ended and entry.get("from_step") == step and entry.get("job") == os.environ.get("SLURM_JOB_ID")


def _by_the_limit(entry: Entry) -> bool:
    return str(entry.get("cause", "")).startswith(signal.SIGUSR1.name)


def _give_up(paths: RunPaths, step: int, why: str, entries: list[Entry]) -> NoReturn:
    known = {"status": "failed", "step": step, "metrics": {}, "error": {"message": why}}
    write_summary(paths, {**known, "attempts": entries})
    raise WorkerError(why)


def end(paths: RunPaths, status: str, step: int, cause: str, *, retry: bool) -> list[Entry]:
    """Complete the entry of the attempt that ends; returns all entries.

    Args:
        step: the last one taken.
        cause: of a stop or a failure, in words.
        retry: whether the attempt crashed, and another may do better.
    """
    entries = read(paths)
    if entries and entries[-1].get("ended") is None:
        saved = _newest(paths)
        lost = 0.0 if status in ("finished", "stopped") else _since(saved, entries[-1])
        entries[-1].update(
            ended=time.time(), status=status, cause=cause or status, step=step, lost_s=round(lost, 3), retry=retry
        )
        _write(paths, entries)
    return entries


def _hopeless(entries: list[Entry], step: int, most: int) -> str:
    """Why the run is not tried again; empty where it is."""
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


def _of_a_killed(paths: RunPaths, entry: Mapping[str, object], step: Path | None) -> Entry:
    """How an attempt ended that left no word: what it reached, and when it took its last step.

    The ranks' logs do not tell when: this attempt's workers, which may have started, write there too.
    """
    there = paths.metrics.exists()
    ended = max(_number(entry.get("started")), paths.metrics.stat().st_mtime if there else 0.0)
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


def _bad_nodes(paths: RunPaths) -> str:
    """The nodes that failed their check before the start, with what is wrong with them."""
    try:
        return ", ".join(dict.fromkeys((paths.root / "bad_nodes.txt").read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        return ""


def _nodes_down(nodes: str) -> str:
    """Those of a job's nodes that SLURM cannot use; empty where there are none, or it cannot be asked."""
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
    return max(layout.committed(paths.checkpoints).items(), default=(0, None))[1]


def _step_of(folder: Path | None) -> int:
    return 0 if folder is None else int(folder.name.rpartition("-")[2])


def _since(saved: Path | None, entry: Mapping[str, object]) -> float:
    return max(0.0, time.time() - max(_number(entry.get("started")), _saved_at(saved)))


def _saved_at(step: Path | None) -> float:
    return 0.0 if step is None else (step / layout.MANIFEST).stat().st_mtime


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _write(paths: RunPaths, entries: list[Entry]) -> None:
    replace_file(paths.attempts, json.dumps(entries, indent=2) + "\n", flush=True)
