"""Entry points of installed packages: their names, read without imports, and their objects."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.moved import accept_old_modules
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

DATA_GROUP = "mgpu_pipe.data"
DATA_KEYS_GROUP = "mgpu_pipe.data_keys"
OBJECTIVE_GROUP = "mgpu_pipe.objectives"
OBJECTIVE_KEYS_GROUP = "mgpu_pipe.objective_keys"
STRATEGY_GROUP = "mgpu_pipe.strategies"
STRATEGY_KEYS_GROUP = "mgpu_pipe.strategy_keys"
LAUNCH_GROUP = "mgpu_pipe.launchers"
LAUNCH_KEYS_GROUP = "mgpu_pipe.launch_keys"

OBJECTIVE_FILES: Mapping[str, tuple[str, str]] = import_module("mgpu_pipe.objectives").FILES
"""Description and class of this project's objectives by name, each as file and attribute."""
OBJECTIVES = tuple(sorted(OBJECTIVE_FILES))
"""Names of this project's objectives."""
ENGINES = ("mesh", "deepspeed")
LAUNCHERS = ("local", "slurm", "torchrun")
MAX_MESSAGE = 300
"""Limit of characters of another package's error message."""


def registered(group: str) -> tuple[str, ...]:
    """Sorted names of an entry point group. Scans the installed distributions, about 10 ms."""
    return tuple(sorted({point.name for point in entry_points(group)}))


def load(key: str, name: str, group: str) -> Any:
    """Import and return the object of the entry point ``name`` of ``group``.

    Raises:
        ConfigError: no such entry point, or its import fails.
    """
    points = {point.name: point for point in entry_points(group)}
    if name not in points:
        raise ConfigError(key, name, f"use one of {', '.join(points)}", "no such name")
    accept_old_modules()
    try:
        return points[name].load()
    except Exception as error:  # another package's module may raise anything
        reason = f"the entry point {points[name].value} cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(key, name, "correct that package", " ".join(reason.split())[:MAX_MESSAGE]) from error


def entry_points(group: str) -> EntryPoints:
    from importlib import metadata  # importing it costs as much as a scan, and most commands need none

    return metadata.entry_points(group=group)


@contextmanager
def installed_modules_alone() -> Iterator[None]:
    """Import without the working directory, which may be another user's: only a `_target_` may import from it."""
    try:
        here = {"", os.getcwd()}
    except FileNotFoundError:
        here = {""}
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if entry not in here]
    try:
        yield
    finally:
        sys.path[:] = before
