"""May a run go on from a checkpoint under this configuration? Torch-free.

Every key is in one of three classes (DESIGN 9): it may change freely, it may change and the user is told, or it may
not change. A key that is not listed may not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mgpu_pipe.config.schema import RunConfig

FREE = (
    "run", "strategy", "checkpoint", "trainer", "logger", "callbacks", "launch",
    "model.name",
    "data.micro_batch_size", "data.num_workers", "data.cache_dir", "data.tokenize_workers",
    "objective.loss_chunk_tokens", "objective.sample_prompts", "objective.sample_max_new_tokens",
)  # fmt: skip
"""Where and how fast the run runs: nothing of it changes the result."""

TOLD = (
    "optimizer", "scheduler", "precision",
    "model.attn_implementation", "data.validation_max_samples",
    "trainer.gradient_clip_val", "trainer.deterministic",
)  # fmt: skip
"""Changes the result, and a user may want just that."""

FIXED = ("optimizer._target_",)
"""Exceptions inside the two above: the saved state does not fit another optimizer."""

_ABSENT = "absent"


def check_resume_compatible(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Compare the configuration of a checkpoint with the one that wants to go on from it.

    Args:
        saved: the plain mapping of the saved ``RunConfig``; keys that a newer version added take their defaults.
        current: the plain mapping of the current one.

    Returns:
        ``(errors, notices)``, each line ``key: saved -> current``. With any error the resume is to be refused.
    """
    defaults = _flatten(asdict(RunConfig()))
    before = {**defaults, **_flatten(saved)}
    after = {**defaults, **_flatten(current)}
    errors: list[str] = []
    notices: list[str] = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if old == new:
            continue
        line = f"{key}: {_shown(old)} -> {_shown(new)}"
        if _covers(FIXED, key):
            errors.append(line)
        elif _covers(TOLD, key):
            notices.append(line)
        elif not _covers(FREE, key):
            errors.append(line)
    return errors, notices


def _covers(prefixes: tuple[str, ...], key: str) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def _flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in node.items():
        if isinstance(value, Mapping):
            found.update(_flatten(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
