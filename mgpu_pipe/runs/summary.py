"""``summary.json``: how a run ended. Replaced whole, so that a reader never meets half of it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.plain_files import MAX_JSON_BYTES, parse_json, read_bytes
from mgpu_pipe.config.replace_file import replace_file


def read_summary(paths: RunPaths) -> dict[str, object]:
    """The run's summary; empty where it has none yet, or none that can be read."""
    try:
        summary = parse_json(read_bytes(paths.summary, MAX_JSON_BYTES), paths.summary)
    except (FileNotFoundError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def write_summary(paths: RunPaths, summary: Mapping[str, object]) -> None:
    replace_file(paths.summary, json.dumps(summary, indent=2, default=str) + "\n")


def amend_summary(paths: RunPaths, **changes: object) -> None:
    """Change some entries and keep the rest."""
    write_summary(paths, {**read_summary(paths), **changes})
