"""Ernie 4.5 MoE."""

from mgpu_pipe.families.family import Family

FAMILY = Family(packing="positions", experts="moe_num_experts", softmax_routers=True)
