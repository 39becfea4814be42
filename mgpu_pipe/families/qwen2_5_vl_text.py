"""Qwen2.5-VL's language model, which is given positions along four axes: the first tells conversations apart."""

from mgpu_pipe.families.family import Family

FAMILY = Family(packing="axes")
