"""EXAONE MoE."""

from mgpu_pipe.families.family import Family

FAMILY = Family(experts="num_experts")
