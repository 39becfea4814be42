"""Finds what is known of a family by its ``model_type``."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

from mgpu_pipe.families.brought import brought_stages
from mgpu_pipe.families.family import Family, Stages

UNKNOWN = Family()


@lru_cache(maxsize=256)
def family_of(model_type: str) -> Family:
    """What the family's file says; the defaults where it has none."""
    name = f"{__package__}.{model_type.replace('-', '_')}"
    if not model_type.replace("-", "_").isidentifier() or find_spec(name) is None:
        return UNKNOWN
    family = import_module(name).FAMILY
    assert isinstance(family, Family)
    return family


def stages_of(model_type: str) -> Stages | None:
    """What a pipeline cuts apart; None where the family cannot be cut into stages."""
    stages = family_of(model_type).stages
    return brought_stages(model_type) if stages == "brought" else stages
