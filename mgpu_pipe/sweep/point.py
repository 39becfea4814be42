"""A point of a sweep: one run, its status and its record."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.runs.lock import boot_id, is_held, process_identity
from mgpu_pipe.system.local_files import MAX_JSON_BYTES, NotPlainError, parse_json, read_bytes, replace_file

LARGEST = 2**63 - 1
Test = Callable[[object], bool]


def _whole(value: object) -> bool:
    return type(value) is int and abs(value) <= LARGEST


def _number(value: object) -> bool:
    return _whole(value) or isinstance(value, float)


def _finite(value: object) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _truth(value: object) -> bool:
    return isinstance(value, bool)


def _list_of(test: Test, least: int = 0) -> Test:
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(test, value))


def _parameter(value: object) -> bool:
    return isinstance(value, dict) and _text(value.get("key")) and isinstance(value.get("values"), list)


def _metrics(value: object) -> bool:
    return isinstance(value, dict) and all(
        metric is None or _number(metric) or _text(metric) for metric in value.values()
    )


def _rungs(value: object) -> bool:
    return isinstance(value, dict) and all(
        (_whole(step) or (isinstance(step, str) and step.isascii() and step.isdigit() and len(step) < 19))
        and _number(metric)
        for step, metric in value.items()
    )


SPEC_ENTRIES: dict[str, tuple[Test, str]] = {
    "words": (_texts, "a list of texts"),
    "cwd": (_text, "a text"),
    "flags": (_texts, "a list of texts"),
    "fixed": (_texts, "a list of texts"),
    "created": (_finite, "a number"),
    "seed": (_whole, "a whole number"),
    "seeds": (_whole, "a whole number"),
    "metrics": (_list_of(_text, 1), "a list of names"),
    "minimize": (_list_of(_truth, 1), "a list of true and false"),
    "search": (_text, "a text"),
    "trials": (_whole, "a whole number"),
    "space": (_list_of(_parameter), "a list of parameters"),
    "pruner": (_text, "a text"),
    "rungs": (_list_of(_whole), "a list of steps"),
    "parallel": (_whole, "a whole number"),
}
"""Required entries of ``sweep.json``: a test and its description."""
_OPTIONAL: dict[str, tuple[Test, str]] = {
    "diverged_above": (lambda value: value is None or _number(value), "a number or null"),
    "kind": (lambda value: value in ("files", "sqlite"), "files or sqlite"),
    "launcher": (_text, "a text"),
    "cancelled": (_truth, "true or false"),
}
_POINT: dict[str, tuple[Test, str]] = {
    **dict.fromkeys(("trial", "step", "attempts", "exit_code", "budget", "version"), (_whole, "a whole number")),
    **dict.fromkeys(("status", "reason", "folder", "owner"), (_text, "a text")),
    **dict.fromkeys(("wall_s", "cost_s", "begun"), (_finite, "a number")),
    "number": (lambda value: _whole(value) and value >= 1, "a whole number of at least 1"),  # type: ignore[operator]
    "overrides": (_texts, "a list of texts"),
    "metrics": (_metrics, "a mapping of names to numbers"),
    "rungs": (_rungs, "a mapping of steps to numbers"),
}


def check_spec(spec: Mapping[str, Any], where: object) -> None:
    """Raise BadInputError for the first entry of a ``sweep.json`` that is missing or of another type."""
    _check(spec, {**SPEC_ENTRIES, **_OPTIONAL}, SPEC_ENTRIES, where)
    if len(spec["metrics"]) != len(spec["minimize"]):
        raise _not_ours(where, "minimize", "a list as long as metrics")


def as_point(record: object, where: object) -> Point:
    """Point from a store's record, later versions' entries ignored; BadInputError if it is none."""
    if not isinstance(record, dict):
        raise BadInputError(f"{where}: a record of it is not a point of a sweep; restore the store from a copy")
    _check(record, _POINT, ("number", "overrides"), where)
    known = {field_.name for field_ in fields(Point)}
    values = {key: value for key, value in record.items() if key in known}
    rungs = {int(step): value for step, value in values.get("rungs", {}).items()}
    return Point(**{**values, "overrides": tuple(values["overrides"]), "rungs": rungs})


def _check(record: Mapping[str, Any], kinds: Mapping[str, tuple[Test, str]], needed: Any, where: object) -> None:
    for name, (fits, kind) in kinds.items():
        if name in record:
            if not fits(record[name]):
                raise _not_ours(where, name, kind)
        elif name in needed:
            raise _not_ours(where, name, kind)


def _not_ours(where: object, name: str, kind: str) -> BadInputError:
    return BadInputError(
        f"{where}: is not what a sweep writes: {json.dumps(name)} has to be {kind}; restore it from a copy; the runs "
        "themselves lie in run.root"
    )


WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
STOPPED, INTERRUPTED, CANCELLED = "stopped", "interrupted", "cancelled"
PAUSED, PRUNED = "paused", "pruned"
"""Paused at a rung where it may still be promoted; pruned at the sweep's end."""
FAILED, DIVERGED, OUT_OF_MEMORY = "failed", "diverged", "out_of_memory"
SILENT_S = 120.0
"""A process on another host is dead if its lease is older; clocks differ by less."""
RESUMABLE = (WAITING, STOPPED, INTERRUPTED)
"""Statuses that ``sweeps resume`` runs; a running point without its process counts as interrupted."""
ENDED_BADLY = (FAILED, DIVERGED, OUT_OF_MEMORY)
"""Statuses that ``sweeps retry`` runs again, next to cancelled."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        number: from 1.
        overrides: those that differ between points, with its seed if there are several.
        trial: number of the first point of the same setting; points of one trial differ in their seeds alone.
        status: one of this module's constants.
        reason: why it failed.
        folder: run folder; empty until it exists.
        metrics: latest values by name.
        step: optimizer steps taken.
        wall_s: seconds of all its launches.
        cost_s: ``wall_s`` times the number of training processes.
        attempts: number of launches, first and resumed.
        owner: :func:`worker_id` of the process that runs it.
        exit_code: exit code of its last launch.
        rungs: its metric at each rung reached, by step, in a sweep that prunes.
        budget: step at which the next launch ends; 0: the whole run.
        version: number of changes, for stores of files.
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
        """Latest value of a metric; NaN if not measured."""
        value = self.metrics.get(name)
        return float(value) if isinstance(value, int | float) else math.nan

    @property
    def settings(self) -> dict[str, str]:
        """Values of the overrides by key, as typed."""
        pairs = (override.lstrip("+").partition("=") for override in self.overrides)
        return {key: value for key, _, value in pairs}


def with_liveness(point: Point, one_host: bool) -> Point:
    """``point``, interrupted if it was running and its process is gone; on one host, or perhaps another."""
    if point.status != RUNNING or _may_be_alive(point, one_host):
        return point
    return replace(point, status=INTERRUPTED)


def worker_id() -> str:
    """Identity of this process as a point's owner: boot and PID namespace, pid, start."""
    return _owner(os.getpid())


def local_pid(owner: str) -> int | None:
    """PID of an owner in this boot and PID namespace; None for any other."""
    place, _, rest = owner.partition(":")
    pid = rest.partition(":")[0]
    if place != _place() or not (pid.isascii() and pid.isdigit()) or _owner(int(pid)) != owner:
        return None
    return int(pid)


def _owner(pid: int) -> str:
    return f"{_place()}:{process_identity(pid).partition(':')[2]}"


def _place() -> str:
    """Boot and PID namespace: another container on this host numbers its processes separately."""
    return f"{boot_id()}/{Path('/proc/self/ns/pid').stat().st_ino}"


def _may_be_alive(point: Point, one_host: bool) -> bool:
    """Whether the process that runs a point may be alive.

    With one host, a process of an earlier boot is dead. A process in another container holds the lock of its run's
    folder from shortly after its start. A process on another host renews the lease in the lock every few seconds.
    """
    place = point.owner.partition(":")[0]
    if place == _place():
        return local_pid(point.owner) is not None
    if place.partition("/")[0] == boot_id():
        is_locked = bool(point.folder) and is_held(RunPaths(Path(point.folder)).lock)
        return is_locked or time.time() - point.begun < SILENT_S
    if one_host:
        return False
    try:
        renewed = RunPaths(Path(point.folder)).lock.stat().st_mtime if point.folder else point.begun
    except OSError:
        renewed = point.begun
    return time.time() - max(renewed, point.begun) < SILENT_S


def as_record(point: Point) -> dict[str, Any]:
    """Record of a point, for a store."""
    return asdict(point)


STALE_S = 60.0
"""A change takes milliseconds: one that is older was interrupted."""
POLL_S = 0.01


class FilePoints:
    """Store of points as JSON files in ``folder``; the file ``N.VERSION.taken`` locks a change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> list[dict[str, Any]]:
        numbers = sorted(int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdigit())
        return [self._read(number) for number in numbers]

    def add(self, records: Sequence[dict[str, Any]]) -> bool:
        self._folder.mkdir(exist_ok=True)
        taken = self._folder / "adding.taken"
        while not _create(taken):
            _await_change(taken, lambda: False)
        try:
            if any(self._path(record["number"]).exists() for record in records):
                return False
            for record in records:
                replace_file(self._path(record["number"]), json.dumps(record), flush=True)
        finally:
            taken.unlink(missing_ok=True)
        return True

    def change(self, number: int, expected: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
        while True:
            record = self._read(number)
            if any(record.get(key) != value for key, value in expected.items()):
                return False
            version = record["version"] + 1
            taken = self._folder / f"{number}.{version}.taken"
            if not _create(taken):
                _await_change(taken, lambda: self._read(number)["version"] >= version)  # noqa: B023
                continue
            if self._read(number)["version"] >= version:  # another process wrote that version since our read
                taken.unlink(missing_ok=True)
                continue
            try:
                replace_file(self._path(number), json.dumps({**record, **changes, "version": version}), flush=True)
            except BaseException:  # a full disk: the next writer need not wait
                taken.unlink(missing_ok=True)
                raise
            (self._folder / f"{number}.{version - 1}.taken").unlink(missing_ok=True)
            return True

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.json"

    def _read(self, number: int) -> dict[str, Any]:
        path = self._path(number)
        try:
            record = parse_json(read_bytes(path, MAX_JSON_BYTES), path)
        except (OSError, ValueError, NotPlainError) as error:
            raise BadInputError(
                f"{path}: cannot be read ({error}); check its permissions, or restore it from a copy"
            ) from error
        if not isinstance(record, dict) or not isinstance(record.get("version"), int):
            raise BadInputError(f"{path}: not a sweep's record of a point; remove it, and sweeps extend adds the point")
        return record


def _await_change(taken: Path, written: Callable[[], bool]) -> None:
    """Return when the change is written or its lock file is gone; remove a stale lock file.

    Polls are counted, because a clock runs while a server hangs. A new file of that name belongs to another process.
    """
    first = _file_identity(taken)
    for _ in range(round(STALE_S / POLL_S)):
        if first is None or written() or _file_identity(taken) != first:
            return
        time.sleep(POLL_S)
    if _file_identity(taken) == first:
        taken.unlink(missing_ok=True)


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Inode and modification time, which identify a file of this name; None without a file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _create(path: Path) -> bool:
    """Create a file; True in exactly one of several processes."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    return True
