"""Looks up a family, and the parallel plans of transformers' own classes, by ``model_type``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from mgpu_pipe.architectures.config_source import class_statement
from mgpu_pipe.architectures.family import COLUMNS, Family, Packing, Recordings, Role, Sight, Stages, Style
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


def image_token(config: Any) -> int | None:
    """Id of the token of a picture's places, which the model with ``config`` or its vision part names; None without."""
    token = getattr(config, "image_token_id", None)
    return getattr(getattr(config, "vision_config", None), "image_token_id", None) if token is None else int(token)


def takes_media(config: Any) -> bool:
    """Whether pictures or recordings stand in the texts of the model with this transformers configuration."""
    return image_token(config) is not None or bool(family_of(config.model_type).recordings)


def recordings_of(model_type: str, encoder: object) -> Recordings:
    """Parts of a recording that a model reads; empty for a Gemma 4 that has no ``encoder``.

    Args:
        encoder: the field ``audio_config`` of its configuration.
    """
    kind = family_of(model_type).recordings
    return kind if encoder or kind != "frames" else ""


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
    """Error of the model's fields with which tensor parallelism cannot cut the family."""
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
    """Separation of documents in one row of the model with these fields; ``none``: not supported."""
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


STYLES: Mapping[str, Style | None] = {
    "colwise": "column",
    "rowwise": "row",
    "packed_colwise": "packed",
    "replicated_with_grad_allreduce": "own_heads",
    "moe_tp_experts": "experts",
    # These two come in pairs around modules that cannot be cut; whole on every rank they compute the same.
    "colwise_gather_output": None,
    "rowwise_split_input": None,
    "replicate": None,
    "embedding_rowwise": None,
}
"""transformers' styles; None: whole (the vocabulary is cut by :mod:`mgpu_pipe.parallel.tensor.heads`)."""


@lru_cache(maxsize=64)
def library_plan(model_type: str, name: str) -> Mapping[str, Any]:
    """Plan ``name`` of the family's configuration class, read from its source; empty without one."""
    statement = class_statement(model_type)
    for item in statement.body if statement is not None else []:
        if not isinstance(item, ast.Assign):
            continue
        if name in [target.id for target in item.targets if isinstance(target, ast.Name)]:
            try:
                plan = ast.literal_eval(item.value)
            except ValueError:  # built from other plans
                return {}
            return dict(plan) if isinstance(plan, dict) else {}
    return {}


def library_stages(model_type: str) -> Stages | None:
    """Pipeline stages from ``base_model_pp_plan``; None unless it is embedding, one list of blocks and norm.

    The plan has each module's inputs and outputs in the order of the forward pass.
    """
    plan = library_plan(model_type, "base_model_pp_plan")
    names = list(plan)
    blocks = [name for name, (inputs, _) in plan.items() if inputs == ["hidden_states", "attention_mask"]]
    if len(blocks) != 1 or len(names) < 3 or names[-2] != blocks[0]:
        return None
    return Stages(names[0], blocks[0], names[-1], after_embedding=tuple(names[1:-2]))
