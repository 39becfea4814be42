"""Checks of ``strategy.parts``: towers that stay whole where tensor parallelism cuts the rest, or keep what it
recomputes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgpu_pipe.architectures.family import CONFIGS
from mgpu_pipe.architectures.find import families_with, family_of
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.topology import ParallelDims


def part_errors(config: RunConfig, dims: ParallelDims, fields: Mapping[str, Any]) -> list[ConfigError]:
    """Errors of ``strategy.parts``, one for each key.

    Args:
        fields: of the model's configuration (:func:`mgpu_pipe.models.fields.resolved_fields`); empty if unknown.
    """
    errors = []
    for part in config.strategy.parts.whole if fields else ():
        reasons = _reasons(config.data, dims, part, str(fields.get("model_type")), fields.get(CONFIGS[part]))
        if reason := next(iter(reasons), ""):
            errors.append(ConfigError(f"strategy.parts.{part}", "whole", "leave it out", reason))
    recompute, towers = config.strategy.parts.activation_checkpointing, [CONFIGS["vision"], CONFIGS["audio"]]
    if recompute != "same" and fields:
        key, fix = "strategy.parts.activation_checkpointing", "use same, or strategy.activation_checkpointing"
        if not any(isinstance(fields.get(tower), Mapping) for tower in towers):
            errors.append(ConfigError(key, recompute, fix, f"the {fields.get('model_type')} family has no tower"))
        elif config.strategy.engine != "mesh":
            errors.append(ConfigError(key, recompute, fix, "ZeRO recomputes all blocks alike"))
    return errors


def _reasons(data: DataConfig, dims: ParallelDims, part: str, model_type: str, tower: object) -> list[str]:
    """Reasons why this part cannot stay whole, or would not be cut."""
    families = families_with(lambda family: part in family.tower_outputs)
    has_families = f"these keep one whole: {', '.join(families)}" if families else "no family keeps one whole"
    cached = getattr(data, "cache_features", False)
    candidates = [
        (f"the {model_type} family has no {part} tower; {has_families}", not isinstance(tower, Mapping)),
        (
            f"no {part} tower of the {model_type} family was tried; {has_families}",
            part not in family_of(model_type).tower_outputs,
        ),
        ("strategy.tp=1 cuts no tower", dims.tp == 1),
        ("data.cache_features=true runs the tower before the first step", part == "vision" and cached),
    ]
    return [reason for reason, applies in candidates if applies]
