"""Selects the checkpoint to resume, the latest complete one, and the checkpoints to delete."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from mgpu_pipe.checkpoint import file_operations as files
from mgpu_pipe.checkpoint import layout
from mgpu_pipe.checkpoint.layout import Step
from mgpu_pipe.checkpoint.manifest import OtherFormatError, Verify, check_folder, read_manifest, read_state
from mgpu_pipe.checkpoint.strict_json import as_object, as_text, canonical, parse
from mgpu_pipe.errors import CheckpointError
from mgpu_pipe.system.local_files import exists, expand_home, is_folder, replace_file

RUINED = "ruined.json"
MAX_BYTES = 1 << 20


def ruined_steps(root: Path) -> set[int]:
    """The committed steps of a ``checkpoints`` folder whose next step was not finite."""
    return set(_read_marked(root))


def mark_ruined(root: Path, steps: Iterable[int]) -> None:
    """Record that the step after each of ``steps`` was not finite; only for the process that owns the run."""
    marked = _read_marked(root)
    for step in steps:
        with suppress(CheckpointError):  # an unreadable step is never used
            marked[step] = read_manifest(layout.committed_steps(root)[step]).root
    replace_file(root / RUINED, canonical({str(step): digest for step, digest in marked.items()}), flush=True)


def _read_marked(root: Path) -> dict[int, str]:
    """Root hash by step, for marked steps that have not changed since."""
    path = root / RUINED
    if not path.exists():
        return {}
    roots: dict[int, str] = {}
    committed = layout.committed_steps(root)
    with suppress(CheckpointError, ValueError):  # a damaged file marks no step
        for name, digest in as_object(parse(files.read_file(path, MAX_BYTES), str(path)), str(path)).items():
            step = int(name)
            if step in committed and read_manifest(committed[step]).root == as_text(digest, str(path)):
                roots[step] = digest
    return roots


_log = logging.getLogger(__name__)


def check_step(folder: Path, verify: Verify, step: int | None = None) -> Step:
    """Check a step's folder, up to the first fault.

    Args:
        verify: ``full`` hashes every byte; ``size`` checks the manifest and the files' sizes; ``off`` only the
            manifest.
        step: the step in the folder's name; None if the name has none.
    """
    try:
        if folder.is_symlink():
            raise CheckpointError(layout.link_fault(folder))
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
    return [check_step(path, verify, step) for step, path in layout.committed_steps(root).items()]


def newest_valid(
    root: Path,
    on_corruption: Literal["fallback", "stop"] = "fallback",
    verify: Verify = "full",
    before: int | None = None,
) -> Step | None:
    """The latest complete step; None without one.

    A warning names file and chunk of a damaged step, and the previous step is tried. A ruined step, whose next step was
    not finite (:func:`mark_ruined`), is the last resort. With several ranks, one calls this and broadcasts the result.

    Args:
        before: only consider steps below this one.

    Raises:
        CheckpointError: a step is damaged, with ``on_corruption="stop"``; or another version wrote a step.
    """
    ruined, last_resort = ruined_steps(root), None
    for step, path in reversed(layout.committed_steps(root).items()):
        if before is not None and step >= before:
            continue
        info = check_step(path, verify, step)
        if info.whole and step not in ruined:
            if last_resort is not None:
                _log.warning("checkpoint of step %d is left out: the step after it was not finite", last_resort.step)
            return info
        if info.whole:
            last_resort = last_resort or info
            continue
        if info.other_format:  # an older step would lose the other version's training
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
    """The step's folder for a run's folder, its ``checkpoints`` folder, or a step's folder.

    Args:
        key: the configuration key of ``source``, for errors.

    Raises:
        CheckpointError: there is no such folder, it has no checkpoint, or the named step is damaged.
    """
    path = expand_home(source)
    if not is_folder(path):
        raise CheckpointError(f"{key}={source}: no such folder; give a run's folder or one of its checkpoints/step-*")
    name = layout.parse_folder_name(path.name)
    if exists(path / layout.MANIFEST) or name is not None:
        if name is not None and name[1] in (layout.PARTIAL, layout.DELETING):
            raise CheckpointError(f"{key}={source}: is an unfinished checkpoint; give a committed step-* folder")
        info = check_step(path, verify, name[0] if name else None)
        if not info.whole:
            raise CheckpointError(f"{key}={source}: {info.faults[0]}; give another step or the run's folder")
        return path
    layout.refuse_links(path)
    root = path / "checkpoints" if is_folder(path / "checkpoints") else path
    steps = layout.committed_steps(root)
    if not steps:
        raise CheckpointError(f"{key}={source}: holds no checkpoint; give another run's folder or a step-* folder")
    newest = newest_valid(root, on_corruption, verify)
    if newest is None:
        raise CheckpointError(f"{key}={source}: no checkpoint in it is whole ({len(steps)} damaged); give another run")
    return newest.path


def steps_to_keep(
    steps: Sequence[int],
    keep_last: int,
    keep_every: int | None = None,
    best_steps: Sequence[int] = (),
    followed_before: int | None = None,
) -> Mapping[int, str]:
    """The steps to keep, each with the reason: ``last``, ``followed``, ``every N`` or ``best``.

    Finite weights can still be ruined, which only the next step shows. So the newest checkpoint followed by a finite
    step stays until a newer one is followed by a finite step too.

    Args:
        steps: complete checkpoints, ascending. The newest always stays; ``keep_last=0`` keeps all.
        followed_before: a finite step followed each of ``steps`` below this one; None means each but the newest.
    """
    last = steps if keep_last == 0 else steps[-max(1, keep_last) :]
    reasons = dict.fromkeys(last, "last")
    for step in followed_steps(steps, followed_before)[-1:]:
        reasons.setdefault(step, "followed")
    if keep_every:
        reasons.update(
            {step: f"every {keep_every}" for step in steps if step % keep_every == 0 and step not in reasons}
        )
    reasons.update({step: "best" for step in best_steps if step in steps and step not in reasons})
    return reasons


def followed_steps(steps: Sequence[int], before: int | None = None) -> Sequence[int]:
    """Those of ``steps`` (ascending) that a finite step followed: all below ``before``; None means all but the last."""
    return steps[:-1] if before is None else [step for step in steps if step < before]


def best(metrics: Mapping[int, float | None], count: int, highest: bool = False) -> list[int]:
    """The ``count`` steps with the lowest (or highest) metric, best first, the earlier of equals first; skips steps
    without it."""
    sign = -1 if highest else 1
    ranked = sorted((sign * value, step) for step, value in metrics.items() if value is not None)
    return [step for _, step in ranked[:count]]


def prune(
    root: Path,
    keep_last: int,
    keep_every: int | None = None,
    best_steps: Sequence[int] = (),
    newest: int | None = None,
    followed_before: int | None = None,
) -> list[int]:
    """Delete the checkpoints that no rule keeps.

    It keeps the newest ``keep_last`` (0 keeps all), the multiples of ``keep_every``, the ``best_steps``, the newest,
    and the newest that a finite step followed (see :func:`steps_to_keep`). Incomplete
    and ruined steps do not count and stay: they replace no good step, and a user can look at them. Deletion first
    renames a step to a name that is never read.

    Args:
        newest: the step that was just saved. The run did not resume from later steps, because their content is damaged
            although their sizes are right. They stay and do not count.

    Returns:
        The deleted steps, ascending.

    Raises:
        OSError: one cannot be deleted.
    """
    if keep_last == 0:
        return []
    steps = [info.step for info in list_steps(root, verify="size") if info.whole]
    ruined = ruined_steps(root)
    steps = [step for step in steps if (newest is None or step <= newest) and step not in ruined]
    to_keep = steps_to_keep(steps, keep_last, keep_every, best_steps, followed_before)
    to_delete = [step for step in steps if step not in to_keep]
    for step in to_delete:
        layout.delete(root, step)
    return to_delete
