"""Which checkpoint to take: the newest that is whole. Torch-free."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from mgpu_pipe.checkpoint import layout
from mgpu_pipe.checkpoint.integrity import Verify, check_folder, read_state
from mgpu_pipe.checkpoint.manifest import OtherFormatError
from mgpu_pipe.checkpoint.ruined import ruined_steps
from mgpu_pipe.checkpoint.step import Step
from mgpu_pipe.errors import CheckpointError

_log = logging.getLogger(__name__)


def inspect(folder: Path, verify: Verify, step: int | None = None) -> Step:
    """Check a step's folder, up to the first fault.

    Args:
        verify: ``full`` hashes every byte; ``size`` looks at the manifest and the files' sizes; ``off`` at the
            manifest alone.
        step: the step that the folder's name says, where it says one.
    """
    try:
        if folder.is_symlink():
            raise CheckpointError(layout.is_a_link(folder))
        manifest = check_folder(folder, verify)
        read_state(folder, manifest, verify)
        if step is not None and manifest.step != step:
            raise CheckpointError(f"{folder}: its manifest is of step {manifest.step}")
    except CheckpointError as error:
        other = isinstance(error, OtherFormatError)
        return Step(-1 if step is None else step, folder, (str(error),), other_format=other)
    return Step(manifest.step, folder)


def list_steps(root: Path, verify: Verify = "size") -> list[Step]:
    """Every committed step under a ``checkpoints`` folder, in ascending order; none if there is no such folder."""
    return [inspect(path, verify, step) for step, path in layout.committed(root).items()]


def newest_valid(
    root: Path,
    on_corruption: Literal["fallback", "stop"] = "fallback",
    verify: Verify = "full",
    before: int | None = None,
) -> Step | None:
    """The newest step that is whole; None if there is none.

    A damaged step is named in a warning (file and chunk) and the one before it is tried. A step that no finite step
    followed (``checkpoint.ruined``) is taken only where there is no other. Under several ranks, one asks and tells
    the others.

    Args:
        before: take a step below this one.

    Raises:
        CheckpointError: a damaged step, with ``on_corruption="stop"``; a step that another version wrote.
    """
    ruined, last_resort = ruined_steps(root), None
    for step, path in reversed(layout.committed(root).items()):
        if before is not None and step >= before:
            continue
        info = inspect(path, verify, step)
        if info.whole and step not in ruined:
            if last_resort is not None:
                _log.warning("checkpoint of step %d is left out: the step after it was not finite", last_resort.step)
            return info
        if info.whole:
            last_resort = last_resort or info
            continue
        if info.other_format:  # an older step would lose what the other version has trained
            raise CheckpointError(f"{info.faults[0]}; use the version of mgpu_pipe that wrote it, or another run.dir")
        if on_corruption == "stop":
            raise CheckpointError(f"{info.faults[0]}; set checkpoint.on_corruption=fallback to take the step before it")
        _log.warning("checkpoint of step %d is left out: %s", step, info.faults[0])
    return last_resort


def resolve_source(
    source: str | Path,
    on_corruption: Literal["fallback", "stop"] = "fallback",
    verify: Verify = "full",
    key: str = "checkpoint.resume",
) -> Path:
    """The step's folder that a user means by a run's folder, its ``checkpoints`` folder, or a step's folder.

    Args:
        key: the configuration key that ``source`` was given for, named in errors.

    Raises:
        CheckpointError: nothing there, no checkpoint in it, or the step that was named itself is damaged.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"{key}={source}: no such folder; give a run's folder or one of its checkpoints/step-*")
    name = layout.parse_folder_name(path.name)
    if (path / layout.MANIFEST).exists() or name is not None:
        if name is not None and name[1] in (layout.PARTIAL, layout.DELETING):
            raise CheckpointError(f"{key}={source}: is an unfinished checkpoint; give a committed step-* folder")
        info = inspect(path, verify, name[0] if name else None)
        if not info.whole:
            raise CheckpointError(f"{key}={source}: {info.faults[0]}; give another step or the run's folder")
        return path
    layout.refuse_links(path)
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = layout.committed(root)
    if not steps:
        raise CheckpointError(f"{key}={source}: holds no checkpoint; give another run's folder or a step-* folder")
    newest = newest_valid(root, on_corruption, verify)
    if newest is None:
        raise CheckpointError(f"{key}={source}: no checkpoint in it is whole ({len(steps)} damaged); give another run")
    return newest.path
