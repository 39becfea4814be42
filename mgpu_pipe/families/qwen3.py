"""Qwen 3."""

from mgpu_pipe.families.family import Family, SequencePlan

FAMILY = Family(packing="positions", sequence=SequencePlan())
