"""Qwen3-VL's language model, which is given positions along four axes: the first tells conversations apart."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(packing="axes", stages=Stages())
