"""Ranges of model fields that transformers' classes take and the first step would refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.models.field_sizes import EXPERTS
from mgpu_pipe.models.fields import resolved_fields

DROPS = re.compile(r"(dropout|pdrop|dropout_rate|dropout_prob|drop_rate)$")
"""Fields that hold the probability to drop a value."""
CHOSEN = "num_experts_per_tok"
"""Field that holds the number of experts that see a token."""


def check_ranges(model: ModelConfig) -> None:
    """Raise for values of ``model.config`` out of range; a folder's fields alone are not refused.

    Raises:
        ConfigErrors: the fields, each with its range.
    """
    errors = list(_dropped(model.config, "model.config"))
    fields = resolved_fields(model)
    experts = next((fields[name] for name in EXPERTS if isinstance(fields.get(name), int)), 0)
    chosen = fields.get(CHOSEN)
    if CHOSEN in model.config and isinstance(chosen, int) and 0 < experts < chosen:
        fix = f"use at most {experts}"
        errors.append(ConfigError(f"model.config.{CHOSEN}", chosen, fix, f"a layer has {experts} experts"))
    if errors:
        raise ConfigErrors(errors)


def _dropped(fields: Mapping[str, Any], within: str) -> Iterator[ConfigError]:
    """Errors of probabilities, in a model and its parts."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and name.endswith("_config"):
            yield from _dropped(value, f"{within}.{name}")
        elif DROPS.search(name) and isinstance(value, int | float) and not 0 <= value <= 1:
            yield ConfigError(f"{within}.{name}", value, "use a probability, from 0 to 1")
