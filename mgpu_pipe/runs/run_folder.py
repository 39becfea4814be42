"""Chooses the folder of a run.

A launch locks the folder, writes its identity (:mod:`.record`: ``environment.json``, ``overrides.txt`` and finally
``config.yaml``, which marks a run's folder), and only then prepares data and starts workers. A kill at any moment
leaves an empty folder or an identifiable run.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.checkpoint import file_operations as files
from mgpu_pipe.checkpoint import layout
from mgpu_pipe.config.freeze import load_untrusted
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.run_identity import mathematics_hash
from mgpu_pipe.config.schema import CheckpointConfig, RunConfig, TrainerConfig, seconds_of
from mgpu_pipe.errors import ConfigError, RunFolderError
from mgpu_pipe.runs.history import read_summary
from mgpu_pipe.runs.latest import HASH_DIGITS, find_own, is_run_folder, named_after, read_record, runs_in
from mgpu_pipe.runs.resume_command import line_for
from mgpu_pipe.system.local_files import exists, expand_home, fix_of_writing, is_file, is_folder

if TYPE_CHECKING:
    pass

STAMP = "%Y-%m-%d_%H-%M-%S"
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class RunFolder:
    """The folder of this launch.

    Attributes:
        is_resumed: whether this launch resumes a run in it; decided by :func:`decide_resume`.
        created: whether this launch created the folder.
        began: whether this launch wrote the run's first files.
        note: reason why ``checkpoint.resume=auto`` starts a new run next to others of its name; empty otherwise.
    """

    paths: RunPaths
    is_resumed: bool
    created: bool
    began: bool = False
    note: str = ""

    def discard(self) -> None:
        """Remove this launch's files if it was refused before training; then the folder stays usable."""
        if not self.began or exists(self.paths.checkpoints) or exists(self.paths.metrics):
            return
        for entry in self.paths.root.iterdir():
            if is_folder(entry):
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if self.created:
            self.paths.root.rmdir()


def choose_folder(
    config: RunConfig, restart_of: str = "", swept: Sequence[str] = (), *, flush: bool = True
) -> RunFolder:
    """Choose the folder by ``run.*`` and ``checkpoint.resume``, and create it if needed.

    ``checkpoint.resume=auto`` without ``run.dir`` takes the latest run of this name all of whose attempts had this
    configuration's mathematics; for a point of a sweep, one that was launched with the point's values.

    Args:
        restart_of: ID of the launch whose workers another program restarted; its folder is resumed.
        swept: overrides that differ between the points of a sweep.
        flush: whether a new folder is on disk on return.

    Raises:
        RunFolderError: the folder cannot be written.
        ConfigError: ``run.name`` cannot name a folder.
    """
    if "/" in config.run.name or config.run.name in ("", ".", ".."):
        raise ConfigError("run.name", config.run.name, "use a plain folder name, without slashes")
    if config.run.dir is not None:
        return _configured_folder(expand_home(config.run.dir))
    runs, digits = expand_home(config.run.root) / config.run.name, mathematics_hash(config, HASH_DIGITS)
    existing, note = None, ""
    if restart_of:
        existing = next((run for run in runs_in(runs) if read_record(run).get("launch") == restart_of), None)
    elif config.checkpoint.resume == "auto":
        existing, note = find_own(config, runs, digits, swept)
        empty = _empty_run_folder(runs, digits) if existing is None else None
        if empty is not None:
            return RunFolder(RunPaths(empty.absolute()), is_resumed=False, created=True, note=note)
    if existing is not None:
        return RunFolder(RunPaths(existing.absolute()), is_resumed=True, created=False)
    return RunFolder(RunPaths(_new_folder(runs, digits, flush=flush)), is_resumed=False, created=True, note=note)


def decide_resume(
    folder: RunFolder, checkpoint: CheckpointConfig, alone: Sequence[str] = (), restart: bool = False
) -> RunFolder:
    """Decide, under its lock, whether the chosen folder's run is resumed or a new one starts; or refuse the folder.

    Removes unfinished files of killed processes: a living writer would hold the lock.

    Args:
        alone: words that start this run alone, for the resume command.

    Raises:
        RunFolderError: the folder has files that are not a run's, or a trained run that may not be resumed.
    """
    auto = checkpoint.resume == "auto" or restart
    refuse_contents(folder.paths, auto, alone)
    _remove_unfinished(folder.paths)
    return replace(folder, is_resumed=auto and is_file(folder.paths.config))


def _remove_unfinished(paths: RunPaths) -> None:
    with writing_to(paths.root):
        for folder in (paths.root, paths.logs, paths.checkpoints):
            for entry in folder.glob("*.partial"):
                if is_file(entry):  # retention removes step folders
                    entry.unlink()


def refuse_contents(paths: RunPaths, auto: bool, alone: Sequence[str] = ()) -> None:
    """Raise unless a run can be resumed (``auto``) or started in this folder.

    A run may start in an empty folder, and in one whose earlier launch never trained a step.

    Raises:
        RunFolderError: naming the content, and the resume command.
    """
    root = paths.root
    if is_run_folder(root):
        if auto or not has_trained(paths):
            return
        raise RunFolderError(
            f"run.dir={root}: a run has trained in this folder; choose another one, or continue it with: "
            f"{line_for(alone, root)}"
        )
    entries = sorted(entry.name for entry in root.iterdir())
    if not _is_without_run(paths, entries):
        raise RunFolderError(
            f"run.dir={root}: the folder is not empty and holds no run ({', '.join(entries[:3])}"
            f"{', ...' if len(entries) > 3 else ''}); choose another one, or empty it"
        )


def has_trained(paths: RunPaths) -> bool:
    """Whether the folder has a row of metrics or a checkpoint."""
    try:
        with open(paths.metrics, "rb") as file:
            rows = bool(file.readline() and file.readline())
    except OSError:
        rows = False
    return rows or bool(layout.folders(paths.checkpoints))


def is_completed(folder: RunFolder, trainer: TrainerConfig) -> bool:
    """Whether the run in ``folder`` has finished and ``config`` allows no more steps or time."""
    summary = read_summary(folder.paths)
    if not folder.is_resumed or summary.get("status") != "finished":
        return False
    if "max_time" in summary:  # the time limit ended the run
        allowed, taken = trainer.max_seconds(), seconds_of(str(summary["max_time"]))
        return allowed is not None and taken is not None and allowed <= taken
    if trainer.max_steps is not None:
        reached = summary.get("max_steps", summary.get("step"))  # a callback may have ended the run early
        return isinstance(reached, int) and trainer.max_steps <= reached
    before = load_untrusted(folder.paths.config)[0].trainer
    return before.max_steps is None and (trainer.max_epochs or 0) <= (before.max_epochs or 0)


def limit_reached(paths: RunPaths) -> str:
    """The key of ``trainer`` that ended a completed run."""
    return "max_time" if "max_time" in read_summary(paths) else "max_steps"


def _empty_run_folder(runs: Path, digits: str) -> Path | None:
    """Folder that a killed launch with this mathematics left without a run; None without one."""
    for folder in sorted(runs.iterdir(), reverse=True) if is_folder(runs) else []:
        named = named_after(folder)
        if named == digits and is_folder(folder) and _is_without_run(RunPaths(folder)):
            return folder
    return None


def _is_without_run(paths: RunPaths, entries: Sequence[str] | None = None) -> bool:
    """Whether the folder has only files that a launch writes before its configuration."""
    names = [entry.name for entry in paths.root.iterdir()] if entries is None else entries
    first = {path.name for path in (paths.lock, paths.environment, paths.overrides)}
    others = [name for name in names if name not in first and not name.endswith(".partial")]
    return not names or (paths.lock.name in names and not others)


def _configured_folder(root: Path) -> RunFolder:
    root = root.absolute()
    paths, existed = RunPaths(root), exists(root)
    if existed and not is_folder(root):
        raise RunFolderError(f"run.dir={root}: this is a file; give a folder")
    _make(root, exist_ok=True)
    if not exists(paths.lock):  # check before leaving a lock in a foreign folder
        refuse_contents(paths, auto=True)
    return RunFolder(paths, is_resumed=is_file(paths.config), created=not existed)


def _new_folder(runs: Path, digits: str, *, flush: bool) -> Path:
    """Create ``<date>_<time>-<hash of the mathematics>``, with a number appended if the name is taken."""
    _make(runs, exist_ok=True)
    name = f"{time.strftime(STAMP)}-{digits}"
    number = 1
    while True:
        folder = runs.absolute() / (name if number == 1 else f"{name}-{number}")
        try:
            _make(folder, exist_ok=False, flush=flush)
        except FileExistsError:
            number += 1
        else:
            return folder


def _make(folder: Path, *, exist_ok: bool, flush: bool = True) -> None:
    try:
        if not exists(folder):
            (files.make_folders if flush else Path.mkdir)(folder)
        elif not (exist_ok and is_folder(folder)):
            raise FileExistsError(folder)
    except FileExistsError:
        if not exist_ok:
            raise
        if is_folder(folder):  # another process created it meanwhile
            return
        link = next((path for path in (folder, *folder.parents) if path.is_symlink() and not exists(path)), None)
        reason = "this is a file" if link is None else f"{link} is a link to nothing"
        raise RunFolderError(f"{folder}: {reason}; set run.dir or run.root to a folder") from None
    except OSError as error:
        raise _not_writable(folder, error.strerror or str(error)) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _not_writable(folder, "permission denied")


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turns an OSError of writing into a RunFolderError about the run's folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise _not_writable(folder, error.strerror or str(error)) from error


def _not_writable(folder: Path, why: str) -> RunFolderError:
    fix = fix_of_writing(why, "set run.dir or run.root to a folder that can be written and has room")
    return RunFolderError(f"{folder}: the run's folder cannot be written ({why}); {fix}")
