"""GLM 4 MoE lite."""

from mgpu_pipe.families.family import Family

FAMILY = Family(experts="n_routed_experts")
