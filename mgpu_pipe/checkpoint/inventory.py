"""Lists and inspects a run's checkpoints: step, size, configuration and faults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from mgpu_pipe.checkpoint import file_operations as files
from mgpu_pipe.checkpoint import layout
from mgpu_pipe.checkpoint.chunks import CHUNK_BYTES, ChunkedFile, FileRecord
from mgpu_pipe.checkpoint.layout import Step
from mgpu_pipe.checkpoint.manifest import Manifest, Verify, hashing_pool, read_manifest, read_state
from mgpu_pipe.checkpoint.selection import ruined_steps
from mgpu_pipe.config.convert import leaves
from mgpu_pipe.errors import CheckpointError, RunFolderError
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, exists, expand_home, is_file, is_folder, parse_yaml


def steps_under(source: Path) -> tuple[Path, dict[int, Path]]:
    """The ``checkpoints`` folder of ``source`` and its committed steps, ascending.

    Args:
        source: a run's folder, its ``checkpoints`` folder, or a step's folder (only that step).

    Raises:
        RunFolderError: there is no such folder.
        CheckpointError: the folder has no checkpoint.
    """
    folder = expand_home(source)
    if not is_folder(folder):
        raise RunFolderError(f"{source}: no such folder; give a run's folder or one of its checkpoints/step-*")
    layout.refuse_links(folder)
    name = layout.parse_folder_name(folder.name)
    if name is not None or exists(folder / layout.MANIFEST):
        if name is not None and name[1] in (layout.PARTIAL, layout.DELETING):
            raise CheckpointError(f"{source}: is an unfinished checkpoint; give a committed step-* folder")
        step = name[0] if name is not None else read_manifest(folder).step
        return folder.parent, {step: folder}
    root = folder / "checkpoints" if is_folder(folder / "checkpoints") else folder
    steps = layout.committed_steps(root)
    if not steps:
        raise CheckpointError(f"{source}: holds no checkpoint; give a run's folder or one of its checkpoints/step-*")
    return root, steps


def leftovers(root: Path) -> list[Path]:
    """Folders of killed processes or of a save in progress; the next save removes them."""
    committed = set(layout.committed_steps(root).values())
    return [path for _, _, path in layout.folders(root) if path not in committed]


def inspect_step(step: int, folder: Path, verify: Verify) -> Step:
    """Everything about one committed step, faults included; ``verify`` hashes chunks (``full``) or checks sizes."""
    if folder.is_symlink():
        return Step(step, folder, (layout.link_fault(folder),))
    try:
        saved = (folder / layout.MANIFEST).stat().st_mtime if is_file(folder / layout.MANIFEST) else None
        nbytes = sum(file.lstat().st_size for file in folder.iterdir() if is_file(file))
    except OSError as error:
        return Step(step, folder, (f"{folder}: cannot be read ({error.strerror})",))
    config = _config(folder)
    try:
        manifest = read_manifest(folder)
        if manifest.step != step:
            raise CheckpointError(f"{folder}: its manifest is of step {manifest.step}")
    except CheckpointError as error:
        return Step(step, folder, (str(error),), saved, nbytes, config=config)
    faults = file_faults(folder, manifest, verify)
    state: dict[str, Any] = {}
    try:
        state = read_state(folder, manifest, "off")
    except CheckpointError as error:
        faults = faults or [str(error)]
    ruined = step in ruined_steps(folder.parent)
    return Step(step, folder, tuple(faults), saved, nbytes, state, config, ruined=ruined)


def file_faults(folder: Path, manifest: Manifest, verify: Verify) -> list[str]:
    """All faults of a manifest's files: missing, of another size and, with ``full``, every damaged chunk."""
    items = sorted(manifest.files.items())
    if verify != "full":
        return [fault for name, record in items for fault in _size_faults(folder / name, record)]
    with hashing_pool() as pool:
        tasks = [_submit_chunks(pool, folder / name, record) for name, record in items]
        return [fault for futures in tasks for future in futures for fault in future.result()]


def _submit_chunks(pool: ThreadPoolExecutor, path: Path, record: FileRecord) -> list[Any]:
    """Tasks that check one file: its size, then ranges of its chunks in parallel."""
    missing = _size_faults(path, record)
    if missing:
        return [pool.submit(lambda: missing)]
    count = len(record.sha256)
    return [
        pool.submit(_chunk_faults, path, record, first, min(first + _CHUNKS_A_TASK, count))
        for first in range(0, count, _CHUNKS_A_TASK)
    ]


_CHUNKS_A_TASK = 64


def _size_faults(path: Path, record: FileRecord) -> list[str]:
    try:
        with ChunkedFile(path, record):
            return []
    except CheckpointError as error:
        return [str(error)]


def _chunk_faults(path: Path, record: FileRecord, first: int, end: int) -> list[str]:
    """All faults of the chunks ``[first, end)``; unlike a load, it does not stop at the first."""
    faults: list[str] = []
    buffer = memoryview(bytearray(CHUNK_BYTES))
    try:
        with ChunkedFile(path, record) as file:
            for index in range(first, end):
                start = index * CHUNK_BYTES
                try:
                    file.read_into(start, buffer[: min(CHUNK_BYTES, file.size - start)])
                except CheckpointError as error:
                    faults.append(str(error))
    except CheckpointError as error:
        faults.append(str(error))
    return faults


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = parse_yaml(files.read_file(folder / layout.CONFIG, MAX_CONFIG_BYTES))
    except (CheckpointError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return dict(config) if isinstance(config, Mapping) else {}


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Leaves that differ: dotted path and both values as JSON, ``-`` for a missing one."""
    a, b = leaves(first), leaves(second)
    return [
        (key, _value_text(a, key), _value_text(b, key))
        for key in dict.fromkeys([*a, *b])
        if key not in a or key not in b or a[key] != b[key]
    ]


def _value_text(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], default=str) if key in values else "-"
