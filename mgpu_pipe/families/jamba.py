"""Jamba."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(stages=Stages(norm="final_layernorm"), experts="num_experts", softmax_routers=True)
