"""What a launch writes into its run's folder: when it began, its configuration, command and surroundings."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.checkpoint import files
from mgpu_pipe.config.freeze import freeze, remember
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.runs.auto_resume import attempts
from mgpu_pipe.runs.environment import write_environment
from mgpu_pipe.runs.folder import RunFolder, writing_to
from mgpu_pipe.runs.newest import RUN, STARTS_FROM, begun, recorded

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared

CLOCK_STEP_S = 0.001
"""By how much a run is dated after an earlier one whose clock was ahead."""


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
    """Make the folder this run's, before anything else is done: when it was begun, with what, and its configuration.

    A continued run keeps what it has until this launch has passed all checks (:func:`record_launch`).

    Args:
        launch: names the launch whose workers another program may start again.
        dated: when the run was begun, for one of many; 0: now, but later than every other run of its name.
        flush: whether all is on the disk on return.
    """
    if folder.goes_on:
        return folder
    paths = folder.paths
    began = not paths.config.exists()
    with writing_to(paths.root):
        for _, kept in attempts(paths.root):  # of a launch that never trained
            kept.unlink()
        now = time.time()
        stamp: dict[str, object] = {"started": now, "command": list(command), "folder": os.getcwd(), "launch": launch}
        if config.checkpoint.resume not in ("none", "auto"):
            stamp[STARTS_FROM] = str(Path(config.checkpoint.resume).expanduser().absolute())
        _record_environment(paths, config, stamp, dated, flush=flush)
        _write_overrides(paths, overrides)
        freeze(config, paths.config, flush=flush)
        if flush:
            files.sync_file(paths.overrides)
            files.sync_folder(paths.root)
    return replace(folder, began=began)


def record_launch(
    paths: RunPaths, config: RunConfig, overrides: Sequence[str], environment: Mapping[str, object], prepared: Prepared
) -> None:
    """Write what this launch runs, by which command and where; the workers read it. The run's first moment is kept.

    A summary of an earlier launch is removed: the run has not ended.
    """
    freeze(config, paths.config)
    remember(paths.config)
    _write_overrides(paths, overrides)
    kept = {key: value for key, value in recorded(paths.root).items() if key == STARTS_FROM}
    _record_environment(paths, config, {**environment, **kept})
    paths.data.write_text(json.dumps(prepared.as_dict(), indent=2) + "\n", encoding="utf-8")
    paths.tokenizer.mkdir(exist_ok=True)
    if prepared.tokenizer_folder is not None:
        for file in prepared.tokenizer_folder.iterdir():  # copytree would hide which error of the disk it was
            shutil.copyfile(file, paths.tokenizer / file.name)
    paths.logs.mkdir(exist_ok=True)
    paths.summary.unlink(missing_ok=True)
    # Checkpoints are worth nothing after a power failure that lost what they belong to.
    for path in (paths.config, paths.overrides, paths.environment, paths.data, *paths.tokenizer.iterdir()):
        files.sync_file(path)
    for folder in (paths.tokenizer, paths.root):
        files.sync_folder(folder)


def next_attempt(paths: RunPaths) -> int:
    """Attempts are counted over all launches of a run, from 1."""
    return max((number for number, _ in attempts(paths.root)), default=0) + 1


def keep_attempt_config(paths: RunPaths, attempt: int) -> None:
    shutil.copyfile(paths.config, paths.root / f"config-attempt-{attempt}.yaml")


def _write_overrides(paths: RunPaths, overrides: Sequence[str]) -> None:
    paths.overrides.write_text("".join(f"{override}\n" for override in overrides), encoding="utf-8")


def _record_environment(
    paths: RunPaths, config: RunConfig, environment: Mapping[str, object], dated: float = 0.0, *, flush: bool = True
) -> None:
    created = dated or begun(paths.root) or later_than_others(paths, float(str(environment["started"])), config)
    told = {"strategy": config.strategy.name, "tags": config.run.tags, "max_steps": config.trainer.max_steps}
    run = {"name": config.run.name, **told}
    write_environment(paths.environment, {**environment, "created": created, RUN: run}, flush=flush)


def later_than_others(paths: RunPaths, now: float, config: RunConfig) -> float:
    """``now``, but later than every other run of this name, also where the clock was set back since."""
    if config.run.dir is not None:
        return now
    others = [begun(folder) for folder in paths.root.parent.iterdir() if folder != paths.root]
    return max(now, *(created + CLOCK_STEP_S for created in others), 0.0)
