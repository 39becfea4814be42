"""Lists runs for ``mgpu-pipe runs``, from a few small files of each folder.

A run's name, strategy and tags are in its ``environment.json``, because its configuration takes 100 times as long to
read. Only runs of earlier versions, without this entry, need the configuration.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mgpu_pipe.config.convert import leaves
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import RunFolderError
from mgpu_pipe.runs.history import read_summary
from mgpu_pipe.runs.latest import RUN, attempts, is_run_folder, read_record, run_folders
from mgpu_pipe.runs.lock import RunLock, is_held
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, NotPlainError, parse_yaml, read_bytes, read_end
from mgpu_pipe.topology import AXES


def strategies_of_attempts(paths: RunPaths) -> list[str]:
    """Strategies of a run's attempts, e.g. ``megatron tp=2``, in order, each once; skips unreadable ones."""
    configs = [path for _, path in attempts(paths.root)] or [paths.config]
    contents = dict.fromkeys(filter(None, map(_content, configs)))
    return list(dict.fromkeys(filter(None, map(_strategy, contents))))


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_CONFIG_BYTES)
    except (OSError, NotPlainError):
        return b""


def _strategy(content: bytes) -> str:
    try:
        config: Any = parse_yaml(content)
    except (yaml.YAMLError, UnicodeDecodeError):
        return ""
    chosen = config.get("strategy") if isinstance(config, Mapping) else None
    if not isinstance(chosen, Mapping):
        return ""
    sizes = [f"{axis}={size}" for axis in (*AXES, "ep") if isinstance(size := chosen.get(axis), int) and size > 1]
    return " ".join([str(chosen.get("name") or ""), *sizes]).strip()


LOSS, RATE, STEP_S = "train/loss", "throughput/tokens_per_s", "throughput/step_s"
TAIL_BYTES = 8192
"""Bytes at the end of a metrics file that hold its last row."""
GOING = ".deleting"
"""Suffix of a folder that is being deleted."""


@dataclass(frozen=True)
class Listed:
    """A run in a listing; unknown figures are NaN.

    Attributes:
        state: ``running``, or its summary's status (``finished``, ``stopped``, ``failed``), or ``unfinished`` if it was
            killed or never took a step.
        step: optimizer steps taken.
        loss: training loss of the last step.
        tokens_per_s: speed of the whole run from its summary, else of its last logged step.
        begun: time of its first launch, in seconds since the epoch; 0 if unknown.
        nbytes: bytes of all its files; 0 if not counted.
        max_steps: ``trainer.max_steps``; 0 if the length is in epochs.
        step_s: seconds of the last logged step.
    """

    folder: Path
    name: str
    state: str
    step: int
    loss: float
    tokens_per_s: float
    strategy: str
    begun: float
    nbytes: int
    tags: tuple[str, ...]
    max_steps: int
    step_s: float


def list_runs(root: Path) -> list[Listed]:
    """Every run below ``root``, the latest first."""
    return sorted(map(list_run, run_folders(root)), key=lambda run: (run.begun, run.folder.name), reverse=True)


def list_run(folder: Path, *, sized: bool = True) -> Listed:
    """Read a run for a listing; ``sized`` counts its bytes, which takes most of the time."""
    paths = RunPaths(folder)
    environment, summary = read_record(folder), _summary(paths)
    entry = environment.get(RUN)
    settings: Mapping[str, Any] = entry if isinstance(entry, Mapping) else _run_settings(paths)
    metrics = summary.get("metrics")
    figures: Mapping[str, Any] = metrics if isinstance(metrics, Mapping) else {}
    if not {LOSS, RATE, STEP_S} <= figures.keys() or not isinstance(summary.get("step"), int):
        figures = {**_last_row(paths.metrics), **figures}
    step = summary.get("step", figures.get("step"))
    created, tags, steps = environment.get("created"), settings.get("tags"), settings.get("max_steps")
    return Listed(
        folder,
        str(settings.get("name") or folder.parent.name),
        str(summary.get("status") or ("running" if is_held(paths.lock) else "unfinished")),
        int(step) if isinstance(step, int | float) and math.isfinite(step) else 0,
        _number(figures.get(LOSS)),
        _number(figures.get(RATE)) or math.nan,  # pictures have no tokens
        str(summary.get("strategy") or settings.get("strategy") or ""),
        float(created) if isinstance(created, int | float) else 0.0,
        _size(folder) if sized else 0,
        tuple(map(str, tags)) if isinstance(tags, list) else (),
        steps if isinstance(steps, int) else 0,
        _number(figures.get(STEP_S)),
    )


def delete_run(folder: Path) -> None:
    """Hide a run's folder by its new name, then delete it; RunFolderError for no run, one in use, one that stays."""
    if folder.is_symlink():
        raise RunFolderError(f"{folder}: is a symbolic link; delete the folder that it leads to")
    if not is_run_folder(folder):
        raise RunFolderError(f"{folder}: not a run's folder (it has no config.yaml); nothing was deleted")
    whole = folder.absolute()
    hidden = whole.with_name(f".{whole.name}{GOING}")
    try:
        with RunLock(RunPaths(whole).lock, wait_s=0):
            whole.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        raise RunFolderError(f"{error.filename or folder}: cannot be deleted ({error.strerror})") from error


def _summary(paths: RunPaths) -> dict[str, object]:
    try:
        return read_summary(paths)
    except (OSError, NotPlainError):
        return {}


def config_and_metrics(folder: Path) -> dict[str, Any]:
    """Configuration of a run by dotted key, and the metrics of its summary with a section in their name."""
    paths = RunPaths(folder)
    metrics = _summary(paths).get("metrics")
    measured = metrics.items() if isinstance(metrics, Mapping) else ()
    return {**leaves(_config(paths)), **{str(key): value for key, value in measured if "/" in str(key)}}


def _config(paths: RunPaths) -> dict[str, Any]:
    try:
        config = parse_yaml(read_bytes(paths.config, MAX_CONFIG_BYTES))
    except (OSError, NotPlainError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _run_settings(paths: RunPaths) -> dict[str, Any]:
    sections = map(_config(paths).get, ("run", "strategy", "trainer"))
    run, strategy, trainer = (section if isinstance(section, dict) else {} for section in sections)
    return {**run, "strategy": strategy.get("name"), "max_steps": trainer.get("max_steps")}


def _last_row(path: Path) -> dict[str, float]:
    """Last whole row of a metrics file; empty without rows."""
    try:
        tail = read_end(path, TAIL_BYTES)
        with open(path, "rb") as file:
            header = file.readline()
    except (OSError, NotPlainError):
        return {}
    lines = tail[: tail.rfind(b"\n") + 1].decode("utf-8", "replace").splitlines()
    names, cells = next(csv.reader([header.decode("utf-8", "replace")])), next(csv.reader(lines[-1:]), [])
    values = zip(names, cells, strict=False) if len(names) == len(cells) and cells != names else ()
    return {name: _parse(cell) for name, cell in values if cell}


def _parse(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _size(folder: Path) -> int:
    """Bytes of all files below ``folder``, without following links."""
    total, folders = 0, [str(folder)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:  # it may be unreadable or deleted meanwhile
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_size
    return total
