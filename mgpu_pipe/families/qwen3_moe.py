"""Qwen 3 MoE."""

from mgpu_pipe.families.family import Family, SequencePlan

FAMILY = Family(packing="positions", sequence=SequencePlan(), experts="num_experts", softmax_routers=True)
