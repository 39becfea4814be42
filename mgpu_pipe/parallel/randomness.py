"""Random streams of a training step (dropout), a pure function of seed, step and the rank's place in the mesh.

Keyed like this, a resumed run draws what the uninterrupted one drew. Tensor-parallel ranks have two streams:
:mod:`.random_streams`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from mgpu_pipe.models.fields import is_noise

STATISTICAL = "statistical only: dropout draws different masks under each topology"
"""How a run with dropout compares with the same run on other processes."""


def step_seed(seed: int, step: int, place: int) -> int:
    """A 63-bit seed for one optimizer step at one place, as ``ParallelDims.randomness_rank`` numbers them."""
    digest = hashlib.sha256(f"{seed}/{step}/{place}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def uses_dropout(model: torch.nn.Module) -> bool:
    """Whether anything random is on in ``model``: a dropout module, or a field of its configuration, for attention's
    dropout is a function, and so is a router's noise."""
    if any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    return config is not None and _has_noise(config.to_dict())


def _has_noise(fields: Mapping[Any, Any]) -> bool:
    """Whether a field, or one of a nested configuration (a language model inside of another), is noise."""
    return any(
        _has_noise(value)
        if isinstance(value, Mapping)
        else is_noise(str(name)) and isinstance(value, int | float) and value > 0
        for name, value in fields.items()
    )
