"""MiniMax."""

from mgpu_pipe.families.family import Family

FAMILY = Family(experts="num_local_experts", softmax_routers=True)
