"""Qwen 2."""

from mgpu_pipe.families.family import Family, SequencePlan, Sizes

FAMILY = Family(packing="positions", sequence=SequencePlan(), width_is_heads=True, sizes=Sizes(qkv_bias=True))
