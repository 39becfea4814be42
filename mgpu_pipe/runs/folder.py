"""Which folder a run gets.

A launch takes a folder's lock, writes who it is (:mod:`.record`: ``environment.json``, ``overrides.txt``, and last
``config.yaml``, by which a folder is a run's), and only then prepares data and starts workers. So whatever a kill
leaves, from the first moment on, is an empty folder or a run that can be told from others.
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

from mgpu_pipe.checkpoint import files, layout
from mgpu_pipe.config.freeze import load_untrusted
from mgpu_pipe.config.mathematics import mathematics_hash
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig, seconds_of
from mgpu_pipe.errors import ConfigError, RunFolderError
from mgpu_pipe.runs.auto_resume import HASH_DIGITS, find_own, named_after
from mgpu_pipe.runs.continue_line import line_for
from mgpu_pipe.runs.newest import is_run_folder, recorded, runs_in
from mgpu_pipe.runs.summary import read_summary

if TYPE_CHECKING:
    pass

STAMP = "%Y-%m-%d_%H-%M-%S"
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class RunFolder:
    """The folder of this launch.

    Attributes:
        goes_on: whether an earlier run in it is continued; settled by :func:`settle`.
        created: whether this launch made the folder.
        began: whether this launch wrote the run's first files.
        note: why ``checkpoint.resume=auto`` starts a new run beside others of its name; empty otherwise.
    """

    paths: RunPaths
    goes_on: bool
    created: bool
    began: bool = False
    note: str = ""

    def discard(self) -> None:
        """Remove what this launch wrote, when it was refused before it began: the folder stays usable.

        Once it has trained, its folder holds what cannot be made again, and nothing is removed.
        """
        if not self.began or self.paths.checkpoints.exists() or self.paths.metrics.exists():
            return
        for entry in self.paths.root.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if self.created:
            self.paths.root.rmdir()


def choose_folder(
    config: RunConfig, restart_of: str = "", swept: Sequence[str] = (), *, flush: bool = True
) -> RunFolder:
    """Choose, and make if need be, the folder that ``run.*`` and ``checkpoint.resume`` ask for.

    ``checkpoint.resume=auto`` without ``run.dir`` takes the newest run of this name with this configuration's
    mathematics, in all of its attempts; a point of a sweep, one that was launched with its own values.

    Args:
        restart_of: names the launch whose workers were started again by another program; its folder is continued.
        swept: the overrides by which this point of a sweep differs from the others.
        flush: whether a new folder is on the disk on return.

    Raises:
        RunFolderError: it cannot be written.
        ConfigError: ``run.name`` cannot name a folder.
    """
    if "/" in config.run.name or config.run.name in ("", ".", ".."):
        raise ConfigError("run.name", config.run.name, "use a plain folder name, without slashes")
    if config.run.dir is not None:
        return _given_folder(Path(config.run.dir).expanduser())
    runs, digits = Path(config.run.root).expanduser() / config.run.name, mathematics_hash(config, HASH_DIGITS)
    own, note = None, ""
    if restart_of:
        own = next((run for run in runs_in(runs) if recorded(run).get("launch") == restart_of), None)
    elif config.checkpoint.resume == "auto":
        own, note = find_own(config, runs, digits, swept)
        unborn = _unborn(runs, digits) if own is None else None
        if unborn is not None:
            return RunFolder(RunPaths(unborn.absolute()), goes_on=False, created=True, note=note)
    if own is not None:
        return RunFolder(RunPaths(own.absolute()), goes_on=True, created=False)
    return RunFolder(RunPaths(_new_folder(runs, digits, flush=flush)), goes_on=False, created=True, note=note)


def settle(folder: RunFolder, config: RunConfig, alone: Sequence[str] = (), restart: bool = False) -> RunFolder:
    """Look at the chosen folder, now that its lock is held: continue its run, begin one, or refuse it.

    Unfinished files of killed processes are removed: a living writer would hold the lock.

    Args:
        alone: the words that start this run alone, for the command that continues the run.

    Raises:
        RunFolderError: it holds what is not a run's, or a run that trained and is not to be continued.
    """
    auto = config.checkpoint.resume == "auto" or restart
    refuse_contents(folder.paths, auto, alone)
    _remove_unfinished(folder.paths)
    return replace(folder, goes_on=auto and folder.paths.config.is_file())


def _remove_unfinished(paths: RunPaths) -> None:
    with writing_to(paths.root):
        for folder in (paths.root, paths.logs, paths.checkpoints):
            for entry in folder.glob("*.partial"):
                if entry.is_file():  # a step's folder is retention's
                    entry.unlink()


def refuse_contents(paths: RunPaths, auto: bool, alone: Sequence[str] = ()) -> None:
    """Raise unless a run can continue (``auto``) or begin in this folder.

    A run may begin in an empty folder, and where an earlier launch never trained a step: nothing is lost.

    Raises:
        RunFolderError: naming what is there, and the command that continues it.
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
    if not _is_unborn(paths, entries):
        raise RunFolderError(
            f"run.dir={root}: the folder is not empty and holds no run ({', '.join(entries[:3])}"
            f"{', ...' if len(entries) > 3 else ''}); choose another one, or empty it"
        )


def has_trained(paths: RunPaths) -> bool:
    """Whether anything is there that cannot be made again: a row of metrics, or a checkpoint."""
    try:
        with open(paths.metrics, "rb") as file:
            rows = bool(file.readline() and file.readline())
    except OSError:
        rows = False
    return rows or bool(layout.folders(paths.checkpoints))


def completed(folder: RunFolder, config: RunConfig) -> bool:
    """Whether the run in ``folder`` has finished and ``config`` does not ask for more steps, or time, than it took."""
    summary = read_summary(folder.paths)
    if not folder.goes_on or summary.get("status") != "finished":
        return False
    if "max_time" in summary:  # it ended the run
        allowed, taken = config.trainer.max_seconds(), seconds_of(str(summary["max_time"]))
        return allowed is not None and taken is not None and allowed <= taken
    if config.trainer.max_steps is not None:
        reached = summary.get("max_steps", summary.get("step"))  # a callback may have ended it before its limit
        return isinstance(reached, int) and config.trainer.max_steps <= reached
    before = load_untrusted(folder.paths.config)[0].trainer
    return before.max_steps is None and (config.trainer.max_epochs or 0) <= (before.max_epochs or 0)


def limit_reached(paths: RunPaths) -> str:
    """The key of ``trainer`` that ended a completed run."""
    return "max_time" if "max_time" in read_summary(paths) else "max_steps"


def _unborn(runs: Path, digits: str) -> Path | None:
    """The folder that a launch with this mathematics made before it was killed, with nothing in it yet."""
    for folder in sorted(runs.iterdir(), reverse=True) if runs.is_dir() else []:
        named = named_after(folder)
        if named == digits and folder.is_dir() and _is_unborn(RunPaths(folder)):
            return folder
    return None


def _is_unborn(paths: RunPaths, entries: Sequence[str] | None = None) -> bool:
    """Whether nothing is there but what a launch writes before it freezes its configuration."""
    names = [entry.name for entry in paths.root.iterdir()] if entries is None else entries
    first = {path.name for path in (paths.lock, paths.environment, paths.overrides)}
    others = [name for name in names if name not in first and not name.endswith(".partial")]
    return not names or (paths.lock.name in names and not others)


def _given_folder(root: Path) -> RunFolder:
    root = root.absolute()
    paths, existed = RunPaths(root), root.exists()
    if existed and not root.is_dir():
        raise RunFolderError(f"run.dir={root}: this is a file; give a folder")
    _make(root, exist_ok=True)
    if not paths.lock.exists():  # nobody holds it: say so before a lock is left in somebody's folder
        refuse_contents(paths, auto=True)
    return RunFolder(paths, goes_on=paths.config.is_file(), created=not existed)


def _new_folder(runs: Path, digits: str, *, flush: bool) -> Path:
    """``<date>_<time>-<hash of the mathematics>``, with a number after it where another run has taken that name."""
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
        if not folder.exists():
            (files.make_folders if flush else Path.mkdir)(folder)
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
