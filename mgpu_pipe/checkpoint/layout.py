"""Names and states of the folders under ``checkpoints/``.

``step-00000100``            committed
``step-00000100.partial``    being written, or left by a killed save: never read
``step-00000100.replaced``   the committed step while a new save of the same step takes its name; it counts as the step
                             until then
``step-00000100.deleting``   being deleted: never read
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgpu_pipe.checkpoint import file_operations as files
from mgpu_pipe.errors import CheckpointError


@dataclass(frozen=True)
class Step:
    """A committed step with its folder and faults."""

    step: int
    path: Path
    faults: tuple[str, ...] = ()
    """Faults, each with file and, if bytes were read, chunk; empty for a complete step."""
    saved: float | None = None
    """Time of writing the manifest, in seconds since the epoch; None without a manifest."""
    nbytes: int = 0
    """Bytes on the disk."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Content of state.json; empty if it cannot be read."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The saved configuration as written, without environment variables; empty if it cannot be read."""
    other_format: bool = False
    """Whether another version of this program wrote it."""
    ruined: bool = False
    """Whether the next step was not finite (see :func:`mgpu_pipe.checkpoint.selection.mark_ruined`)."""

    @property
    def whole(self) -> bool:
        return not self.faults

    def metric(self, name: str) -> float | None:
        metrics = self.state.get("metrics")
        value = metrics.get(name) if isinstance(metrics, Mapping) else None
        return float(value) if isinstance(value, (int, float)) else None


FORMAT_VERSION = 1
KINDS = ("model", "optimizer")
MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.yaml"

PARTIAL = ".partial"
REPLACED = ".replaced"
DELETING = ".deleting"

_NAME = re.compile(r"step-(\d{8,})(\.partial|\.replaced|\.deleting)?")


def step_folder(root: Path, step: int, suffix: str = "") -> Path:
    return root / f"step-{step:08d}{suffix}"


def tensor_file_name(kind: str, rank: int) -> str:
    return f"{kind}-{rank:05d}.safetensors"


def parse_folder_name(name: str) -> tuple[int, str] | None:
    """Step and suffix of a folder's name; None for other names."""
    match = _NAME.fullmatch(name)
    if match is None or step_folder(Path(), int(match[1])).name != name.removesuffix(match[2] or ""):
        return None
    return int(match[1]), match[2] or ""


def folders(root: Path) -> list[tuple[int, str, Path]]:
    """``(step, suffix, path)`` of every checkpoint folder under ``root``, which may not exist."""
    if not root.is_dir():
        return []
    named = [(parse_folder_name(path.name), path) for path in root.iterdir()]
    return sorted((name[0], name[1], path) for name, path in named if name is not None)


def committed_steps(root: Path) -> dict[int, Path]:
    """The folder of every committed step, in ascending order of steps, without a look at its content."""
    steps: dict[int, Path] = {}
    for step, suffix, path in folders(root):
        if suffix == "" or (suffix == REPLACED and step not in steps):
            steps[step] = path
    return steps


def refuse_links(run: Path) -> None:
    """Raise CheckpointError for a run whose ``checkpoints`` is a symbolic link."""
    if (run / "checkpoints").is_symlink():
        raise CheckpointError(link_fault(run / "checkpoints"))


def link_fault(folder: Path) -> str:
    return f"{folder}: is a symbolic link, which is not followed out of a run; give the folder that it leads to"


def clean(root: Path) -> None:
    """Finish or undo the work of killed processes. Only for the process that owns the run, and never during a save."""
    existing = folders(root)
    if any(suffix for _, suffix, _ in existing):
        # A killed commit may have left a visible name that is not on the disk: flush it before removing the old folder.
        files.sync_folder(root)
    for step, suffix, path in existing:
        final = step_folder(root, step)
        if suffix == REPLACED and not final.exists():
            files.rename(path, final)
            files.sync_folder(root)
        elif suffix:
            files.remove_folder(path)


def commit(root: Path, step: int) -> Path:
    """Rename the finished partial folder; at every instant the old or the new one can be found complete."""
    partial, final, replaced = (step_folder(root, step, suffix) for suffix in (PARTIAL, "", REPLACED))
    occupied = final.exists()
    if occupied:
        files.rename(final, replaced)
        files.sync_folder(root)
    files.rename(partial, final)
    files.sync_folder(root)
    if occupied:
        files.remove_folder(replaced)
    return final


def delete(root: Path, step: int) -> None:
    """Delete a committed step: first make its rename durable, then remove its files."""
    final, replaced, doomed = (step_folder(root, step, suffix) for suffix in ("", REPLACED, DELETING))
    for folder in (doomed, replaced) if final.exists() else (doomed,):
        if folder.exists():
            files.remove_folder(folder)
    files.rename(committed_steps(root)[step], doomed)
    files.sync_folder(root)
    files.remove_folder(doomed)
