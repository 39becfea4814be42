"""Phi-MoE: no expert parallelism, for its router draws lots in training."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(packing="positions", stages=Stages())
