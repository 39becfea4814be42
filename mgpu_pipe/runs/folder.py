"""Which folder a run gets, and what is written there before the workers start.

A launch takes a folder's lock, writes who it is (``environment.json``, ``overrides.txt``, and last ``config.yaml``, by
which a folder is a run's), and only then prepares data and starts workers. So whatever a kill leaves, from the first
moment on, is an empty folder or a run that can be told from others.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.checkpoint import files, layout
from mgpu_pipe.config.freeze import freeze, load_untrusted, remember
from mgpu_pipe.config.mathematics import mathematics_hash
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError, RunFolderError
from mgpu_pipe.runs.auto_resume import HASH_DIGITS, attempts, find_own, named_after
from mgpu_pipe.runs.continue_line import line_for
from mgpu_pipe.runs.environment import write_environment
from mgpu_pipe.runs.newest import STARTS_FROM, begun, is_run_folder, recorded, runs_in
from mgpu_pipe.runs.summary import read_summary

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared

STAMP = "%Y-%m-%d_%H-%M-%S"
CLOCK_STEP_S = 0.001
"""By how much a run is dated after an earlier one whose clock was ahead."""
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


def choose_folder(config: RunConfig, restart_of: str = "", swept: Sequence[str] = ()) -> RunFolder:
    """Choose, and make if need be, the folder that ``run.*`` and ``checkpoint.resume`` ask for.

    ``checkpoint.resume=auto`` without ``run.dir`` takes the newest run of this name with this configuration's
    mathematics, in all of its attempts; a point of a sweep, one that was launched with its own values.

    Args:
        restart_of: names the launch whose workers were started again by another program; its folder is continued.
        swept: the overrides by which this point of a sweep differs from the others.

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
    return RunFolder(RunPaths(_new_folder(runs, digits)), goes_on=False, created=True, note=note)


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
    """Whether the run in ``folder`` has finished and ``config`` does not ask for more steps than it took."""
    summary = read_summary(folder.paths)
    if not folder.goes_on or summary.get("status") != "finished":
        return False
    if config.trainer.max_steps is not None:
        reached = summary.get("max_steps", summary.get("step"))  # a callback may have ended it before its limit
        return isinstance(reached, int) and config.trainer.max_steps <= reached
    before = load_untrusted(folder.paths.config)[0].trainer
    return before.max_steps is None and (config.trainer.max_epochs or 0) <= (before.max_epochs or 0)


def begin(
    folder: RunFolder, config: RunConfig, overrides: Sequence[str], command: Sequence[str], launch: str = ""
) -> RunFolder:
    """Make the folder this run's, before anything else is done: when it was begun, with what, and its configuration.

    A continued run keeps what it has until this launch has passed all checks (:func:`record_launch`).

    Args:
        launch: names the launch whose workers another program may start again.
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
        _record_environment(paths, config, stamp)
        _write_overrides(paths, overrides)
        freeze(config, paths.config)
        for written in (paths.overrides, paths.config):
            files.sync_file(written)
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


def _new_folder(runs: Path, digits: str) -> Path:
    """``<date>_<time>-<hash of the mathematics>``, with a number after it where another run has taken that name."""
    _make(runs, exist_ok=True)
    name = f"{time.strftime(STAMP)}-{digits}"
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


def _write_overrides(paths: RunPaths, overrides: Sequence[str]) -> None:
    paths.overrides.write_text("".join(f"{override}\n" for override in overrides), encoding="utf-8")


def _record_environment(paths: RunPaths, config: RunConfig, environment: Mapping[str, object]) -> None:
    created = begun(paths.root) or _later_than_others(paths, float(str(environment["started"])), config)
    write_environment(paths.environment, {**environment, "created": created})


def _later_than_others(paths: RunPaths, now: float, config: RunConfig) -> float:
    """``now``, but later than every other run of this name, also where the clock was set back since."""
    if config.run.dir is not None:
        return now
    others = [begun(folder) for folder in paths.root.parent.iterdir() if folder != paths.root]
    return max(now, *(created + CLOCK_STEP_S for created in others), 0.0)
