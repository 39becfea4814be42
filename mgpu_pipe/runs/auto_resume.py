"""Which run ``checkpoint.resume=auto`` continues where no folder is named: the newest of the same mathematics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from mgpu_pipe.config.freeze import load_untrusted
from mgpu_pipe.config.mathematics import Difference, Kind, differences, kind_of
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.plain_files import MAX_CONFIG_BYTES, NotPlainError, read_bytes
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.runs.newest import runs_in

HASH_DIGITS = 8
OWN_NAME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-([0-9a-f]{8})(-\d+)?")
ATTEMPT_CONFIG = re.compile(r"config-attempt-(\d+)\.yaml")
LISTED = 4
"""Differences that a note names."""


def find_own(config: RunConfig, runs: Path, digits: str, swept: Sequence[str] = ()) -> tuple[Path | None, str]:
    """The newest run in ``runs`` whose every attempt had this configuration's mathematics.

    Args:
        digits: the first ones of its mathematics hash, with which a folder's name ends.
        swept: overrides of a sweep's point; the run must have been launched with all of them.

    Returns:
        The folder; or None, and what the newest run differs in (empty where there is no run).
    """
    others = runs_in(runs)
    for run in others:
        if _same_run(config, digits, run, swept):
            return run, ""
    return None, _why_new(config, others[0], swept) if others else ""


def named_after(folder: Path) -> str:
    """The digits of a mathematics hash that a run's folder was named with; empty where it has another name."""
    match = OWN_NAME.fullmatch(folder.name)
    return "" if match is None else match[1]


def attempts(root: Path) -> list[tuple[int, Path]]:
    """Number and configuration of every attempt that a run's folder keeps, ascending."""
    return sorted((int(match[1]), path) for path in root.iterdir() if (match := ATTEMPT_CONFIG.fullmatch(path.name)))


def _same_run(config: RunConfig, digits: str, run: Path, swept: Sequence[str]) -> bool:
    named = named_after(run)
    if named not in ("", digits):  # spares reading it; its own name says what it was begun with
        return False
    return _has_values(run, swept) and not _differences(config, run)


def _differences(config: RunConfig, run: Path) -> list[Difference]:
    """What of the mathematics differs between ``config`` and any attempt of ``run``; an unreadable one does."""
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
        given = {line.strip().lstrip("+") for line in text.splitlines()}
    except (OSError, UnicodeDecodeError, NotPlainError):
        given = set()
    return {override.lstrip("+") for override in swept} <= given


def _why_new(config: RunConfig, newest: Path, swept: Sequence[str]) -> str:
    changes = _differences(config, newest)
    told = [f"{key}={_shown(then)} there, {_shown(now)} here" for key, now, then in changes[:LISTED]]
    if not changes:
        told = [f"it was not launched with {' '.join(swept)}"]
    more = f"; and {len(changes) - LISTED} more" if len(changes) > LISTED else ""
    # only settings of the optimizer and its like may change in a run
    goes_on = changes and all(kind_of(key) is Kind.TOLD for key, _, _ in changes)
    fix = f"; run.dir={newest} continues it anyway" if goes_on else ""
    return (
        f"checkpoint.resume=auto starts a new run: the newest of this name, {newest}, is another "
        f"({'; '.join(told)}{more}){fix}"
    )


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
