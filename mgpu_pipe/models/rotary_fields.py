"""Checks names and numbers of the fields of rotary position embeddings, which a configuration may write in two forms.

transformers 5 has them in ``rope_parameters``, older configurations in ``rope_theta``, ``rope_scaling`` and
``partial_rotary_factor``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import ConfigError

PARAMETERS, SCALING = "rope_parameters", "rope_scaling"
THETA, PARTIAL = "rope_theta", "partial_rotary_factor"
BASES = (THETA, PARTIAL, "rotary_emb_base", "global_rope_theta", "local_rope_theta", "rope_local_base_freq")
"""Single fields, some of them of one family, that ``rope_parameters`` replaced."""
KIND = ("rope_type", "type")
ABOVE_ZERO = (*BASES, "factor", "original_max_position_embeddings")


def check_rotary(overrides: Mapping[str, Any], known: set[str], within: str) -> Iterator[ConfigError]:
    """Errors of the rotary fields of a model, or of a part of one.

    Args:
        overrides: fields that the user sets.
        known: names in ``rope_parameters``; empty where they are unknown.
        within: key of ``overrides``.
    """
    yield from _check_entries(within, {name: overrides[name] for name in BASES if name in overrides}, set())
    for name in (PARAMETERS, SCALING):
        if isinstance(overrides.get(name), Mapping):
            yield from _check_entries(f"{within}.{name}", overrides[name], known)


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
