"""GLM 4 MoE."""

from mgpu_pipe.families.family import Family

FAMILY = Family(packing="positions", experts="n_routed_experts")
