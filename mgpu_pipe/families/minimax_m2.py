"""MiniMax M2."""

from mgpu_pipe.families.family import Family

FAMILY = Family(packing="positions", experts="num_local_experts")
