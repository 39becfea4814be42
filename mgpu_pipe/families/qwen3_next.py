"""Qwen 3 Next."""

from mgpu_pipe.families.family import Family

FAMILY = Family(experts="num_experts", softmax_routers=True)
