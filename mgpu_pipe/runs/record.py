"""Records of a launch in its run's folder: start, configuration, command, environment and samples."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.checkpoint import file_operations as files
from mgpu_pipe.config.freeze import freeze, remember
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig, RunOptions
from mgpu_pipe.errors import RunFolderError
from mgpu_pipe.runs import history
from mgpu_pipe.runs.environment import write_environment
from mgpu_pipe.runs.latest import RUN, STARTS_FROM, attempts, read_record, start_time
from mgpu_pipe.runs.run_folder import RunFolder, writing_to
from mgpu_pipe.system.local_files import MAX_JSON_BYTES, expand_home, fix_of_writing, read_bytes, replace_file

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared


def append_samples(path: Path, step: int, samples: Sequence[Mapping[str, str]]) -> None:
    """Append the samples of a step; RunFolderError if the disk is full or gone."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "samples": list(samples)}) + "\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def read_samples(path: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """Steps and their samples in order; empty without a file."""
    try:
        lines = read_bytes(path, MAX_JSON_BYTES).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    return [entry for entry in map(_parse, lines) if entry is not None]


def cut_samples_after(path: Path, step: int) -> None:
    """Drop the samples of steps after ``step``; RunFolderError if the file cannot be written."""
    if not path.exists():
        return
    remaining = [
        {"step": stored_step, "samples": samples} for stored_step, samples in read_samples(path) if stored_step <= step
    ]
    try:
        replace_file(path, "".join(json.dumps(entry) + "\n" for entry in remaining))
    except OSError as error:
        raise _unwritable(path, error) from error


def _parse(line: str) -> tuple[int, list[dict[str, Any]]] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("step"), int)
        or not isinstance(entry.get("samples"), list)
    ):
        return None
    return entry["step"], [sample for sample in entry["samples"] if isinstance(sample, dict)]


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    fix = fix_of_writing(str(error), "free space or make the folder writable")
    return RunFolderError(f"{path}: cannot write samples ({error.strerror}); {fix}")


CLOCK_STEP_S = 0.001
"""Seconds between the date of a run and that of an earlier run whose clock was ahead."""


def begin(
    folder: RunFolder,
    config: RunConfig,
    overrides: Sequence[str],
    command: Sequence[str],
    launch: str = "",
    *,
    dated: float = 0.0,
    flush: bool = True,
) -> RunFolder:
    """Write the first files of a new run: its start, command and configuration.

    A resumed run keeps its files until this launch has passed all checks (:func:`record_launch`).

    Args:
        launch: ID of the launch, whose workers another program may restart.
        dated: start time of the run; 0: now, but later than every other run of its name.
        flush: whether everything is on disk on return.
    """
    if folder.is_resumed:
        return folder
    paths = folder.paths
    began = not paths.config.exists()
    with writing_to(paths.root):
        for _, attempt_config in attempts(paths.root):  # from a launch that never trained
            attempt_config.unlink()
        history.begin_anew(paths)
        now = time.time()
        stamp: dict[str, object] = {"started": now, "command": list(command), "folder": os.getcwd(), "launch": launch}
        if config.checkpoint.resume not in ("none", "auto"):
            stamp[STARTS_FROM] = str(expand_home(config.checkpoint.resume).absolute())
        _record_environment(
            paths, config.run, config.strategy.name, config.trainer.max_steps, stamp, dated, flush=flush
        )
        _write_overrides(paths, overrides)
        freeze(config, paths.config, flush=flush)
        if flush:
            files.sync_file(paths.overrides)
            files.sync_folder(paths.root)
    return replace(folder, began=began)


def record_launch(
    paths: RunPaths, config: RunConfig, overrides: Sequence[str], environment: Mapping[str, object], prepared: Prepared
) -> None:
    """Write configuration, command and environment of this launch, for its workers; keeps the run's start time.

    Removes the summary of an earlier launch, because the run has not ended.
    """
    freeze(config, paths.config)
    remember(paths.config)
    _write_overrides(paths, overrides)
    unchanged = {key: value for key, value in read_record(paths.root).items() if key == STARTS_FROM}
    stamp = {**environment, **unchanged}
    _record_environment(paths, config.run, config.strategy.name, config.trainer.max_steps, stamp)
    paths.data.write_text(json.dumps(prepared.as_dict(), indent=2) + "\n", encoding="utf-8")
    paths.tokenizer.mkdir(exist_ok=True)
    if prepared.tokenizer_folder is not None:
        for file in prepared.tokenizer_folder.iterdir():  # copytree would hide the disk's error
            shutil.copyfile(file, paths.tokenizer / file.name)
    paths.logs.mkdir(exist_ok=True)
    paths.summary.unlink(missing_ok=True)
    # Flush: checkpoints are useless if a power failure loses these files.
    for path in (paths.config, paths.overrides, paths.environment, paths.data, *paths.tokenizer.iterdir()):
        files.sync_file(path)
    for folder in (paths.tokenizer, paths.root):
        files.sync_folder(folder)


def next_attempt(paths: RunPaths) -> int:
    """Number of the next attempt, counted over all launches of a run from 1."""
    return max((number for number, _ in attempts(paths.root)), default=0) + 1


def keep_attempt_config(paths: RunPaths, attempt: int) -> None:
    shutil.copyfile(paths.config, paths.root / f"config-attempt-{attempt}.yaml")


def _write_overrides(paths: RunPaths, overrides: Sequence[str]) -> None:
    paths.overrides.write_text("".join(f"{override}\n" for override in overrides), encoding="utf-8")


def _record_environment(
    paths: RunPaths,
    run: RunOptions,
    strategy: str,
    max_steps: int | None,
    environment: Mapping[str, object],
    dated: float = 0.0,
    *,
    flush: bool = True,
) -> None:
    created = dated or start_time(paths.root) or later_than_others(paths, float(str(environment["started"])), run)
    values = {"name": run.name, "strategy": strategy, "tags": run.tags, "max_steps": max_steps}
    write_environment(paths.environment, {**environment, "created": created, RUN: values}, flush=flush)


def later_than_others(paths: RunPaths, now: float, run: RunOptions) -> float:
    """``now``, or later if another run of this name has a later start because the clock was set back."""
    if run.dir is not None:
        return now
    others = [start_time(folder) for folder in paths.root.parent.iterdir() if folder != paths.root]
    return max(now, *(created + CLOCK_STEP_S for created in others), 0.0)
