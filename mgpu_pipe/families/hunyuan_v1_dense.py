"""HunYuan."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(packing="positions", stages=Stages())
