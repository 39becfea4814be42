"""Which runs there are, and which is the newest: one meaning for every verb and for ``checkpoint.resume=auto``.

The newest run is the one that was begun last, by the moment that its own ``environment.json`` keeps: neither copying
a run, nor evaluating it, nor continuing it changes that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.checkpoint import layout
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.plain_files import MAX_JSON_BYTES, NotPlainError, parse_json, read_bytes
from mgpu_pipe.config.schema import RunOptions
from mgpu_pipe.errors import BadInputError, ConfigError, RunFolderError

ROOT_KEY = "run.root"
DEPTH = 4
"""Folders below ``run.root`` that are looked into: run.dir may be there, and run.name is one level."""
STARTS_FROM = "starts_from"
"""Entry of ``environment.json``: the run or step folder that ``checkpoint.resume`` named when the run was begun."""
RUN = "run"
"""Entry of ``environment.json``: the run's name, strategy, tags and steps, for those who look at many runs."""
DOCTOR = "doctor.json"
NO_RUNS = ("manifest.json", "configured.yaml", DOCTOR)
"""What lies in a checkpoint's step, in a verification and where ``doctor`` measured: they have a configuration too."""


def is_run_folder(folder: Path) -> bool:
    """Whether this is a run's folder; a checkpoint's step, a verification and a measurement are none."""
    return RunPaths(folder).config.is_file() and not any((folder / name).is_file() for name in NO_RUNS)


def find_runs(root: Path, depth: int = DEPTH) -> list[Path]:
    """Run folders at most ``depth`` folders below ``root``, or ``root`` itself; the one begun last first."""
    return _newest_first(run_folders(root, depth))


def run_folders(root: Path, depth: int = DEPTH) -> list[Path]:
    """:func:`find_runs`, in no order: it reads nothing of them."""
    runs: list[Path] = []
    level = [root]
    for _ in range(depth + 1):
        below: list[Path] = []
        for folder in level:
            if is_run_folder(folder):
                runs.append(folder)
            else:
                below += _folders_in(folder)
        level = below
    return runs


def runs_in(folder: Path) -> list[Path]:
    """The run folders right below ``folder``, the one begun last first."""
    return _newest_first([child for child in _folders_in(folder) if is_run_folder(child)])


def newest_run(root: Path, *, saved: bool = False) -> Path:
    """The run below ``root`` that was begun last.

    Args:
        saved: only of those with a checkpoint.

    Raises:
        RunFolderError: there is none.
    """
    for folder in find_runs(root.expanduser()):
        if not saved or layout.committed(RunPaths(folder).checkpoints):
            return folder
    what = "no run with a checkpoint" if saved else "no run"
    raise RunFolderError(f"{root}: holds {what}; train one, give a run's folder, or say where by {ROOT_KEY}=<folder>")


def named_or_newest(folder: Path | None, root: Path | None, *, saved: bool = False) -> Path:
    """The folder that the user named, or else the newest run below ``run.root``, which stderr names.

    Raises:
        BadInputError: there is no run, or both were given.
    """
    if folder is not None:
        if root is not None:
            raise BadInputError(f"{ROOT_KEY}={root}: is where the newest run is looked for; leave out one of them")
        return folder
    newest = newest_run(root or Path(RunOptions.root), saved=saved)
    print(f"newest run{' with a checkpoint' if saved else ''}: {newest}", file=sys.stderr, flush=True)
    return newest


def split_root(words: Sequence[str]) -> tuple[list[str], Path | None]:
    """Take ``run.root=<folder>``, written as for training, out of a verb's words; the last one counts.

    Raises:
        ConfigError: its value is empty.
    """
    root: Path | None = None
    others: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key.lstrip("+") != ROOT_KEY:
            others.append(word)
            continue
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        if not value.strip():
            raise ConfigError(ROOT_KEY, value, "give a folder, or leave it out")
        root = Path(value)
    return others, root


def begun(folder: Path) -> float:
    """When the run was first launched, in seconds since the epoch; 0 where it is not known."""
    created = recorded(folder).get("created")
    return float(created) if isinstance(created, int | float) else 0.0


def recorded(folder: Path) -> dict[str, object]:
    """``environment.json`` of a run; empty where there is none that can be read."""
    try:
        path = RunPaths(folder).environment
        content = parse_json(read_bytes(path, MAX_JSON_BYTES), path)
    except (OSError, ValueError, NotPlainError):
        return {}
    return content if isinstance(content, dict) else {}


def _newest_first(runs: list[Path]) -> list[Path]:
    return sorted(runs, key=lambda folder: (begun(folder), folder.name), reverse=True)


def _folders_in(folder: Path) -> list[Path]:
    try:
        return [child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
    except OSError:  # a file, none, or one that may not be read
        return []
