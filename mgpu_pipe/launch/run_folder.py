"""Which folder a run gets, and what is written there before the workers start."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.checkpoint import files
from mgpu_pipe.config.freeze import config_hash, freeze, load
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError, RunFolderError
from mgpu_pipe.launch.environment import write_environment
from mgpu_pipe.launch.summary import read_summary

if TYPE_CHECKING:
    from mgpu_pipe.data.prepare import PreparedData

STAMP = "%Y-%m-%d_%H-%M-%S"
CLOCK_STEP_S = 0.001
"""What a run is said to be begun after another whose clock was ahead."""
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
ATTEMPT_CONFIG = re.compile(r"config-attempt-(\d+)\.yaml")


@dataclass(frozen=True)
class RunFolder:
    """The folder of this launch.

    Attributes:
        goes_on: whether an earlier run in it is continued (``checkpoint.resume=auto``).
        created: whether this launch made the folder.
    """

    paths: RunPaths
    goes_on: bool
    created: bool

    def discard(self) -> None:
        """Take back what this launch wrote, when it was refused before it began: the folder stays usable.

        Once it has trained, its folder holds what cannot be made again, and nothing of it goes.
        """
        if self.goes_on or self.paths.checkpoints.exists() or self.paths.metrics.exists():
            return
        for entry in self.paths.root.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if self.created:
            self.paths.root.rmdir()


def choose_folder(config: RunConfig, restart_of: str = "") -> RunFolder:
    """Choose, and make if need be, the folder that ``run.*`` and ``checkpoint.resume`` ask for.

    Args:
        restart_of: names the launch whose workers were started again by another program; its folder is gone on in.

    Raises:
        RunFolderError: it cannot be written, or ``run.dir`` holds something and is not to be continued.
        ConfigError: ``run.name`` cannot name a folder.
    """
    if "/" in config.run.name or config.run.name in ("", ".", ".."):
        raise ConfigError("run.name", config.run.name, "use a plain folder name, without slashes")
    auto = config.checkpoint.resume == "auto" or bool(restart_of)
    if config.run.dir is not None:
        return _given_folder(Path(config.run.dir).expanduser(), auto)
    runs = Path(config.run.root).expanduser() / config.run.name
    newest = newest_run(runs, restart_of) if auto else None
    if newest is not None:
        return RunFolder(RunPaths(newest.absolute()), goes_on=True, created=False)
    return RunFolder(RunPaths(_new_folder(runs, config_hash(config)[:8])), goes_on=False, created=True)


def check_unused(folder: RunFolder) -> None:
    """Refuse a fresh folder in which, since it was chosen, another launch left a run. Called under its lock."""
    if not folder.goes_on:
        refuse_contents(folder.paths.root, "its contents came meanwhile")


def refuse_contents(root: Path, why: str) -> None:
    """Raise unless ``root`` holds nothing but, perhaps, a lock file."""
    entries = sorted(entry.name for entry in root.iterdir() if entry.name != RunPaths(root).lock.name)
    if entries:
        raise RunFolderError(
            f"run.dir={root}: the folder is not empty ({', '.join(entries[:3])}{', ...' if len(entries) > 3 else ''}; "
            f"{why}); choose another one, empty it, or go on in it with checkpoint.resume=auto"
        )


def newest_run(runs: Path, launch: str = "") -> Path | None:
    """The folder in ``runs`` whose run was begun last, of those that ``launch`` began if it is given; or None."""
    if not runs.is_dir():
        return None
    found = [
        folder
        for folder in runs.iterdir()
        if RunPaths(folder).config.is_file() and launch in ("", _recorded(RunPaths(folder)).get("launch"))
    ]
    return max(found, key=lambda folder: (_created(RunPaths(folder)), folder.name), default=None)


def completed(folder: RunFolder, config: RunConfig) -> bool:
    """Whether the run in ``folder`` has finished and ``config`` does not ask for more steps than it took."""
    summary = read_summary(folder.paths)
    if not folder.goes_on or summary.get("status") != "finished":
        return False
    if config.trainer.max_steps is not None:
        reached = summary.get("max_steps", summary.get("step"))  # a callback may have ended it before its limit
        return isinstance(reached, int) and config.trainer.max_steps <= reached
    before = load(folder.paths.config).trainer
    return before.max_steps is None and (config.trainer.max_epochs or 0) <= (before.max_epochs or 0)


def record_launch(
    paths: RunPaths,
    config: RunConfig,
    overrides: Sequence[str],
    environment: dict[str, object],
    prepared: PreparedData,
) -> None:
    """Write what this launch runs, with, and on; the workers read it. The run's first moment is kept.

    A summary of an earlier launch goes: from now on it is not how the run ended.
    """
    freeze(config, paths.config)
    paths.overrides.write_text("".join(f"{override}\n" for override in overrides), encoding="utf-8")
    created = _created(paths) or _begun(paths, float(str(environment["started"])), config)
    write_environment(paths.environment, {**environment, "created": created})
    paths.data.write_text(json.dumps(prepared.as_dict(), indent=2) + "\n", encoding="utf-8")
    paths.tokenizer.mkdir(exist_ok=True)
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
    numbers = [int(match[1]) for entry in paths.root.iterdir() if (match := ATTEMPT_CONFIG.fullmatch(entry.name))]
    return max(numbers, default=0) + 1


def keep_attempt_config(paths: RunPaths, attempt: int) -> None:
    shutil.copyfile(paths.config, paths.root / f"config-attempt-{attempt}.yaml")


def _given_folder(root: Path, auto: bool) -> RunFolder:
    root = root.absolute()
    paths, existed = RunPaths(root), root.exists()
    if existed and not root.is_dir():
        raise RunFolderError(f"run.dir={root}: this is a file; give a folder")
    _make(root, exist_ok=True)
    if auto and paths.config.is_file():
        return RunFolder(paths, goes_on=True, created=False)
    refuse_contents(root, "it holds no run" if auto else "checkpoint.resume=none starts afresh")
    return RunFolder(paths, goes_on=False, created=not existed)


def _new_folder(runs: Path, hash8: str) -> Path:
    """``<date>_<time>-<hash8>``, with a number after it where another run has taken that name."""
    _make(runs, exist_ok=True)
    name = f"{time.strftime(STAMP)}-{hash8}"
    number = 1
    while True:
        folder = runs.absolute() / (name if number == 1 else f"{name}-{number}")
        try:
            _make(folder, exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return folder


def _make(folder: Path, *, exist_ok: bool) -> None:
    try:
        if not folder.exists():
            files.make_folders(folder)
        elif not (exist_ok and folder.is_dir()):
            raise FileExistsError(folder)
    except FileExistsError:
        if not exist_ok:
            raise
        if folder.is_dir():  # somebody made it meanwhile
            return
        raise RunFolderError(f"{folder}: this is a file; set run.dir or run.root to a folder") from None
    except OSError as error:
        raise _not_writable(folder, error.strerror or str(error)) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _not_writable(folder, "permission denied")


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn "cannot write here" into one line about the run's folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise _not_writable(folder, error.strerror or str(error)) from error


def _not_writable(folder: Path, why: str) -> RunFolderError:
    return RunFolderError(
        f"{folder}: the run's folder cannot be written ({why}); set run.dir or run.root to a folder that can be "
        "written and has room"
    )


def _created(paths: RunPaths) -> float:
    """When the run was first launched, in seconds since the epoch; 0 where it is not known."""
    created = _recorded(paths).get("created")
    return float(created) if isinstance(created, int | float) else 0.0


def _begun(paths: RunPaths, now: float, config: RunConfig) -> float:
    """``now``, but later than every other run of this name, also where the clock was set back since."""
    if config.run.dir is not None:
        return now
    others = [_created(RunPaths(folder)) for folder in paths.root.parent.iterdir() if folder != paths.root]
    return max(now, *(created + CLOCK_STEP_S for created in others), 0.0)


def _recorded(paths: RunPaths) -> dict[str, object]:
    """``environment.json``; empty where there is none that can be read."""
    try:
        recorded = json.loads(paths.environment.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return recorded if isinstance(recorded, dict) else {}
