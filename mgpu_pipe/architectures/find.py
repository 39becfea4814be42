"""Looks up a family by its ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mgpu_pipe.architectures.family import COLUMNS, Family, Packing, Role, Sight, Stages
from mgpu_pipe.architectures.library_plans import STYLES, library_plan, library_stages
from mgpu_pipe.architectures.media_families import MEDIA_FAMILIES
from mgpu_pipe.architectures.text_families import TEXT_FAMILIES
from mgpu_pipe.errors import ConfigError

FAMILIES: Mapping[str, Family] = {**TEXT_FAMILIES, **MEDIA_FAMILIES}
"""Known families by ``model_type``."""
UNKNOWN = Family()


def family_of(model_type: str) -> Family:
    """Family of ``model_type``; the defaults for a family without an entry."""
    return FAMILIES.get(model_type, UNKNOWN)


def families_with(has: Callable[[Family], object]) -> tuple[str, ...]:
    """Sorted model types of the known families for which ``has`` is true."""
    return tuple(name for name in sorted(FAMILIES) if has(FAMILIES[name]))


def families_in_role(role: Role) -> tuple[str, ...]:
    """Sorted model types of the families that were tested in a role."""
    return families_with(lambda family: role in family.roles)


def sight_of(model_type: str) -> Sight:
    """How a vision-language model's text contains pictures; pictures of one size for an unknown family."""
    return family_of(model_type).sight or Sight()


def stages_of(model_type: str) -> Stages | None:
    """Modules that a pipeline distributes; None if the family cannot be cut into stages."""
    stages = family_of(model_type).stages
    return library_stages(model_type) if stages == "brought" else stages


def has_tensor_plan(model_type: str) -> bool:
    """Whether tensor parallelism can cut the family."""
    family = family_of(model_type)
    styles = library_plan(model_type, "base_model_tp_plan").values()
    cuts = any(STYLES.get(style) in COLUMNS for style in styles)
    return family.tensor and (bool(family.modules) or (cuts and all(style in STYLES for style in styles)))


def tensor_if_errors(fields: Mapping[str, Any], model_type: str, tp: int) -> list[ConfigError]:
    """Error of fields with which tensor parallelism cannot cut the family.

    Args:
        fields: the model's configuration.
    """
    ways = family_of(model_type).tensor_if
    if not ways or any(all(_value(fields, name) == value for name, value in way.items()) for way in ways):
        return []
    alternatives = [", ".join(f"{name}={str(value).lower()}" for name, value in way.items()) for way in ways]
    fix = f"use strategy.tp=1, or model.config of {' or of '.join(alternatives)}"
    return [ConfigError("strategy.tp", tp, fix, f"this kind of {model_type} has weights that cannot be cut")]


def _value(fields: Mapping[str, Any], name: str) -> object:
    """The field ``name``, with dots before those of a part; False where a part does not say it."""
    outer, _, inside = name.rpartition(".")
    if not outer:
        return fields.get(name)
    part = fields.get(outer)
    value = part.get(inside) if isinstance(part, Mapping) else getattr(part, inside, None)
    return False if value is None else value


def document_isolation(model_type: str, fields: Mapping[str, Any]) -> Packing:
    """Separation of documents in one row of the model; ``none``: not supported.

    Args:
        fields: the model's configuration.
    """
    family = family_of(model_type)
    return "none" if fields.get(family.unpacked_with) else family.packing


def axes_of(model_type: str) -> str:
    """Axes that the family supports, for the error about another axis."""
    family = family_of(model_type)
    has = {
        "tp": has_tensor_plan(model_type),
        "pp": stages_of(model_type) is not None,
        "cp": family.context,
        "ep": bool(family.experts),
    }
    return ", ".join(["dp_replicate", "dp_shard", *(axis for axis, there in has.items() if there)])
