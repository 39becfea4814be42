"""A point of a sweep: one run, and what became of it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.runs.lock import boot_id, process_identity

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
STOPPED, INTERRUPTED, CANCELLED = "stopped", "interrupted", "cancelled"
PAUSED, PRUNED = "paused", "pruned"
"""At a rung, while others may still promote it; and for good, when the sweep had ended."""
FAILED, DIVERGED, OUT_OF_MEMORY = "failed", "diverged", "out_of_memory"
SILENT_S = 120.0
"""Another host's process that has not renewed its lease for so long is gone; clocks may differ by less."""
GOES_ON = (WAITING, STOPPED, INTERRUPTED)
"""What ``sweeps resume`` runs; a running point whose process is gone counts as interrupted."""
ENDED_BADLY = (FAILED, DIVERGED, OUT_OF_MEMORY)
"""What ``sweeps retry`` runs again, besides what was cancelled."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        number: from 1.
        overrides: by which it differs from the others, its seed among them where there are several.
        trial: number of the first point of the same setting; points of one trial differ in their seeds alone.
        status: one of this module's words.
        reason: why it ended badly.
        folder: of its run; empty until that was made.
        metrics: the last values, by name.
        step: optimizer steps taken.
        wall_s: seconds of all its launches.
        cost_s: the same, times the processes that trained.
        attempts: how often it was begun or continued.
        owner: the process that runs it, as :func:`~mgpu_pipe.runs.lock.process_identity` names it.
        exit_code: of its last launch.
        rungs: of a sweep that prunes, its metric by the steps after which it was looked at.
        budget: steps that it may train to now; 0: to its end.
        version: counts what others than its owner changed, for stores of files.
    """

    number: int
    overrides: tuple[str, ...]
    trial: int = 0
    status: str = WAITING
    reason: str = ""
    folder: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int = 0
    wall_s: float = 0.0
    cost_s: float = 0.0
    attempts: int = 0
    owner: str = ""
    exit_code: int = 0
    begun: float = 0.0
    rungs: Mapping[int, float] = field(default_factory=dict)
    budget: int = 0
    version: int = 0

    def metric(self, name: str) -> float:
        """NaN where it was not measured."""
        value = self.metrics.get(name)
        return float(value) if isinstance(value, int | float) else math.nan

    @property
    def settings(self) -> dict[str, str]:
        """Values by key, as typed, the seed of a repetition left out where the trial has several."""
        pairs = (override.lstrip("+").partition("=") for override in self.overrides)
        return {key: value for key, _, value in pairs}


def seen(point: Point, one_host: bool) -> Point:
    """``point`` as it is now: interrupted where it was running and its process is gone.

    Args:
        one_host: whether all processes of the sweep run on this machine.
    """
    if point.status != RUNNING or _lives(point, one_host):
        return point
    return replace(point, status=INTERRUPTED)


def me() -> str:
    """This process, as the owner of a point."""
    return process_identity(os.getpid())


def _lives(point: Point, one_host: bool) -> bool:
    """Whether the process that runs a point may be alive.

    One of another boot is gone where there is one host; another host's shows that it lives by the lease in its run's
    folder, which it renews every few seconds.
    """
    boot, _, rest = point.owner.partition(":")
    pid = rest.partition(":")[0]
    if boot == boot_id():
        return pid.isdigit() and process_identity(int(pid)) == point.owner
    if one_host:
        return False
    try:
        renewed = RunPaths(Path(point.folder)).lock.stat().st_mtime if point.folder else point.begun
    except OSError:
        renewed = point.begun
    return time.time() - max(renewed, point.begun) < SILENT_S


def as_record(point: Point) -> dict[str, Any]:
    """What a store writes."""
    return asdict(point)


def from_record(record: Mapping[str, Any]) -> Point:
    """What a store wrote; entries that a later version added are left out."""
    known = {one.name for one in fields(Point)}
    values = {key: value for key, value in record.items() if key in known}
    overrides: Sequence[str] = values.get("overrides", ())
    rungs = {int(step): value for step, value in values.get("rungs", {}).items()}
    return Point(**{**values, "overrides": tuple(overrides), "rungs": rungs})
