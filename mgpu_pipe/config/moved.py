"""Old dotted names of moved classes and modules, which older run folders and plug-ins use."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

OLD_CLASSES = {
    "mgpu_pipe.optim.adamw_bf16.AdamWBf16": "mgpu_pipe.training.adamw_bf16.AdamWBf16",
    "mgpu_pipe.optim.muon.Muon": "mgpu_pipe.parallel.muon.Muon",
}
"""First dotted name of each moved ``_target_`` class by its present name; hashes use the first."""
NEW_CLASSES = {old: new for new, old in OLD_CLASSES.items()}
MODULES = {
    "mgpu_pipe.config.strategy": "mgpu_pipe.config.group_keys",
    "mgpu_pipe.data.batch_spec": "mgpu_pipe.data.step_batch",
    "mgpu_pipe.objectives.text_config": "mgpu_pipe.objectives.text_keys",
    "mgpu_pipe.strategies": "mgpu_pipe.training",
    "mgpu_pipe.strategies.base": "mgpu_pipe.training.strategy",
    "mgpu_pipe.strategies.deepspeed": "mgpu_pipe.training.deepspeed.deepspeed_strategy",
    "mgpu_pipe.strategies.mesh": "mgpu_pipe.training.mesh",
}
"""Present names of the modules that plug-ins import, by old name."""


def accept_old_modules() -> None:
    """Let plug-ins import modules by old names; each attribute is looked up in the present module on use."""
    for old, new in MODULES.items():
        module = ModuleType(old, f"The old name of {new}.")
        module.__dict__.update(__path__=[], __getattr__=partial(_present, new))
        sys.modules.setdefault(old, module)


def _present(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(module), name)


def with_present_classes(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """``mapping`` with the present name of a moved optimizer class."""
    optimizer = mapping.get("optimizer")
    target = optimizer.get("_target_") if isinstance(optimizer, Mapping) else None
    if not isinstance(optimizer, Mapping) or not isinstance(target, str) or target not in NEW_CLASSES:
        return mapping
    return {**mapping, "optimizer": {**optimizer, "_target_": NEW_CLASSES[target]}}


def with_first_classes(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` with the first name of a moved optimizer class, which keeps hashes stable."""
    optimizer = values.get("optimizer", {})
    target = optimizer.get("_target_")
    return {**values, "optimizer": {**optimizer, "_target_": OLD_CLASSES.get(target, target)}} if optimizer else values
