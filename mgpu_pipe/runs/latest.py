"""Finds runs and the latest run, for every verb and for ``checkpoint.resume=auto``.

The latest run is the one that was started last, by the time in its ``environment.json``. Copying, evaluating or
resuming a run does not change it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from mgpu_pipe.checkpoint import layout
from mgpu_pipe.config.freeze import load_untrusted
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.run_identity import Difference, Identity, differences, identity_of, mathematics_hash
from mgpu_pipe.config.schema import CheckpointConfig, RunConfig, RunOptions
from mgpu_pipe.errors import BadInputError, ConfigError, RunFolderError, print_line
from mgpu_pipe.system.local_files import (
    MAX_CONFIG_BYTES,
    MAX_JSON_BYTES,
    NotPlainError,
    expand_home,
    is_file,
    is_folder,
    parse_json,
    read_bytes,
)

ROOT_KEY = "run.root"
DEPTH = 4
"""Levels below ``run.root`` that are searched: run.name is one level, and run.dir may be deeper."""
STARTS_FROM = "starts_from"
"""Entry of ``environment.json``: the run or step folder of ``checkpoint.resume`` at the run's start."""
RUN = "run"
"""Entry of ``environment.json``: the run's name, strategy, tags and steps, for listings."""
DOCTOR = "doctor.json"
NO_RUNS = ("manifest.json", "configured.yaml", "settings.json", DOCTOR)
"""Files of a step, a verification, a batch job or a measurement of ``doctor``, which have a configuration, too."""


def is_run_folder(folder: Path) -> bool:
    """Whether this is a run's folder, not that of a step, a verification, a batch job or a measurement."""
    return is_file(RunPaths(folder).config) and not any(is_file(folder / name) for name in NO_RUNS)


def find_runs(root: Path) -> list[Path]:
    """Run folders at most :data:`DEPTH` levels below ``root``, or ``root`` itself; the latest first."""
    return _newest_first(run_folders(root))


def run_folders(root: Path) -> list[Path]:
    """Run folders like :func:`find_runs`, unordered and without reading them."""
    runs: list[Path] = []
    level = [root]
    for _ in range(DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            if is_run_folder(folder):
                runs.append(folder)
            else:
                below += _folders_in(folder)
        level = below
    return runs


def runs_in(folder: Path) -> list[Path]:
    """Run folders directly below ``folder``; the latest first."""
    return _newest_first([child for child in _folders_in(folder) if is_run_folder(child)])


def newest_run(root: Path, *, saved: bool = False) -> Path:
    """The latest run below ``root``.

    Args:
        saved: consider only runs with a checkpoint.

    Raises:
        RunFolderError: there is no such run.
    """
    for folder in find_runs(expand_home(root)):
        if not saved or layout.committed_steps(RunPaths(folder).checkpoints):
            return folder
    what = "no run with a checkpoint" if saved else "no run"
    raise RunFolderError(f"{root}: holds {what}; train one, give a run's folder, or set {ROOT_KEY}=<folder>")


def named_or_newest(folder: Path | None, root: Path | None, *, saved: bool = False) -> Path:
    """The user's folder, or the latest run below ``run.root``, printed to stderr; BadInputError if none or both."""
    if folder is not None:
        if root is not None:
            raise BadInputError(f"{ROOT_KEY}={root}: is where the newest run is looked for; leave out one of them")
        return folder
    newest = newest_run(root or Path(RunOptions.root), saved=saved)
    print_line(f"newest run{' with a checkpoint' if saved else ''}: {newest}", file=sys.stderr, flush=True)
    return newest


def split_root(words: Sequence[str]) -> tuple[list[str], Path | None]:
    """Split the last ``run.root=<folder>`` from a verb's words; ConfigError for an empty one."""
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


def start_time(folder: Path) -> float:
    """Time of the run's first launch, in seconds since the epoch; 0 if unknown."""
    created = read_record(folder).get("created")
    return float(created) if isinstance(created, int | float) else 0.0


def read_record(folder: Path) -> dict[str, object]:
    """Content of a run's ``environment.json``; empty if it is missing or unreadable."""
    try:
        path = RunPaths(folder).environment
        content = parse_json(read_bytes(path, MAX_JSON_BYTES), path)
    except (OSError, ValueError, NotPlainError):
        return {}
    return content if isinstance(content, dict) else {}


def _newest_first(runs: list[Path]) -> list[Path]:
    return sorted(runs, key=lambda folder: (start_time(folder), folder.name), reverse=True)


def _folders_in(folder: Path) -> list[Path]:
    try:
        return [child for child in folder.iterdir() if is_folder(child) and not child.name.startswith(".")]
    except OSError:  # a file, missing, or not readable
        return []


HASH_DIGITS = 8
FOLDER_NAME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-([0-9a-f]{8})(-\d+)?")
ATTEMPT_CONFIG = re.compile(r"config-attempt-(\d+)\.yaml")
LISTED = 4
"""Limit of differences in a note."""


def find_own(config: RunConfig, runs: Path, digits: str, swept: Sequence[str]) -> tuple[Path | None, str]:
    """The latest run in ``runs`` whose attempts all had this configuration's mathematics.

    Args:
        digits: first digits of its mathematics hash; a run whose name shows others is not read.
        swept: overrides of a sweep's point, all of which the run must have.

    Returns:
        The folder and an empty text; or None and the differences of the latest run (empty without a run).
    """
    others = runs_in(runs)
    for run in others:
        if named_after(run) in ("", digits) and _has_values(run, swept) and not _differences(config, run):
            return run, ""
    return None, _why_new(_differences(config, others[0]), others[0], swept) if others else ""


def named_after(folder: Path) -> str:
    """Digits of the mathematics hash in a run folder's name; empty for another name."""
    match = FOLDER_NAME.fullmatch(folder.name)
    return "" if match is None else match[1]


def attempts(root: Path) -> list[tuple[int, Path]]:
    """Number and configuration file of every attempt in a run's folder, ascending."""
    return sorted((int(match[1]), path) for path in root.iterdir() if (match := ATTEMPT_CONFIG.fullmatch(path.name)))


def _differences(config: RunConfig, run: Path) -> list[Difference]:
    """Differences in the mathematics between ``config`` and any attempt of ``run``; an unreadable one differs."""
    for path in (RunPaths(run).config, *(path for _, path in attempts(run))):
        try:
            changes = differences(config, load_untrusted(path)[0])
        except BadInputError:
            return [("config.yaml", "readable", "not readable")]
        if changes:
            return changes
    return []


def _has_values(run: Path, swept: Iterable[str]) -> bool:
    """Whether ``run`` was launched with all of these overrides."""
    try:
        text = read_bytes(RunPaths(run).overrides, MAX_CONFIG_BYTES).decode("utf-8")
        typed = {line.strip().lstrip("+") for line in text.splitlines()}
    except (OSError, UnicodeDecodeError, NotPlainError):
        typed = set()
    return {override.lstrip("+") for override in swept} <= typed


def _why_new(changes: Sequence[Difference], newest: Path, swept: Sequence[str]) -> str:
    """Note that a new run starts, and the ``changes`` from ``newest``, the latest of its name."""
    reasons = [f"{key}={_setting(then)} there, {_setting(now)} here" for key, now, then in changes[:LISTED]]
    if not changes:
        reasons = [f"it was not launched with {' '.join(swept)}"]
    more = f"; and {len(changes) - LISTED} more" if len(changes) > LISTED else ""
    # only settings such as the optimizer's may change within a run
    may_resume = changes and all(identity_of(key) is Identity.NOTICE for key, _, _ in changes)
    fix = f"; run.dir={newest} continues it anyway" if may_resume else ""
    return (
        f"checkpoint.resume=auto starts a new run: the newest of this name, {newest}, is another "
        f"({'; '.join(reasons)}{more}){fix}"
    )


def _setting(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def resumable_folders(run: RunOptions, checkpoint: CheckpointConfig) -> list[Path]:
    """Runs, or the step, that ``config`` may resume; the latest first."""
    resume = checkpoint.resume
    if resume not in ("none", "auto"):
        return [expand_home(resume)]
    if run.dir is not None:
        return [expand_home(run.dir)] if resume == "auto" else []
    return runs_in(expand_home(run.root) / run.name) if resume == "auto" else []


def resumed_config(config: RunConfig, swept: Sequence[str]) -> RunConfig | None:
    """Configuration of the run that ``config`` (a point's overrides: ``swept``) resumes; None for a new one."""
    folders = resumable_folders(config.run, config.checkpoint)
    if config.run.dir is None and config.checkpoint.resume == "auto":
        runs = expand_home(config.run.root) / config.run.name
        latest, _ = find_own(config, runs, mathematics_hash(config, HASH_DIGITS), swept)
        folders = [] if latest is None else [latest]
    for folder in folders:
        try:
            return load_untrusted(RunPaths(folder).config)[0]
        except BadInputError:
            continue
    return None
