"""Checks the fields of rotary position embeddings, which a configuration may write in two forms.

transformers 5 has them in ``rope_parameters``, older configurations in ``rope_theta``, ``rope_scaling`` and
``partial_rotary_factor``. Where a model has both forms, transformers drops one of them without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import ConfigError

PARAMETERS, SCALING = "rope_parameters", "rope_scaling"
THETA, PARTIAL = "rope_theta", "partial_rotary_factor"
KIND = ("rope_type", "type")
ABOVE_ZERO = (THETA, PARTIAL, "factor", "original_max_position_embeddings")


def check_rotary(
    overrides: Mapping[str, Any], fields: Mapping[str, Any], known: set[str], within: str
) -> list[ConfigError]:
    """Errors of the rotary fields of a model, or of a part of one.

    Args:
        overrides: fields that the user sets.
        fields: these and the folder's.
        known: names in ``rope_parameters``; empty where they are unknown.
        within: key of ``overrides``.
    """
    entries = {name: overrides[name] for name in (THETA, PARTIAL) if overrides.get(name) is not None}
    errors = list(_check_entries(within, entries, set()))
    for name in (PARAMETERS, SCALING):
        if isinstance(overrides.get(name), Mapping):
            errors += _check_entries(f"{within}.{name}", overrides[name], known)
    return errors or list(_check_forms(overrides, fields, within))


def _check_entries(key: str, entries: Mapping[str, Any], known: set[str]) -> Iterator[ConfigError]:
    """Errors of misspelt names and impossible numbers. Entries that are mappings are of a type of layers."""
    for name, value in entries.items():
        if isinstance(value, Mapping):
            yield from _check_entries(f"{key}.{name}", value, known)
        elif name in ABOVE_ZERO and value is not None:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                yield ConfigError(f"{key}.{name}", value, "give a number above 0")
        elif value is not None and known and name not in (*known, *KIND) and (close := nearest(name, known)):
            yield ConfigError(f"{key}.{name}", value, f"did you mean {close}?", "no such rope parameter")


def _check_forms(overrides: Mapping[str, Any], fields: Mapping[str, Any], within: str) -> Iterator[ConfigError]:
    """Errors of fields that transformers would drop, as the model has them in the other form."""
    parameters, scaling = fields.get(PARAMETERS), fields.get(SCALING)
    if isinstance(parameters, Mapping) and parameters:
        by_layers = [name for name, entry in parameters.items() if isinstance(entry, Mapping)]
        for name in (THETA, PARTIAL):
            value = overrides.get(name)
            places = [f"{PARAMETERS}.{layers}.{name}" for layers in by_layers] or [f"{PARAMETERS}.{name}"]
            stated = [parameters[layers].get(name) for layers in by_layers] or [parameters.get(name)]
            if value is not None and any(entry is not None and entry != value for entry in stated):
                fix = "use " + " ".join(f"{within}.{place}={value}" for place in places)
                yield ConfigError(f"{within}.{name}", value, fix, f"the model has {name} in {PARAMETERS}")
        wanted = overrides.get(SCALING)
        if isinstance(wanted, Mapping) and wanted:
            entries = {KIND[0] if name == KIND[1] else name: value for name, value in wanted.items()}
            text = ",".join(f"{name}:{value}" for name, value in entries.items())
            fix = f"use {within}.{PARAMETERS}={{{text}}}"
            yield ConfigError(f"{within}.{SCALING}", dict(wanted), fix, f"the model has {PARAMETERS}")
        elif SCALING in overrides and parameters.get("rope_type", "default") != "default":
            fix = f"use {within}.{PARAMETERS}.rope_type=default"
            yield ConfigError(f"{within}.{SCALING}", wanted, fix, f"the model has {PARAMETERS}")
    if (
        isinstance(overrides.get(PARAMETERS), Mapping)
        and isinstance(scaling, Mapping)
        and scaling
        and SCALING not in overrides
    ):
        fix = f"set {within}.{SCALING} and {within}.{THETA}, as the folder's config.json has them"
        yield ConfigError(f"{within}.{PARAMETERS}", dict(overrides[PARAMETERS]), fix, f"the folder has {SCALING}")
