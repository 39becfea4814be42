"""``samples.jsonl``: what the model made of the prompts as training went on, a line for each time.

A resume cuts the lines of later steps, as it does with the metrics. A line that a crash tore is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgpu_pipe.config.plain_files import MAX_JSON_BYTES, read_bytes
from mgpu_pipe.config.replace_file import replace_file
from mgpu_pipe.errors import RunFolderError


def append_samples(path: Path, step: int, samples: Sequence[Mapping[str, str]]) -> None:
    """Add the samples of a step.

    Raises:
        RunFolderError: the disk is full or gone.
    """
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "samples": list(samples)}) + "\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def read_samples(path: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """Steps and their samples, in the file's order; none where there is no file."""
    try:
        lines = read_bytes(path, MAX_JSON_BYTES).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    return [one for one in map(_parsed, lines) if one is not None]


def cut_samples_after(path: Path, step: int) -> None:
    """Drop the samples of steps later than ``step``.

    Raises:
        RunFolderError: the file cannot be written.
    """
    if not path.exists():
        return
    kept = [{"step": at, "samples": samples} for at, samples in read_samples(path) if at <= step]
    try:
        replace_file(path, "".join(json.dumps(one) + "\n" for one in kept))
    except OSError as error:
        raise _unwritable(path, error) from error


def _parsed(line: str) -> tuple[int, list[dict[str, Any]]] | None:
    try:
        one = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(one, dict) or not isinstance(one.get("step"), int) or not isinstance(one.get("samples"), list):
        return None
    return one["step"], [sample for sample in one["samples"] if isinstance(sample, dict)]


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(f"{path}: cannot write samples ({error.strerror}); free space or make the folder writable")
