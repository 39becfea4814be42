"""Qwen3-VL's language model."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(stages=Stages())
