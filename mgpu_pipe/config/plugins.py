"""Other packages: their entry points, those that only some runs need, and the old names that they import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

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


def entry_names(group: str) -> tuple[str, ...]:
    """Sorted names of an entry point group. Scans the installed distributions, about 10 ms."""
    return tuple(sorted({point.name for point in entry_points(group)}))


def load(key: str, name: str, group: str) -> Any:
    """Import and return the object of the entry point ``name`` of ``group``; ConfigError if that fails."""
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


def import_package(module: str, package: str, extra: str, key: str, value: str, otherwise: str = "") -> Any:
    """Imports ``module``.

    Args:
        package: its name in the error.
        extra: the optional dependencies of this program that install it.
        key, value: the configuration that needs it.
        otherwise: other ways out, appended to the fix.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except (ImportError, OSError) as error:  # OSError: without the library that it brings
        fix = f"install it: pip install 'mgpu_pipe[{extra}]'{otherwise}"
        raise ConfigError(key, value, fix, f"{package} is not installed") from error


OLD_CLASSES = {
    "mgpu_pipe.optim.adamw_bf16.AdamWBf16": "mgpu_pipe.training.adamw_bf16.AdamWBf16",
    "mgpu_pipe.optim.muon.Muon": "mgpu_pipe.parallel.muon.Muon",
}
"""First dotted name of each moved ``_target_`` class by its present name; hashes use the first."""
NEW_CLASSES = {old: new for new, old in OLD_CLASSES.items()}
MODULES = {
    "mgpu_pipe.config.strategy": "mgpu_pipe.config.group_keys",
    "mgpu_pipe.data.batch_spec": "mgpu_pipe.data.step_batch",
    "mgpu_pipe.objectives.text_config": "mgpu_pipe.objectives.text_keys",
    "mgpu_pipe.strategies": "mgpu_pipe.training",
    "mgpu_pipe.strategies.base": "mgpu_pipe.training.strategy",
    "mgpu_pipe.strategies.deepspeed": "mgpu_pipe.training.deepspeed.deepspeed_strategy",
    "mgpu_pipe.strategies.mesh": "mgpu_pipe.training.mesh",
}
"""Present names of the modules that plug-ins import, by old name."""


def accept_old_modules() -> None:
    """Let plug-ins import modules by old names; each attribute is looked up in the present module on use."""
    for old, new in MODULES.items():
        module = ModuleType(old, f"The old name of {new}.")
        module.__dict__.update(__path__=[], __getattr__=partial(_present, new))
        sys.modules.setdefault(old, module)


def _present(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(module), name)


def with_present_classes(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """``mapping`` with the present name of a moved optimizer class."""
    optimizer = mapping.get("optimizer")
    target = optimizer.get("_target_") if isinstance(optimizer, Mapping) else None
    if not isinstance(optimizer, Mapping) or not isinstance(target, str) or target not in NEW_CLASSES:
        return mapping
    return {**mapping, "optimizer": {**optimizer, "_target_": NEW_CLASSES[target]}}


def with_first_classes(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` with the first name of a moved optimizer class, which keeps hashes stable."""
    optimizer = values.get("optimizer", {})
    target = optimizer.get("_target_")
    return {**values, "optimizer": {**optimizer, "_target_": OLD_CLASSES.get(target, target)}} if optimizer else values
