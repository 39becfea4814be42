"""What runs there are, each with what ``mgpu-pipe runs`` shows: read from a few small files of its folder. No torch.

A run's name, strategy and tags lie in its ``environment.json``, for its configuration takes a hundred times as long to
read; only a run of an earlier version, which has no such entry, is asked for that.
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

from mgpu_pipe.config.dotted import leaves
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.plain_files import MAX_CONFIG_BYTES, NotPlainError, parse_yaml, read_bytes, read_end
from mgpu_pipe.errors import RunFolderError
from mgpu_pipe.runs.lock import RunLock, is_held
from mgpu_pipe.runs.newest import RUN, is_run_folder, recorded, run_folders
from mgpu_pipe.runs.summary import read_summary

LOSS, RATE, STEP_S = "train/loss", "throughput/tokens_per_s", "throughput/step_s"
TAIL_BYTES = 8192
"""Of a metrics file, in which its last row lies."""
GOING = ".deleting"
"""What a folder's name ends with once nothing of it is to be seen any more."""


@dataclass(frozen=True)
class Listed:
    """A run, as far as it can be read; a figure that is not known is NaN.

    Attributes:
        state: ``running``, or as its summary says (``finished``, ``stopped``, ``failed``), or ``unfinished``: it was
            killed, or never took a step.
        step: optimizer steps that it took.
        loss: training loss of the last step.
        tokens_per_s: of the whole run, where its summary tells, else of its last logged step.
        begun: when it was first launched, in seconds since the epoch; 0 where that is not known.
        nbytes: bytes of all its files; 0 where they were not counted.
        max_steps: steps that it was asked for; 0 where its length is given in epochs.
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
    """Every run below ``root``, the one begun last first."""
    return sorted(map(listed, run_folders(root)), key=lambda run: (run.begun, run.folder.name), reverse=True)


def listed(folder: Path, *, sized: bool = True) -> Listed:
    """One run; ``sized``: the bytes of its files counted, which takes most of the time."""
    paths = RunPaths(folder)
    environment, summary = recorded(folder), _summary(paths)
    own = environment.get(RUN)
    said: Mapping[str, Any] = own if isinstance(own, Mapping) else _of_config(paths)
    metrics = summary.get("metrics")
    figures: Mapping[str, Any] = metrics if isinstance(metrics, Mapping) else {}
    if not {LOSS, RATE, STEP_S} <= figures.keys() or not isinstance(summary.get("step"), int):
        figures = {**_last_row(paths.metrics), **figures}
    step = summary.get("step", figures.get("step"))
    created, tags, steps = environment.get("created"), said.get("tags"), said.get("max_steps")
    return Listed(
        folder,
        str(said.get("name") or folder.parent.name),
        str(summary.get("status") or ("running" if is_held(paths.lock) else "unfinished")),
        int(step) if isinstance(step, int | float) and math.isfinite(step) else 0,
        _number(figures.get(LOSS)),
        _number(figures.get(RATE)) or math.nan,  # nobody counts the tokens of pictures
        str(summary.get("strategy") or said.get("strategy") or ""),
        float(created) if isinstance(created, int | float) else 0.0,
        _size(folder) if sized else 0,
        tuple(map(str, tags)) if isinstance(tags, list) else (),
        steps if isinstance(steps, int) else 0,
        _number(figures.get(STEP_S)),
    )


def delete_run(folder: Path) -> None:
    """Delete a run: at once it is a run no more, then its files go.

    Raises:
        RunFolderError: it is no run's folder, a launch holds it, or it cannot be deleted.
    """
    if folder.is_symlink():
        raise RunFolderError(f"{folder}: is a symbolic link; delete the folder that it leads to")
    if not is_run_folder(folder):
        raise RunFolderError(f"{folder}: not a run's folder (it has no config.yaml); nothing was deleted")
    whole = folder.absolute()
    going = whole.with_name(f".{whole.name}{GOING}")
    try:
        with RunLock(RunPaths(whole).lock, wait_s=0):
            whole.rename(going)
        shutil.rmtree(going)
    except OSError as error:
        raise RunFolderError(f"{error.filename or folder}: cannot be deleted ({error.strerror})") from error


def _summary(paths: RunPaths) -> dict[str, object]:
    try:
        return read_summary(paths)
    except (OSError, NotPlainError):
        return {}


def told(folder: Path) -> dict[str, Any]:
    """Every key of a run's configuration, by its dotted path, and the metrics of its summary that have a section."""
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


def _of_config(paths: RunPaths) -> dict[str, Any]:
    sections = map(_config(paths).get, ("run", "strategy", "trainer"))
    run, strategy, trainer = (section if isinstance(section, dict) else {} for section in sections)
    return {**run, "strategy": strategy.get("name"), "max_steps": trainer.get("max_steps")}


def _last_row(path: Path) -> dict[str, float]:
    """The last whole row of a metrics file; an empty dict where the file has no row."""
    try:
        tail = read_end(path, TAIL_BYTES)
        with open(path, "rb") as file:
            header = file.readline()
    except (OSError, NotPlainError):
        return {}
    lines = tail[: tail.rfind(b"\n") + 1].decode("utf-8", "replace").splitlines()
    names, cells = next(csv.reader([header.decode("utf-8", "replace")])), next(csv.reader(lines[-1:]), [])
    values = zip(names, cells, strict=False) if len(names) == len(cells) and cells != names else ()
    return {name: _parsed(cell) for name, cell in values if cell}


def _parsed(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _size(folder: Path) -> int:
    """Bytes of all files below; what links lead to is not counted."""
    total, folders = 0, [str(folder)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:  # it may not be read, or went meanwhile
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_size
    return total
