"""Finds what is known of a family by its ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.brought import STYLES, brought_plan, brought_stages
from mgpu_pipe.families.family import COLUMNS, Family, Packing, Stages

FOLDER = Path(__file__).parent
UNKNOWN = Family()


@lru_cache(maxsize=256)
def family_of(model_type: str) -> Family:
    """What the family's file says; the defaults where it has none."""
    name = model_type.replace("-", "_")
    if not name.isidentifier() or not (FOLDER / f"{name}.py").is_file():
        return UNKNOWN
    return getattr(import_module(f"{__package__}.{name}"), "FAMILY", UNKNOWN)


def families_with(has: Callable[[Family], object]) -> list[str]:
    """The model types with a file that says so, in order; for messages."""
    return [name for name in sorted(path.stem for path in FOLDER.glob("*.py")) if has(family_of(name))]


def stages_of(model_type: str) -> Stages | None:
    """What a pipeline cuts apart; None where the family cannot be cut into stages."""
    stages = family_of(model_type).stages
    return brought_stages(model_type) if stages == "brought" else stages


def has_tensor_plan(model_type: str) -> bool:
    """Whether tensor parallelism can cut the family."""
    family = family_of(model_type)
    styles = brought_plan(model_type, "base_model_tp_plan").values()
    cuts = any(STYLES.get(style) in COLUMNS for style in styles)
    return family.tensor and (bool(family.modules) or (cuts and all(style in STYLES for style in styles)))


def tensor_if_errors(fields: Mapping[str, Any], model_type: str, tp: int) -> list[ConfigError]:
    """For which field tensor parallelism does not cut the family.

    Args:
        fields: of the model's configuration.
    """
    ways = family_of(model_type).tensor_if
    if not ways or any(all(fields.get(name) == value for name, value in way.items()) for way in ways):
        return []
    shown = [", ".join(f"{name}={str(value).lower()}" for name, value in way.items()) for way in ways]
    fix = f"use strategy.tp=1, or model.config of {' or of '.join(shown)}"
    return [ConfigError("strategy.tp", tp, fix, f"this kind of {model_type} has fused matrices that cannot be cut")]


def document_isolation(model_type: str, fields: Mapping[str, Any]) -> Packing:
    """How documents of one row are kept apart in a model of that family; ``none``: they cannot be.

    Args:
        fields: of the model's configuration.
    """
    family = family_of(model_type)
    return "none" if fields.get(family.unpacked_with) else family.packing


def axes_of(model_type: str) -> str:
    """The axes over which the family can be spread, for the error that another one is not among them."""
    family = family_of(model_type)
    has = {
        "tp": has_tensor_plan(model_type),
        "pp": stages_of(model_type) is not None,
        "cp": family.context,
        "ep": bool(family.experts),
    }
    return ", ".join(["dp_replicate", "dp_shard", *(axis for axis, there in has.items() if there)])
