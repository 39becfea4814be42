"""biogpt."""

from __future__ import annotations

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(stages=Stages(norm="layer_norm", added=("embed_positions",)))
