"""Random streams of a training step (dropout), a pure function of seed, step and data-parallel rank.

Keyed like this, a resumed run draws what the uninterrupted one drew, and tensor-parallel ranks draw alike.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def step_seed(seed: int, step: int, data_parallel_rank: int) -> int:
    """A 63-bit seed for one optimizer step on one data-parallel rank."""
    digest = hashlib.sha256(f"{seed}/{step}/{data_parallel_rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def uses_dropout(model: torch.nn.Module) -> bool:
    """Whether any dropout of ``model`` is on: a module's, or one of its configuration (attention's is a function)."""
    if any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    fields = config.to_dict() if config is not None else {}
    return any("drop" in key and isinstance(value, float) and value > 0 for key, value in fields.items())
