"""DeepSeek V3."""

from mgpu_pipe.families.family import Family

FAMILY = Family(experts="n_routed_experts")
