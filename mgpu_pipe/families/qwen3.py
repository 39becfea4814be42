"""Qwen 3."""

from mgpu_pipe.families.family import Family, SequencePlan, Sizes

FAMILY = Family(
    packing="positions", sequence=SequencePlan(), sizes=Sizes("attention_bias", "attention_bias", head_norms=True)
)
