"""Ernie 4.5."""

from mgpu_pipe.families.family import Family

FAMILY = Family(packing="positions")
